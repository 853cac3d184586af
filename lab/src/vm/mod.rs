//! A virtual machine, and the programs that run in it.

mod builder;
mod channel;
mod job;
mod machine;
mod monitor;
mod qemu;
mod start;

pub use builder::{Card, EMPTY_SLOT, FOLDER_TAG, Folder, MemoryKind, Nic, NicModel, RunAs, VmBuilder};
pub use job::Job;
pub use machine::{SHORT, Vm};
pub use qemu::{has_kvm, processor, watchdog};
pub use start::Prepared;
