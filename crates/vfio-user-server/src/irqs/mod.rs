//! Interrupts: eventfds from the client, signalled by the device.
//!
//! The client determines how long a signal takes: the kernel calls every waiter of the eventfd, and the client may
//! register any number of them. Without asynchronous operations, a write can even block forever. The thread that raises
//! an interrupt often works for other devices as well. So it signals directly only while signals are short
//! ([`Table::may_call_here`]); otherwise a thread of this device does ([`CallThread`]). Descriptors are closed by the
//! connection's thread or by the device's, and never with a lock held.

use std::fmt;
use std::io;
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
use super::client_connection::ClientInterrupts;
use super::eventfd::{Eventfds, HostEventfds};
use super::regions::Shape;
use super::request::SetIrqs;

/// Maximum duration of a short signal. After a longer one, other devices' threads do not signal for some time.
const SHORT: Duration = Duration::from_micros(20);

/// Length of that time, in units of the signal's duration, so that a client gets at most one part in 3000 of the time
/// of another device's thread. A signal of 20 ms, caused by 30,000 waiters, keeps other threads away for a minute. A
/// thread that happens to be preempted in the middle of a signal costs the device little.
const ABSENCE: u32 = 3000;

/// Upper limit of that time, in case the whole process was stopped during a signal.
const LONGEST_ABSENCE: Duration = Duration::from_secs(3600);

/// Eventfd of the client.
struct Notifier {
    /// Taken by `drop`.
    fd: Option<OwnedFd>,
    eventfds: Arc<dyn Eventfds>,
}

impl Notifier {
    /// Wraps a descriptor if it is an eventfd.
    fn new(fd: OwnedFd, eventfds: &Arc<dyn Eventfds>) -> Result<Arc<Self>, Errno> {
        let taken = eventfds.is_one(fd.as_fd());
        let notifier = Self { fd: Some(fd), eventfds: Arc::clone(eventfds) };
        if taken { Ok(Arc::new(notifier)) } else { Err(Errno::INVAL) }
    }

    /// Adds 1 to the eventfd. Returns `true` on success.
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

/// Legacy interrupt line. Signalling it masks it until the client unmasks it.
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
        /// MSI-X interrupts that were lost because the client has set no descriptor, or an unusable one.
        interrupts_dropped,
        /// Interrupts that took the kernel longer than 20 microseconds to deliver. After each of them, a thread of the
        /// device delivers its interrupts for some time, such as a minute after an interrupt that took 20 ms.
        interrupts_slow,
    }
}

/// Descriptors of the client, and the threads that may signal them.
struct Table {
    msix: RwLock<Vec<Option<Arc<Notifier>>>>,
    line: Mutex<Line>,
    /// Kept only because the client's request must succeed. It is never signalled: that would stop the VM.
    error: Mutex<Option<Arc<Notifier>>>,
    eventfds: Arc<dyn Eventfds>,
    clock: Arc<dyn Clock>,
    /// Time until which only the device's own thread signals, in nanoseconds of the clock.
    aside: AtomicU64,
    counters: Arc<IrqCounters>,
}

impl Table {
    /// Returns `true` if a thread that may work for another device may signal: signals cannot block, and recent signals
    /// of this device were short.
    fn may_call_here(&self) -> bool {
        self.eventfds.never_block() && nanos(self.clock.now()) >= self.aside.load(Ordering::Relaxed)
    }

    /// Signals on the calling thread.
    fn call_here(&self, cause: Cause) -> bool {
        // The lock is held during the signal. Otherwise the connection's thread could replace the descriptor now, and
        // this thread would have to close it. The connection's thread waits for the lock, but threads that raise
        // vectors do not wait behind it: their reads are recursive.
        match cause {
            Cause::Vector(vector) => {
                let table = self.msix.read_recursive();
                table.get(usize::from(vector)).and_then(Option::as_ref).is_some_and(|notifier| self.signal(notifier))
            }
            Cause::Line => self.line.lock().notifier.as_ref().is_some_and(|notifier| self.signal(notifier)),
        }
    }

    /// Signals on the device's own thread, without a lock, so that other threads can raise interrupts meanwhile.
    fn call_on_own_thread(&self, cause: Cause) -> bool {
        let notifier = match cause {
            Cause::Vector(vector) => self.msix.read().get(usize::from(vector)).cloned().flatten(),
            Cause::Line => self.line.lock().notifier.clone(),
        };
        notifier.is_some_and(|notifier| self.signal(&notifier))
    }

    /// Signals, and records how long that took.
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

/// Interrupt targets of one device. Lives as long as the device; clients set and clear the descriptors.
pub struct IrqTable {
    table: Arc<Table>,
    thread: CallThread,
    /// Counts of delivered and dropped interrupts.
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
    /// Creates an empty table that measures signals by `clock`. If the clock stands still, all signals are short.
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

    /// Delivers an interrupt, on the calling thread or on the device's own.
    fn deliver(&self, cause: Cause) -> bool {
        if self.table.may_call_here() { self.table.call_here(cause) } else { self.thread.request(cause) }
    }

    /// Changes the line, and signals it if the change makes it fire. Returns the result of `change`.
    fn change_line<R>(&self, change: impl FnOnce(&mut Line) -> R) -> R {
        let mut line = self.table.line.lock();
        let result = change(&mut line);
        let fires = line.fires();
        drop(line);
        if fires && !self.deliver(Cause::Line) {
            // The client was not told, so it will not unmask the line. The next change of the line tries again.
            self.table.line.lock().masked = false;
        }
        result
    }

    /// Drops the client's descriptors. Nothing is signalled after this returns, unless the client keeps the device's
    /// own thread in a call.
    pub(crate) fn clear(&self) {
        let msix = std::mem::take(&mut *self.table.msix.write());
        let error = self.table.error.lock().take();
        let line = self.change_line(|line| {
            line.masked = false;
            line.notifier.take()
        });
        self.thread.cancel();
        // Closes the descriptors, with no lock held.
        drop((msix, error, line));
    }

    /// Waits until no interrupt is left to the device's own thread, for at most `patience`. Returns `false` if the
    /// client makes them last longer. The caller has ensured that no more are raised.
    pub(crate) fn drain(&self, patience: Duration) -> bool {
        self.thread.drain(patience)
    }

    /// Describes the client's descriptors and the line for another server.
    ///
    /// # Errors
    /// The process has too few descriptors.
    pub(crate) fn describe(&self) -> io::Result<ClientInterrupts> {
        let duplicate = |notifier: &Option<Arc<Notifier>>| {
            notifier.as_ref().and_then(|notifier| notifier.fd.as_ref()).map(OwnedFd::try_clone).transpose()
        };
        let vectors = self.table.msix.read().iter().map(duplicate).collect::<io::Result<_>>()?;
        let error = duplicate(&self.table.error.lock())?;
        let line = self.table.line.lock();
        let &Line { ref notifier, asserted, masked } = &*line;
        Ok(ClientInterrupts { vectors, error, line: duplicate(notifier)?, asserted, masked })
    }

    /// Installs descriptors and the line's state as another server has described them.
    ///
    /// # Errors
    /// There are more vectors than the device has, or a descriptor is no eventfd. Nothing has changed.
    pub(crate) fn adopt(&self, shape: &Shape, interrupts: ClientInterrupts) -> Result<(), Errno> {
        let ClientInterrupts { vectors, error, line, asserted, masked } = interrupts;
        if vectors.len() > shape.irq_count(VFIO_PCI_MSIX_IRQ_INDEX).map_or(0, |count| count as usize) {
            return Err(Errno::INVAL);
        }
        let wrap = |fd: Option<OwnedFd>| fd.map(|fd| Notifier::new(fd, &self.table.eventfds)).transpose();
        let vectors = vectors.into_iter().map(wrap).collect::<Result<Vec<_>, _>>()?;
        let (error, line) = (wrap(error)?, wrap(line)?);
        *self.table.msix.write() = vectors;
        *self.table.error.lock() = error;
        // The line is not signalled here: it was signalled before, or the function asserts it again when it resumes.
        *self.table.line.lock() = Line { notifier: line, asserted, masked };
        Ok(())
    }

    /// Executes SET_IRQS.
    ///
    /// # Errors
    /// The request is invalid for this device, and nothing has changed.
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
            // The VMM masks single vectors itself, and unmasking by eventfd can be done by a message instead.
            (VFIO_IRQ_SET_ACTION_MASK | VFIO_IRQ_SET_ACTION_UNMASK, _) => Err(Errno::NOTSUP),
            _ => Err(Errno::INVAL),
        }
    }

    /// Installs eventfds for `start..end`, or removes them if `fds` is empty.
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
        // Closes the previous descriptors, with no lock held.
        drop(fresh);
        Ok(())
    }

    fn disable(&self, index: u32) {
        // Each lock is released before the descriptors are closed at the end.
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

    /// Raises interrupts without a cause, which the client requests as a test.
    fn trigger(&self, index: u32, vectors: impl Iterator<Item = usize>) {
        if index == VFIO_PCI_MSIX_IRQ_INDEX {
            vectors.filter_map(|vector| u16::try_from(vector).ok()).filter(|&vector| self.is_set(vector)).for_each(
                |vector| {
                    self.deliver(Cause::Vector(vector));
                },
            );
        }
    }

    /// Returns `true` if the client has set a descriptor for the vector.
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
