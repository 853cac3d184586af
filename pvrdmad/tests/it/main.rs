//! Tests of the daemon as a process, of its parts, and of the files that are shipped with it.
//!
//! They are one program, because a program for each would compile the common parts anew. Tests that change limits of
//! their own process, or look at it, are programs of their own beside this folder.

#![expect(clippy::unwrap_used, reason = "a test")]

mod common;

mod capture;
mod carrier;
mod changes;
mod counters;
mod crash;
mod crate_client;
mod daemon;
mod doorbells;
mod endless_close;
mod failures;
mod faults;
mod from_vmx;
mod guest_check;
mod hand_overs;
mod hostile_client;
mod interrupts;
mod isolation;
mod keeper;
mod killed;
mod killed_clients;
mod live_migration;
mod messages;
mod metrics;
mod migratable;
mod migration;
mod mistakes;
mod networks;
mod package;
mod proxmox;
mod qemu_client;
mod recover;
mod service;
mod settings;
mod show;
mod take_over;
mod transfer;
mod upgrade;
mod uplink;
mod version;
mod wireshark;
