//! Interrupts: eventfds from the client, signalled by the device.
//!
//! How long a signal takes is the client's choice: the kernel calls every waiter of the eventfd, of which the client
//! may have as many as it likes, and without asynchronous operations a write can wait for ever. The thread that raises
//! an interrupt often works for other devices, too. So it signals by itself only as long as that is short
//! ([`Table::may_call_here`]); otherwise a thread of this device does ([`CallThread`]). Descriptors are closed by the
//! connection's thread or by that one, and never with a lock held.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use pvrdma_base::counters;
use pvrdma_link::{Clock, MonotonicClock};
use pvrdma_pci_function::InterruptSink;
use rustix::io::Errno;
use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_SET_ACTION_MASK, VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_ACTION_TYPE_MASK, VFIO_IRQ_SET_ACTION_UNMASK,
    VFIO_IRQ_SET_DATA_BOOL, VFIO_IRQ_SET_DATA_EVENTFD, VFIO_IRQ_SET_DATA_NONE, VFIO_IRQ_SET_DATA_TYPE_MASK,
    VFIO_PCI_ERR_IRQ_INDEX, VFIO_PCI_INTX_IRQ_INDEX, VFIO_PCI_MSIX_IRQ_INDEX,
};

use super::call_thread::{CallThread, Cause};
use super::eventfd::{Eventfds, HostEventfds};
use super::regions::Shape;
use super::request::SetIrqs;

/// A signal that takes longer than this is not made by threads of other devices for some time.
const SHORT: Duration = Duration::from_micros(20);

/// For how long, in units of the time that the signal took: a client gets at most one part in so many of the time of
/// another device's thread. A signal of 20 ms, by 30,000 waiters, costs it a minute; a thread that the scheduler took
/// the processor from in the middle of a signal costs little.
const ABSENCE: u32 = 3000;

/// But for no longer than this, in case the whole process was stopped during a signal.
const LONGEST_ABSENCE: Duration = Duration::from_secs(3600);

/// An eventfd of the client.
struct Notifier {
    /// Taken when this is dropped.
    fd: Option<OwnedFd>,
    eventfds: Arc<dyn Eventfds>,
}

impl Notifier {
    /// Takes a descriptor if it is an eventfd.
    fn new(fd: OwnedFd, eventfds: &Arc<dyn Eventfds>) -> Result<Arc<Self>, Errno> {
        let taken = eventfds.is_one(fd.as_fd());
        let notifier = Self { fd: Some(fd), eventfds: Arc::clone(eventfds) };
        if taken { Ok(Arc::new(notifier)) } else { Err(Errno::INVAL) }
    }

    /// Adds 1. Returns `true` if it is there.
    fn signal(&self) -> bool {
        self.fd.as_ref().is_some_and(|fd| self.eventfds.signal(fd.as_fd()))
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take() {
            self.eventfds.close(fd);
        }
    }
}

/// The legacy line. Signalling it masks it until the client has seen to it.
#[derive(Default)]
struct Line {
    notifier: Option<Arc<Notifier>>,
    asserted: bool,
    masked: bool,
}

impl Line {
    /// Returns `true` if the line is to be signalled, which masks it.
    const fn fires(&mut self) -> bool {
        let fires = self.notifier.is_some() && self.asserted && !self.masked;
        self.masked |= fires;
        fires
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
        /// Interrupts that took the kernel longer than 20 microseconds to deliver. After each of them a thread of the
        /// device delivers its interrupts for some time: for a minute after one that took 20 ms.
        interrupts_slow,
    }
}

/// The client's descriptors, and who may signal them.
struct Table {
    msix: RwLock<Vec<Option<Arc<Notifier>>>>,
    line: Mutex<Line>,
    /// Kept so that the client finds it accepted. We never signal it: that would stop the VM.
    error: Mutex<Option<Arc<Notifier>>>,
    eventfds: Arc<dyn Eventfds>,
    clock: Arc<dyn Clock>,
    /// Until when only the device's own thread signals, in nanoseconds of the clock.
    aside: AtomicU64,
    counters: Arc<IrqCounters>,
}

impl Table {
    /// Returns `true` if a thread that may work for another device may signal: that does not block, and signals of
    /// this device were short.
    fn may_call_here(&self) -> bool {
        self.eventfds.never_block() && nanos(self.clock.now()) >= self.aside.load(Ordering::Relaxed)
    }

    /// Signals on any thread.
    fn call_here(&self, cause: Cause) -> bool {
        // With the lock, so that the descriptor is not closed here, should the connection's thread replace it now. That
        // thread waits then, and others do not wait for it.
        match cause {
            Cause::Vector(vector) => {
                let table = self.msix.read_recursive();
                table.get(usize::from(vector)).and_then(Option::as_ref).is_some_and(|notifier| self.signal(notifier))
            }
            Cause::Line => self.line.lock().notifier.as_ref().is_some_and(|notifier| self.signal(notifier)),
        }
    }

    /// Signals on the device's own thread, which holds no lock then: others raise interrupts meanwhile.
    fn call_on_own_thread(&self, cause: Cause) -> bool {
        let notifier = match cause {
            Cause::Vector(vector) => self.msix.read().get(usize::from(vector)).cloned().flatten(),
            Cause::Line => self.line.lock().notifier.clone(),
        };
        notifier.is_some_and(|notifier| self.signal(&notifier))
    }

    /// Signals, and notes how long that took.
    fn signal(&self, notifier: &Notifier) -> bool {
        let before = self.clock.now();
        let added = notifier.signal();
        let after = self.clock.now();
        let spent = after.saturating_sub(before);
        if spent > SHORT {
            self.counters.interrupts_slow.increment();
            let absence = spent.saturating_mul(ABSENCE).min(LONGEST_ABSENCE);
            self.aside.fetch_max(nanos(after.saturating_add(absence)), Ordering::Relaxed);
        }
        added
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Where the interrupts of one device go. Lives as long as the device; clients fill and empty it.
pub struct IrqTable {
    table: Arc<Table>,
    thread: CallThread,
    /// What became of them.
    pub counters: Arc<IrqCounters>,
}

impl Default for IrqTable {
    fn default() -> Self {
        Self::with_clock(Arc::new(MonotonicClock::default()))
    }
}

impl fmt::Debug for IrqTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IrqTable").field("counters", &self.counters).finish_non_exhaustive()
    }
}

impl IrqTable {
    /// An empty table that measures signals by `clock`. With one that stands still all of them are short.
    pub fn with_clock(clock: Arc<dyn Clock>) -> Self {
        Self::with(Arc::new(HostEventfds), clock)
    }

    fn with(eventfds: Arc<dyn Eventfds>, clock: Arc<dyn Clock>) -> Self {
        let counters = Arc::new(IrqCounters::default());
        let table = Arc::new(Table {
            msix: RwLock::default(),
            line: Mutex::default(),
            error: Mutex::default(),
            eventfds,
            clock,
            aside: AtomicU64::new(0),
            counters: Arc::clone(&counters),
        });
        let called = Arc::clone(&table);
        let thread = CallThread::new(move |cause| {
            if !called.call_on_own_thread(cause) {
                called.counters.interrupts_dropped.increment();
            }
        });
        Self { table, thread, counters }
    }

    /// Delivers an interrupt, here or on the device's own thread.
    fn deliver(&self, cause: Cause) -> bool {
        if self.table.may_call_here() { self.table.call_here(cause) } else { self.thread.request(cause) }
    }

    /// Changes the line, and signals it if it fires then. Returns the descriptor that `change` took out of it.
    fn change_line<R>(&self, change: impl FnOnce(&mut Line) -> R) -> R {
        let mut line = self.table.line.lock();
        let result = change(&mut line);
        let fires = line.fires();
        drop(line);
        if fires {
            self.deliver(Cause::Line);
        }
        result
    }

    /// Forgets the client's descriptors. Nothing is signalled after this returns, unless the client keeps the device's
    /// own thread in a call.
    pub(crate) fn clear(&self) {
        let msix = std::mem::take(&mut *self.table.msix.write());
        let error = self.table.error.lock().take();
        let line = self.change_line(|line| {
            line.masked = false;
            line.notifier.take()
        });
        self.thread.cancel();
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
                self.change_line(|line| line.masked = action == VFIO_IRQ_SET_ACTION_MASK);
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
        let notifier = |fd| Notifier::new(fd, &self.table.eventfds).map(Some);
        let mut fresh = fds.into_iter().map(notifier).collect::<Result<Vec<_>, _>>()?;
        fresh.resize_with(end - start, || None);
        match index {
            VFIO_PCI_MSIX_IRQ_INDEX => {
                let mut table = self.table.msix.write();
                table.resize_with(total, || None);
                if let Some(slots) = table.get_mut(start..end) {
                    slots.swap_with_slice(&mut fresh);
                }
            }
            VFIO_PCI_ERR_IRQ_INDEX => {
                let new = fresh.pop().flatten();
                fresh.push(std::mem::replace(&mut *self.table.error.lock(), new));
            }
            VFIO_PCI_INTX_IRQ_INDEX if start < end => {
                let new = fresh.pop().flatten();
                fresh.push(self.change_line(|line| {
                    line.masked = false;
                    std::mem::replace(&mut line.notifier, new)
                }));
            }
            _ => {}
        }
        // Closes the descriptors that were there before: no lock is held any more.
        drop(fresh);
        Ok(())
    }

    fn disable(&self, index: u32) {
        // Each is taken with a lock that is free again when the descriptors are closed, at the end.
        let before = match index {
            VFIO_PCI_MSIX_IRQ_INDEX => std::mem::take(&mut *self.table.msix.write()),
            VFIO_PCI_ERR_IRQ_INDEX => vec![self.table.error.lock().take()],
            VFIO_PCI_INTX_IRQ_INDEX => vec![self.change_line(|line| {
                line.masked = false;
                line.notifier.take()
            })],
            _ => Vec::new(),
        };
        drop(before);
    }

    /// The client wants to see interrupts without a cause, as a test.
    fn trigger(&self, index: u32, vectors: impl Iterator<Item = usize>) {
        if index == VFIO_PCI_MSIX_IRQ_INDEX {
            vectors.filter_map(|vector| u16::try_from(vector).ok()).filter(|&vector| self.is_set(vector)).for_each(
                |vector| {
                    self.deliver(Cause::Vector(vector));
                },
            );
        }
    }

    /// Returns `true` if the client has set a descriptor for a vector.
    fn is_set(&self, vector: u16) -> bool {
        self.table.msix.read_recursive().get(usize::from(vector)).is_some_and(Option::is_some)
    }
}

impl InterruptSink for IrqTable {
    fn msix(&self, vector: u16) {
        self.counters.interrupts_raised.increment();
        if !self.is_set(vector) || !self.deliver(Cause::Vector(vector)) {
            self.counters.interrupts_dropped.increment();
        }
    }

    fn intx(&self, asserted: bool) {
        self.change_line(|line| line.asserted = asserted);
    }
}

#[cfg(test)]
mod tests;
