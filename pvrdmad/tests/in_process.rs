//! Tests of a vfio-user server in this process. They are one program, because a program for each would compile the
//! common parts anew.
//!
//! Tests that start processes are another one: between fork and exec, a new process holds the sockets of all threads,
//! and a server then turns away the next client because the one before seems to be there.

#![expect(clippy::unwrap_used, reason = "a test")]

mod common;

mod crate_client;
mod hostile_client;
mod interrupts;
mod migration;
mod qemu_client;
mod recover;
mod transfer;
