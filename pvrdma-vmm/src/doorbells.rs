//! Doorbells that do not stop a processor: pages of them that are memory while a guest's programs poll.

use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use anyhow::{Context, Result};
use kvm_ioctls::VmFd;
use pvrdma_dev::{MappedDoorbells, PciFunction, WindowPolicy, WindowWatcher};
use pvrdma_pci_slot::Slot;
use pvrdma_pci_slot::kvm::KvmPages;

use crate::fabric::{RDMA, RdmaDevice};

/// KVM's memory slots from this one on are for doorbell pages. Those before are for the guest's memory.
const FIRST_SLOT: u32 = 8;

/// A thread that watches a guest's rings while its doorbells are not heard. It ends when this is dropped.
pub(crate) struct Doorbells {
    watcher: Arc<WindowWatcher>,
    thread: Option<JoinHandle<()>>,
}

impl Doorbells {
    /// Lets doorbell pages of the RDMA device in `pair` be memory.
    pub(crate) fn start(policy: WindowPolicy, vm: &Arc<VmFd>, pair: &Slot, device: &Arc<RdmaDevice>) -> Result<Self> {
        let pages = device.doorbell_window().map_or(0, |window| window.pages.end);
        let pages = KvmPages::new(Arc::clone(vm), FIRST_SLOT, pages).context("doorbell pages")?;
        let window = pair.doorbell_window(RDMA, pages).context("the device has no doorbell pages")?;
        let watcher = WindowWatcher::new(device, window, policy);
        let (watch, device) = (Arc::clone(&watcher), Arc::clone(device));
        let run = move || watch.run(&*device as &dyn MappedDoorbells);
        let thread = Builder::new().name("doorbells".to_owned()).spawn(run).context("cannot start a thread")?;
        Ok(Self { watcher, thread: Some(thread) })
    }
}

impl Drop for Doorbells {
    fn drop(&mut self) {
        self.watcher.stop();
        // If it has panicked, it has said so.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
