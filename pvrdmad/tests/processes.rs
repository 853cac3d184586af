//! Tests of the daemon as a process, and of the files that are shipped with it. They are one program, because a program
//! for each would compile the common parts anew. Tests that change limits of their own process, or look at it, are
//! programs of their own.

#![expect(clippy::unwrap_used, reason = "a test")]

mod common;

mod capture;
mod carrier;
mod changes;
mod counters;
mod crash;
mod daemon;
mod doorbells;
mod endless_close;
mod failures;
mod faults;
mod from_vmx;
mod guest_check;
mod hand_overs;
mod isolation;
mod keeper;
mod killed;
mod killed_clients;
mod live_migration;
mod messages;
mod metrics;
mod migratable;
mod mistakes;
mod networks;
mod package;
mod proxmox;
mod service;
mod settings;
mod show;
mod take_over;
mod upgrade;
mod uplink;
mod version;
mod wireshark;
