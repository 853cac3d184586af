//! Doorbells without VM exits: doorbell pages that are mapped as memory while a guest's programs poll.

use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use anyhow::{Context, Result};
use kvm_ioctls::VmFd;
use pvrdma_dev::{MappedDoorbells, WindowPolicy, WindowWatcher};
use pvrdma_pci_function::PciFunction;
use pvrdma_pci_slot::{Slot, kvm::KvmPages};

use crate::fabric::{RDMA, RdmaDevice};

/// First KVM memory slot for doorbell pages. The slots below hold guest memory.
const FIRST_SLOT: u32 = 8;

/// Thread that polls a guest's rings while its doorbells do not trap. Dropping this ends the thread.
pub(crate) struct Doorbells {
    watcher: Arc<WindowWatcher>,
    thread: Option<JoinHandle<()>>,
}

impl Doorbells {
    /// Allows doorbell pages of the RDMA device in `pair` to be mapped as memory.
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
        // If the thread has panicked, the panic message has already been printed.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
