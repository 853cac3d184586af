//! Work that the guest's processors do not wait for: the work that doorbells leave behind, and the doorbells
//! themselves ([`crate::bells`]).

use std::io;
use std::sync::Arc;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use pvrdma_pci_function::Doorbell;
use vmm_sys_util::eventfd::EventFd;

use crate::bells::{Bell, Bells, DoorbellCatcher};
use crate::slot::Slot;

impl Slot {
    /// Leaves the deferred work to a subscriber, for as long as that exists. With a catcher, the subscriber handles the
    /// functions' doorbells as well. There is one subscriber at a time.
    ///
    /// # Errors
    /// There are no file descriptors left.
    pub fn deferred(self: &Arc<Self>, catcher: Option<Arc<dyn DoorbellCatcher>>) -> io::Result<DeferredWork> {
        let work = self.subscriber(catcher)?;
        self.leave_work();
        Ok(work)
    }

    /// Leaves only the doorbells that are caught to a subscriber. The work behind any other write is done by the thread
    /// that writes: the guest's processor waits for it, and no other thread has to wake up. Suitable for functions
    /// whose deferred work is bounded and does not block.
    ///
    /// # Errors
    /// There are no file descriptors left.
    pub fn doorbells(self: &Arc<Self>, catcher: Arc<dyn DoorbellCatcher>) -> io::Result<DeferredWork> {
        self.subscriber(Some(catcher))
    }

    fn subscriber(self: &Arc<Self>, catcher: Option<Arc<dyn DoorbellCatcher>>) -> io::Result<DeferredWork> {
        let new = catcher.map(|catcher| Bells::new(catcher, self.doorbell_list())).transpose()?.unwrap_or_default();
        let work = DeferredWork::new(Arc::clone(self), &new)?;
        self.set_bells(new);
        Ok(work)
    }
}

/// Does the deferred work of a slot on the thread of an event manager, or only handles the doorbells that are caught:
/// see [`Slot::deferred`] and [`Slot::doorbells`].
pub struct DeferredWork {
    slot: Arc<Slot>,
    /// Eventfds of the doorbells, with their function and doorbell.
    bells: Vec<(EventFd, usize, Doorbell)>,
}

impl std::fmt::Debug for DeferredWork {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeferredWork").field("slot", &self.slot).finish_non_exhaustive()
    }
}

/// Event number of the slot's work event; the doorbells have the numbers from 1 on.
const WORK: u32 = 0;

impl DeferredWork {
    pub(crate) fn new(slot: Arc<Slot>, bells: &Bells) -> io::Result<Self> {
        let bell = |bell: &Bell| Ok((bell.event.try_clone()?, bell.function, bell.doorbell));
        let bells = bells.list.iter().map(bell).collect::<io::Result<_>>()?;
        Ok(Self { slot, bells })
    }

    fn ring(&self, number: u32) {
        let index = usize::try_from(number).ok().and_then(|number| number.checked_sub(1));
        let Some((event, function, doorbell)) = index.and_then(|index| self.bells.get(index)) else { return };
        // The read fails if another event has consumed the signal already. A spurious doorbell does no harm.
        let _ = event.read();
        self.slot.ring(*function, doorbell);
    }
}

impl MutEventSubscriber for DeferredWork {
    fn process(&mut self, events: Events, _ops: &mut EventOps<'_>) {
        match events.data() {
            WORK => self.slot.run_left(),
            number => self.ring(number),
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        let events = std::iter::once(self.slot.work_event()).chain(self.bells.iter().map(|(event, ..)| event));
        for (number, event) in (WORK..).zip(events) {
            if let Err(error) = ops.add(Events::with_data(event, number, EventSet::IN)) {
                // Log: once in the life of a subscriber, and the line contains no guest data.
                log::error!("deferred work: {error}");
            }
        }
    }
}

impl Drop for DeferredWork {
    fn drop(&mut self) {
        self.slot.keep_work();
        // The guest does not repeat the writes that were caught, so those that are still signalled are forwarded here.
        for (_, function, doorbell) in self.bells.iter().filter(|(event, ..)| event.read().is_ok()) {
            self.slot.ring(*function, doorbell);
        }
    }
}
