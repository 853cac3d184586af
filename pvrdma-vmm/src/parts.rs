//! Parts of a machine that are saved with it.

use std::sync::Arc;

use anyhow::{Context, Error, Result};
use pvrdma_guest_memory::DmaSpace;
use pvrdma_pci_function::Migratable;
use pvrdma_pci_slot::{PciBus, Slot};
use pvrdma_vmxnet3::Vmxnet3Device;

use crate::disk::Disk;
use crate::fabric::RdmaDevice;
use crate::power::Power;
use crate::serial::{Console, SocketPort};

/// Slot of the first disk.
pub(crate) const FIRST_DISK: u8 = 1;

/// Returns `true` if a slot holds one of this number of disks.
pub(crate) fn is_disk(slot: u8, disks: usize) -> bool {
    slot.checked_sub(FIRST_DISK).is_some_and(|index| usize::from(index) < disks)
}

/// Parts of a machine that have a state of their own, besides its processors and memory.
pub(crate) struct Parts {
    pub(crate) bus: Arc<PciBus>,
    /// All slots of the bus, in one order for all machines of a kind.
    pub(crate) slots: Vec<Arc<Slot>>,
    pub(crate) disks: Vec<Arc<Disk>>,
    pub(crate) nic: Arc<Vmxnet3Device>,
    pub(crate) rdma: Arc<RdmaDevice>,
    /// Guest memory as the two functions access it.
    pub(crate) spaces: [Arc<DmaSpace>; 2],
    pub(crate) power: Arc<Power>,
    pub(crate) console: Console,
    pub(crate) second: Option<SocketPort>,
}

impl Parts {
    /// Returns both functions with their names, in the order of a stream.
    pub(crate) fn functions(&self) -> [(&'static str, &dyn Migratable); 2] {
        [("network function", &*self.nic), ("RDMA device", &*self.rdma)]
    }

    /// Lets everything continue after a restore.
    pub(crate) fn resume(&self) -> Result<()> {
        self.resume_functions()?;
        self.disks.iter().for_each(|disk| disk.resume());
        Ok(())
    }

    /// Ends the pause of both functions.
    pub(crate) fn resume_functions(&self) -> Result<()> {
        self.functions()
            .iter()
            .try_for_each(|(name, function)| function.resume().map_err(Error::from_boxed).context(*name))
    }

    /// Resets everything, because another machine continues in its state. The functions are paused.
    pub(crate) fn leave(&self) {
        self.functions().iter().for_each(|(_, function)| function.leave());
        self.bus.reset();
    }
}
