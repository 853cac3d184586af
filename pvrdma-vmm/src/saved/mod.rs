//! A saved machine, as a file or on its way to another process.
//!
//! | module | content |
//! | --- | --- |
//! | `frames` | the stream: frames of bounded length |
//! | `messages` | the content of frames, except memory and the state of the two functions |
//! | `pages` | guest memory: runs of pages that are not zero, or that were written |
//! | `dirty` | sets of written pages |
//! | `write_log` | the log of writes to the memory of a machine: by its processors (KVM), its functions and its disks |
//! | `machine` | all parts of a stopped machine |
//! | `processor` | registers of a processor, by KVM |
//! | `controllers` | interrupt controllers, timer and clock, by KVM |
//! | `host` | comparison of the two hosts and machines |
//! | `file` | `--save` and `--restore` |
//! | `source`, `destination` | the two ends of a migration |
//! | `link` | their connection |
//! | `requests` | the signals that request and cancel it |
//! | `departure` | a machine on its way out, from the request to its end |
//! | `origin` | a machine that continues: `--restore` and `--incoming` |
//!
//! The stream is a hello, the memory, and then the state; the end frame is the last. It is read completely before
//! anything of it runs. In a migration, frames in both directions decide where the machine runs. Structures of KVM are
//! in it as KVM defines them, so both ends must have the same model of processor. This is an example:
//! `pvrdma-saved-state` shows a format that several versions of a program can read.
//!
//! A stream holds the guest's memory and keys of its connections: its file is readable only by its owner.

pub(crate) mod controllers;
pub(crate) mod departure;
mod destination;
pub(crate) mod dirty;
mod file;
mod frames;
pub(crate) mod host;
mod link;
pub(crate) mod machine;
pub(crate) mod messages;
pub(crate) mod origin;
mod pages;
pub(crate) mod processor;
pub(crate) mod requests;
mod source;
mod write_log;

#[cfg(test)]
mod tests;
