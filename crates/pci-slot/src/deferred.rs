//! Work that the guest's processors do not wait for: the work that doorbells leave behind, and the doorbells
//! themselves.

use std::io;
use std::sync::Arc;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use log::debug;
use pvrdma_pci_function::Doorbell;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::slot::Slot;

/// Signals an eventfd when the guest writes to an address, without stopping its processor: KVM's ioeventfds.
pub trait DoorbellCatcher: Send + Sync {
    /// Signals `event` from now on when the guest writes to the address; with `value`, only when it writes these 32
    /// bits.
    ///
    /// # Errors
    /// There are too many, or the system refuses. Such writes trap, as before.
    fn catch(&self, address: u64, value: Option<u32>, event: &EventFd) -> io::Result<()>;

    /// Ends the effect of [`Self::catch`].
    ///
    /// # Errors
    /// The doorbell was not caught.
    fn release(&self, address: u64, value: Option<u32>, event: &EventFd) -> io::Result<()>;
}

/// A doorbell that can be caught.
pub(crate) struct Bell {
    function: usize,
    doorbell: Doorbell,
    event: EventFd,
    /// Address at which it is caught now.
    address: Option<u64>,
}

/// The doorbells of a slot, and the catcher that they use.
#[derive(Default)]
pub(crate) struct Bells {
    catcher: Option<Arc<dyn DoorbellCatcher>>,
    list: Vec<Bell>,
}

impl Bells {
    /// Creates the set. No doorbell is caught yet.
    pub(crate) fn new(
        catcher: Arc<dyn DoorbellCatcher>,
        doorbells: impl Iterator<Item = (usize, Doorbell)>,
    ) -> io::Result<Self> {
        let bell =
            |(function, doorbell)| Ok(Bell { function, doorbell, event: EventFd::new(EFD_NONBLOCK)?, address: None });
        Ok(Self { catcher: Some(catcher), list: doorbells.map(bell).collect::<io::Result<_>>()? })
    }

    /// Catches the doorbells of a function at their current addresses. `place` maps a BAR and an offset to an address.
    pub(crate) fn follow(&mut self, function: usize, place: impl Fn(usize, u64) -> Option<u64>) {
        let Some(catcher) = &self.catcher else { return };
        for bell in self.list.iter_mut().filter(|bell| bell.function == function) {
            let Doorbell { bar, offset, value } = bell.doorbell;
            let wanted = place(bar, offset);
            if wanted == bell.address {
                continue;
            }
            if let Some(address) = bell.address.take()
                && let Err(error) = catcher.release(address, value, &bell.event)
            {
                debug!("doorbell at {address:#x}: {error}");
            }
            let Some(address) = wanted else { continue };
            match catcher.catch(address, value, &bell.event) {
                Ok(()) => bell.address = wanted,
                // Without the catcher the write traps, which works as before.
                Err(error) => debug!("doorbell at {address:#x}: {error}"),
            }
        }
    }
}

impl Drop for Bells {
    fn drop(&mut self) {
        for function in 0..8 {
            self.follow(function, |_, _| None);
        }
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
