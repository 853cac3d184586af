//! A disk: a virtio block device on PCI (Virtual I/O Device 1.2, sections 4.1 and 5.2) with one queue.
//!
//! virtio-mmio is not used: without ACPI a guest can find such devices only through its command line, and the kernels
//! of distributions disable that.

mod registers;
mod requests;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use anyhow::{Context, Result};
use parking_lot::Mutex;
use pvrdma_pci_function::{
    Bar, CONFIG_SIZE, ConfigLayout, ConfigSpace, Deferred, Doorbell, FIRST_CAPABILITY, Identity, InterruptSink,
    MsixPlace, PciFunction,
};
use pvrdma_pci_slot::Slot;
use virtio_queue::{DescriptorChain, Queue, QueueT};
use vm_memory::GuestMemoryMmap;

use crate::options::DiskOptions;
use crate::saved::dirty::Dirty;
use crate::saved::messages::DiskRegisters;
use registers::{COMMON_SIZE, Registers};
use requests::Image;

/// Red Hat; a block device of version 1; a mass storage controller.
const IDENTITY: Identity = Identity { vendor: 0x1af4, device: 0x1042, revision: 1, class: [0, 0, 1] };

// BAR 0: the four structures of the device, each in a page of its own.
const REGISTERS: usize = 0;
const PAGE: u64 = 0x1000;
const COMMON: u64 = 0;
const INTERRUPT_STATUS: u64 = PAGE;
const DEVICE: u64 = 2 * PAGE;
const NOTIFY: u64 = 3 * PAGE;
/// BAR 1: MSI-X.
const MSIX: MsixPlace = MsixPlace { capability: FIRST_CAPABILITY, vectors: 2, bar: 1, table: 0, pending: 0x800 };

/// Capabilities that locate the structures: type, start, bytes.
const STRUCTURES: [(u8, u64, u32); 4] =
    [(1, COMMON, COMMON_SIZE), (2, NOTIFY, 4), (3, INTERRUPT_STATUS, 1), (4, DEVICE, 64)];
const VENDOR_CAPABILITY: u8 = 9;
const NOTIFY_TYPE: u8 = 2;

/// A disk as a PCI function.
pub(crate) struct Disk {
    image: Image,
    memory: GuestMemoryMmap,
    interrupts: Arc<dyn InterruptSink>,
    registers: Mutex<Registers>,
    /// Guest memory that the disk has written, if this is logged. Changes only under the lock of the registers.
    written: Mutex<Option<Dirty>>,
    config: Mutex<ConfigSpace>,
}

/// Returns the configuration space, which is the same for every disk.
fn config_space() -> Result<ConfigSpace> {
    let bar = |size| Some(Bar { size, is_64bit: false });
    let mut config = ConfigSpace::new(&ConfigLayout {
        identity: IDENTITY,
        bars: [bar(4 * PAGE), bar(PAGE), None, None, None, None],
        msix: Some(MSIX),
        interrupt_pin: false,
        multifunction: false,
    });
    for (kind, start, len) in STRUCTURES {
        let start = u32::try_from(start)?.to_le_bytes();
        let bytes = if kind == NOTIFY_TYPE { 20 } else { 16 };
        let mut capability = vec![VENDOR_CAPABILITY, 0, bytes, kind, 0, 0, 0, 0];
        capability.extend_from_slice(&start);
        capability.extend_from_slice(&len.to_le_bytes());
        // The notify multiplier is zero: all queues are notified at the same address.
        capability.resize(bytes.into(), 0);
        config.add_capability(&capability).context("no room for a capability")?;
    }
    Ok(config)
}

impl Disk {
    /// Returns a disk that is backed by this image, and its slot.
    pub(crate) fn slot(number: u8, options: &DiskOptions, memory: &GuestMemoryMmap) -> Result<(Arc<Self>, Arc<Slot>)> {
        let image = Image::open(options)?;
        let builder = Slot::builder(number);
        let disk = Arc::new(Self::new(image, memory.clone(), builder.interrupts(0))?);
        let slot = builder.with(0, Arc::clone(&disk) as _).build()?;
        Ok((disk, slot))
    }

    /// Size in bytes.
    pub(crate) const fn bytes(&self) -> u64 {
        self.image.bytes()
    }

    /// Returns `true` if the guest may write to it.
    pub(crate) const fn is_writable(&self) -> bool {
        self.image.is_writable()
    }

    /// Serves all requests of a guest that has stopped, writes the image out, and returns the registers.
    pub(crate) fn save(&self) -> Result<DiskRegisters> {
        self.serve();
        self.image.flush().context("cannot write a disk out")?;
        Ok(self.registers.lock().save())
    }

    /// Sets the registers. Configuration space is restored by the caller.
    ///
    /// # Errors
    /// They are not those of such a disk.
    pub(crate) fn restore(&self, saved: &DiskRegisters) -> Result<()> {
        *self.registers.lock() = Registers::restore(self.image.features(), saved)?;
        Ok(())
    }

    /// Starts or ends the log of written guest memory.
    pub(crate) fn log_writes(&self, on: bool) {
        let _served = self.registers.lock();
        *self.written.lock() = on.then(|| Dirty::none_of(&self.memory));
    }

    /// Adds the pages that were written since the log started or since the last call. Waits for a request in progress.
    pub(crate) fn take_written(&self, to: &mut Dirty) {
        let _served = self.registers.lock();
        if let Some(written) = &mut *self.written.lock() {
            to.add(&std::mem::replace(written, Dirty::none_of(&self.memory)));
        }
    }

    fn new(image: Image, memory: GuestMemoryMmap, interrupts: Arc<dyn InterruptSink>) -> Result<Self> {
        let registers = Mutex::new(Registers::new(image.features())?);
        let (written, config) = (Mutex::default(), Mutex::new(config_space()?));
        Ok(Self { image, memory, interrupts, registers, written, config })
    }

    /// Interrupts the guest after a restore, because an interrupt may have been in transit when the state was saved.
    /// Then serves all available requests.
    pub(crate) fn resume(&self) {
        let (running, vector) = {
            let registers = self.registers.lock();
            (registers.is_running(), registers.vector)
        };
        if running {
            self.interrupts.msix(vector);
        }
        self.serve();
    }

    /// Serves all available requests.
    fn serve(&self) {
        let registers = &mut *self.registers.lock();
        let memory = &self.memory;
        let bus_master = self.config.lock().switches().bus_master;
        if !registers.is_running() || !bus_master {
            return;
        }
        let mut served = false;
        let mut log = self.written.lock();
        while let Some(chain) = registers.queue.pop_descriptor_chain(memory) {
            let head = chain.head_index();
            if let Some(log) = &mut *log {
                log_request(log, &registers.queue, chain.clone());
            }
            let written = self.image.serve(memory, chain);
            if registers.queue.add_used(memory, head, written).is_err() {
                return;
            }
            served = true;
        }
        if served && registers.queue.needs_notification(memory).unwrap_or(true) {
            self.interrupts.msix(registers.vector);
        }
    }
}

/// Logs all guest memory that a request may write: its buffers, and the ring with its completion.
fn log_request(log: &mut Dirty, queue: &Queue, chain: DescriptorChain<&GuestMemoryMmap>) {
    // Three words of 16 bits, and eight bytes for each entry.
    log.add_range(queue.used_ring(), 6 + 8 * u64::from(queue.size()));
    for buffer in chain.writable() {
        log.add_range(buffer.addr().0, buffer.len().into());
    }
}

impl PciFunction for Disk {
    fn bars(&self) -> [Option<Bar>; 6] {
        self.config.lock().bars()
    }

    fn config_size(&self) -> usize {
        CONFIG_SIZE
    }

    fn config_read(&self, offset: usize, data: &mut [u8]) {
        self.config.lock().read(offset, data, false);
    }

    fn config_write(&self, offset: usize, data: &[u8]) {
        self.config.lock().write(offset, data);
    }

    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let start = usize::try_from(offset % PAGE).unwrap_or(usize::MAX);
        let copy = |from: &[u8], data: &mut [u8]| {
            from.iter().skip(start).zip(data).for_each(|(from, to)| *to = *from);
        };
        match (bar, offset / PAGE * PAGE) {
            (REGISTERS, COMMON) => copy(&self.registers.lock().bytes(), data),
            (REGISTERS, DEVICE) => copy(&self.image.config(), data),
            _ => {}
        }
    }

    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]) -> Deferred {
        if bar == REGISTERS && offset < PAGE {
            self.registers.lock().write(offset, data);
        }
        // A notification carries no information; `run_deferred` checks the queue.
        Deferred::Pending
    }

    fn run_deferred(&self) {
        self.serve();
    }

    fn msix(&self) -> Option<MsixPlace> {
        Some(MSIX)
    }

    fn doorbells(&self) -> Vec<Doorbell> {
        vec![Doorbell { bar: REGISTERS, offset: NOTIFY, value: None }]
    }

    fn reset(&self) {
        self.registers.lock().reset();
        self.config.lock().reset();
    }
}
