//! Interrupts: eventfds from the client, signalled by the device.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};

use parking_lot::{Mutex, RwLock};
use pvrdma_dev::InterruptSink;
use pvrdma_verbs::counters;
use rustix::io::Errno;
use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_SET_ACTION_MASK, VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_ACTION_TYPE_MASK, VFIO_IRQ_SET_ACTION_UNMASK,
    VFIO_IRQ_SET_DATA_BOOL, VFIO_IRQ_SET_DATA_EVENTFD, VFIO_IRQ_SET_DATA_NONE, VFIO_IRQ_SET_DATA_TYPE_MASK,
    VFIO_PCI_ERR_IRQ_INDEX, VFIO_PCI_INTX_IRQ_INDEX, VFIO_PCI_MSIX_IRQ_INDEX,
};

use super::eventfd;
use super::examine::{self, DescriptorError};
use super::regions::Shape;
use super::request::SetIrqs;

/// An eventfd of the client.
#[derive(Debug)]
struct Notifier(OwnedFd);

impl Notifier {
    /// Takes a descriptor if it is an eventfd.
    fn new(fd: OwnedFd) -> Result<Self, Errno> {
        examine::interrupt(&fd).map(|()| Self(fd)).map_err(DescriptorError::errno)
    }

    /// Adds 1 without waiting. Returns `true` if it is there. The thread is often one that works for another device.
    fn signal(&self) -> bool {
        eventfd::signal(self.0.as_fd())
    }
}

/// The legacy line. Signalling it masks it until the client has seen to it.
#[derive(Debug, Default)]
struct Line {
    notifier: Option<Notifier>,
    asserted: bool,
    masked: bool,
}

impl Line {
    fn update(&mut self) {
        if let Some(notifier) = self.notifier.as_ref().filter(|_| self.asserted && !self.masked) {
            self.masked = true;
            notifier.signal();
        }
    }
}

counters! {
    /// Counts of a device's interrupts.
    pub struct IrqCounters {
        /// MSI-X interrupts raised.
        interrupts_raised,
        /// MSI-X interrupts that had nowhere to go, because the client has set no descriptor for them, or none that
        /// takes them.
        interrupts_dropped,
    }
}

/// Where the interrupts of one device go. Lives as long as the device; clients fill and empty it.
#[derive(Default)]
pub struct IrqTable {
    msix: RwLock<Vec<Option<Notifier>>>,
    line: Mutex<Line>,
    /// Kept so that the client finds it accepted. We never signal it: that would stop the VM.
    error: Mutex<Option<Notifier>>,
    /// What became of them.
    pub counters: IrqCounters,
}

impl fmt::Debug for IrqTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IrqTable").field("counters", &self.counters).finish_non_exhaustive()
    }
}

impl IrqTable {
    /// Forgets the client's descriptors. Nothing is signalled after this returns.
    pub(crate) fn clear(&self) {
        let msix = std::mem::take(&mut *self.msix.write());
        let error = self.error.lock().take();
        let line = {
            let mut line = self.line.lock();
            line.masked = false;
            line.notifier.take()
        };
        // Closed without a lock held.
        drop((msix, error, line));
    }

    /// Carries out SET_IRQS.
    ///
    /// # Errors
    /// The request makes no sense for this device; nothing has changed then.
    pub(crate) fn set(&self, shape: &Shape, request: &SetIrqs<'_>, fds: Vec<OwnedFd>) -> Result<(), Errno> {
        let total = shape.irq_count(request.index)?;
        let end = request.start.checked_add(request.count).filter(|&end| end <= total).ok_or(Errno::INVAL)?;
        let action = request.flags & VFIO_IRQ_SET_ACTION_TYPE_MASK;
        let data = request.flags & VFIO_IRQ_SET_DATA_TYPE_MASK;
        let (start, end) = (request.start as usize, end as usize);
        if data != VFIO_IRQ_SET_DATA_EVENTFD && !fds.is_empty() {
            return Err(Errno::INVAL);
        }
        match (action, data) {
            (VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_DATA_EVENTFD) => {
                self.assign(request.index, start, end, total as usize, fds)
            }
            (VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_DATA_NONE) if request.count == 0 => {
                self.disable(request.index);
                Ok(())
            }
            (VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_DATA_NONE) => {
                self.trigger(request.index, start..end);
                Ok(())
            }
            (VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_DATA_BOOL) => {
                if request.data.len() != end - start {
                    return Err(Errno::INVAL);
                }
                let set = request.data.iter().zip(start..end).filter(|(flag, _)| **flag != 0);
                self.trigger(request.index, set.map(|(_, vector)| vector));
                Ok(())
            }
            (VFIO_IRQ_SET_ACTION_MASK | VFIO_IRQ_SET_ACTION_UNMASK, VFIO_IRQ_SET_DATA_NONE)
                if request.index == VFIO_PCI_INTX_IRQ_INDEX =>
            {
                let mut line = self.line.lock();
                line.masked = action == VFIO_IRQ_SET_ACTION_MASK;
                line.update();
                Ok(())
            }
            // Masking of single vectors is done by the VMM, and unmasking by eventfd has a message as its equal.
            (VFIO_IRQ_SET_ACTION_MASK | VFIO_IRQ_SET_ACTION_UNMASK, _) => Err(Errno::NOTSUP),
            _ => Err(Errno::INVAL),
        }
    }

    /// Installs eventfds for `start..end`, or takes them away when there are none.
    fn assign(&self, index: u32, start: usize, end: usize, total: usize, fds: Vec<OwnedFd>) -> Result<(), Errno> {
        if !fds.is_empty() && fds.len() != end - start {
            return Err(Errno::INVAL);
        }
        let mut fresh = fds.into_iter().map(|fd| Notifier::new(fd).map(Some)).collect::<Result<Vec<_>, _>>()?;
        fresh.resize_with(end - start, || None);
        match index {
            VFIO_PCI_MSIX_IRQ_INDEX => {
                let mut table = self.msix.write();
                table.resize_with(total, || None);
                if let Some(slots) = table.get_mut(start..end) {
                    slots.swap_with_slice(&mut fresh);
                }
            }
            VFIO_PCI_ERR_IRQ_INDEX => *self.error.lock() = fresh.pop().flatten(),
            VFIO_PCI_INTX_IRQ_INDEX if start < end => {
                let mut line = self.line.lock();
                line.masked = false;
                line.notifier = fresh.pop().flatten();
                line.update();
            }
            _ => {}
        }
        // What was there before is closed here, after the swap.
        Ok(())
    }

    fn disable(&self, index: u32) {
        match index {
            VFIO_PCI_MSIX_IRQ_INDEX => drop(std::mem::take(&mut *self.msix.write())),
            VFIO_PCI_ERR_IRQ_INDEX => *self.error.lock() = None,
            VFIO_PCI_INTX_IRQ_INDEX => {
                let mut line = self.line.lock();
                line.notifier = None;
                line.masked = false;
            }
            _ => {}
        }
    }

    /// The client wants to see interrupts without a cause, as a test.
    fn trigger(&self, index: u32, vectors: impl Iterator<Item = usize>) {
        if index == VFIO_PCI_MSIX_IRQ_INDEX {
            let table = self.msix.read();
            vectors.filter_map(|vector| table.get(vector)?.as_ref()).for_each(|notifier| {
                notifier.signal();
            });
        }
    }
}

impl InterruptSink for IrqTable {
    fn msix(&self, vector: u16) {
        self.counters.interrupts_raised.increment();
        match self.msix.read().get(usize::from(vector)) {
            Some(Some(notifier)) if notifier.signal() => {}
            _ => self.counters.interrupts_dropped.increment(),
        }
    }

    fn intx(&self, asserted: bool) {
        let mut line = self.line.lock();
        line.asserted = asserted;
        line.update();
    }
}
