//! Pausing a device.
//!
//! A pause is independent of the states of the registers: the device stays active, and its objects and rings stay
//! unchanged. Accesses meanwhile have these effects:
//!
//! | access | effect |
//! | --- | --- |
//! | a doorbell that posts | none: all queues are looked at when the pause ends |
//! | a doorbell that arms a completion queue | the queue is armed; a look that arming implies follows at the end |
//! | a store to a mapped doorbell page | as a doorbell that posts |
//! | an event, such as a change of the link | it waits until the pause ends |
//! | a failure on request | it waits until the pause ends |
//! | a command, a handshake, ACTIVATE | refused, with an error in ERR |
//! | all other registers, RESET, configuration space | as always |
//!
//! Threads that access guest memory check the mark with a view held ([`Core::view_unless_paused`]), and a pause waits
//! for all views. Event rings have a mark of their own, under their locks, because the adapter posts to them.
//! Inspection still reads ring indices.

use std::sync::atomic::Ordering;

use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{Hca, PauseHca};

use crate::core::Core;
use crate::datapath::infer;
use crate::device::PvrdmaDevice;
use crate::intr::Vector;

impl<H: PauseHca> PvrdmaDevice<H> {
    /// Pauses the device. Once this returns, nothing accesses the guest's memory or changes an object until
    /// [`Self::resume`]; see [`PauseHca`] for peers. The call waits for a command in progress and for bounded batches
    /// of requests, but not for the guest.
    ///
    /// If the guest's processors run, the caller holds back its commands, because they are refused meanwhile.
    ///
    /// Pauses do not nest. Returns `false` if the device is paused already.
    pub fn pause(&self) -> bool {
        let _commands = self.lock_commands();
        let core = self.core();
        if core.paused.swap(true, Ordering::AcqRel) {
            return false;
        }
        core.hub.set_paused(true);
        core.hca.pause();
        core.memory.barrier();
        true
    }

    /// Ends the pause: looks at all queues, posts the events that waited, and raises the interrupts of the event rings.
    ///
    /// Returns `false` if the device is not paused, or a restore is not finished.
    pub fn resume(&self) -> bool {
        let mut control = self.control.lock();
        let core = self.core();
        if !core.is_paused() || control.restored.is_some() {
            return false;
        }
        core.hub.set_paused(false);
        core.paused.store(false, Ordering::Release);
        core.hca.resume();
        core.catch_up();
        if std::mem::take(&mut control.fails) {
            self.fail_locked(&mut control);
        }
        true
    }

    /// Returns `true` if the device is paused.
    pub fn is_paused(&self) -> bool {
        self.core().is_paused()
    }
}

impl<H: Hca> Core<H> {
    /// Returns `true` if the device is paused, or about to be.
    pub(crate) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Acquire)
    }

    /// Returns a view of guest memory, unless the device is paused. While the view exists, no pause is complete.
    pub(crate) fn view_unless_paused(&self) -> Option<DmaView<'_>> {
        let view = self.memory.view();
        (!self.is_paused()).then_some(view)
    }

    /// Makes up for doorbells, armings and events that a pause has held back.
    fn catch_up(&self) {
        for handle in self.objects.contexts.handles(|context| context.is_mapped()) {
            self.infer_all_of(handle, infer::SHORTEST);
        }
        for (_, cq) in self.objects.cqs.all() {
            cq.ring.check_after_pause(&self.memory.view(), self.config.posted_doorbells);
        }
        self.retry_events();
        if self.gate.is_open() {
            // One interrupt too many is harmless for these rings.
            self.interrupts.raise(Vector::Async);
            self.interrupts.raise(Vector::Completion);
        }
        self.wake_watcher();
    }
}
