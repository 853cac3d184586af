//! The log of everything that is written to the memory of a running machine.

use std::sync::Arc;

use anyhow::{Context, Result};
use pvrdma_guest_memory::{DmaSpace, MemoryBudget};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use super::dirty::{Dirty, PAGE, WriteLog};
use crate::disk::Disk;
use crate::memory::Vm;
use crate::parts::Parts;

/// The log of a machine, which ends when this is dropped. Processors, functions and disks each have their own.
pub(crate) struct MachineLog {
    vm: Arc<Vm>,
    functions: [Arc<DmaSpace>; 2],
    disks: Vec<Arc<Disk>>,
}

impl MachineLog {
    /// Describes the writers of a machine, which are not logged yet.
    pub(crate) fn of(vm: &Arc<Vm>, parts: &Parts) -> Self {
        Self { vm: Arc::clone(vm), functions: parts.spaces.clone(), disks: parts.disks.clone() }
    }

    /// Starts the log.
    pub(crate) fn start(self) -> Result<Self> {
        // From here on, an error drops the value, which stops the logs that have started.
        let ranges: Vec<_> = self.vm.memory().iter().map(|region| (region.start_addr().0, region.len())).collect();
        for space in &self.functions {
            let budget = MemoryBudget::new(MemoryBudget::DEFAULT_LIMIT);
            space.start_dirty_log(&ranges, &budget).context("cannot log writes of the functions")?;
        }
        self.disks.iter().for_each(|disk| disk.log_writes(true));
        self.vm.log_writes(true)?;
        Ok(self)
    }
}

impl WriteLog for MachineLog {
    fn take(&self) -> Result<Dirty> {
        let memory = self.vm.memory();
        let mut written = Dirty::none_of(memory);
        for (slot, region) in (0..).zip(memory.iter()) {
            let (start, len) = (region.start_addr().0, region.len());
            written.add_bits(start, &self.vm.take_written(slot, len)?);
            for space in &self.functions {
                let bits = space.report_dirty(start, len, PAGE as u64).context("the log of the functions")?;
                written.add_bits(start, &bits);
            }
        }
        self.disks.iter().for_each(|disk| disk.take_written(&mut written));
        Ok(written)
    }
}

impl Drop for MachineLog {
    fn drop(&mut self) {
        self.functions.iter().for_each(|space| space.stop_dirty_log());
        self.disks.iter().for_each(|disk| disk.log_writes(false));
        if let Err(error) = self.vm.log_writes(false) {
            // Log: once at the end of a migration.
            log::warn!("the log of written pages stays on: {error:#}");
        }
    }
}
