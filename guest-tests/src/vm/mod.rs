//! A virtual machine and what runs in it.

mod builder;
mod channel;
mod job;
mod machine;
mod monitor;
mod qemu;
mod start;

pub(crate) use builder::{Card, EMPTY_SLOT, FOLDER_TAG, Folder, MemoryKind, Nic, NicModel, RunAs, VmBuilder};
pub(crate) use job::Job;
pub(crate) use machine::{SHORT, Vm};
pub(crate) use qemu::{has_kvm, processor, watchdog};
pub(crate) use start::Prepared;
