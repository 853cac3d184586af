//! Saving a device, and restoring it in another one: for snapshots, migration, and the hand-over to another process.
//!
//! A saved state is a stream of the messages of [`pvrdma_saved_state::pvrdma`]. Everything that the guest and its peers
//! have learned is restored unchanged: handles, QPNs, keys, and the positions in all rings. The adapter's numbers,
//! timers and counters are new. The limits in force are those that the guest's driver has read; `max_memory` and the
//! limits for the next driver come from the configuration. Doorbells are not saved, because resuming looks at every
//! queue.
//!
//! A state is restored in two steps. [`PvrdmaDevice::restore`] reads it and creates the objects in a paused adapter,
//! without access to guest memory, which a VMM may map later. [`PvrdmaDevice::finish_restore`] checks all addresses
//! against the map, pins memory and binds GIDs.
//!
//! A state is as hostile as input of a guest. Objects are created through the checks of the commands that create them,
//! and everything that is kept is charged to the budget of the device. After a refusal the device is in power-on state.
//!
//! To save a new field, name it in the pattern that takes its struct apart, in this module or beside the struct; the
//! pattern does not compile without it.

mod convert;
mod error;
mod objects;
mod read;
mod write;

#[cfg(test)]
mod tests;

use std::io::{Read, Write};
use std::sync::atomic::Ordering;

use pvrdma_guest_memory::{Direction, DmaError};
use pvrdma_pages::PageList;
use pvrdma_pci_function::{Migratable, StateError};
use pvrdma_verbs::SaveHca;

use crate::abi::cmd::{REQUEST_SIZE, RESPONSE_SIZE};
use crate::control::{Connections, Control, Restored, State};
use crate::core::Core;
use crate::device::PvrdmaDevice;
use crate::dsr::Session;
use crate::page_dir::check_mapped;

pub use error::{RestoreError, SaveError};

impl<H: SaveHca> PvrdmaDevice<H> {
    /// Writes the state of the device, which must be paused, and stays so.
    ///
    /// # Errors
    /// The device is not paused, holds something that cannot be saved, or the output fails.
    pub fn save(&self, to: &mut dyn Write) -> Result<(), SaveError> {
        if !self.is_paused() {
            return Err(SaveError::NotPaused);
        }
        // This lock keeps commands and accesses to configuration space from changing the device meanwhile.
        let mut control = self.control.lock();
        control.twins = Some(self.core().hca.twins());
        let pci = self.pci.lock();
        write::device(self.core(), &control, &pci, to)
    }

    /// Resets the device and reads a state into it. The device is paused afterwards, and [`Self::finish_restore`] must
    /// be called before it is resumed. Guest memory is not accessed. All connections continue as they were, because the
    /// network of the device moves as a whole.
    ///
    /// # Errors
    /// The state is damaged, is not one of a device with this configuration, or an object in it would be refused to a
    /// guest, too. The device is then in power-on state, and not paused.
    pub fn restore(&self, from: &mut dyn Read) -> Result<(), RestoreError> {
        self.restore_as(from, Connections::Keep)
    }

    /// As [`Self::restore`], without the other devices of its network. Connections continue on the network if the state
    /// is that of a live migration: the VMM logged written pages when it was saved, less than a minute ago. Others end.
    ///
    /// # Errors
    /// As for [`Self::restore`], or the peers of connections cannot be reached from here.
    pub fn restore_alone(&self, from: &mut dyn Read) -> Result<(), RestoreError> {
        self.restore_as(from, Connections::MoveOrEnd)
    }

    fn restore_as(&self, from: &mut dyn Read, connections: Connections) -> Result<(), RestoreError> {
        let control = &mut *self.control.lock();
        self.power_on(control);
        self.core().paused.store(true, Ordering::Release);
        self.core().hca.pause();
        let result = read::device(self, control, from, connections);
        if result.is_err() {
            self.give_up(control);
        }
        self.publish_phase(control);
        result
    }

    /// Finishes a restore after guest memory was mapped. Does nothing if there is none to finish.
    ///
    /// # Errors
    /// The state refers to memory that is not mapped or cannot be pinned, or a GID cannot be bound. The device is then
    /// in power-on state, and not paused.
    pub fn finish_restore(&self) -> Result<(), RestoreError> {
        let control = &mut *self.control.lock();
        let Some(restored) = control.restored.take() else { return Ok(()) };
        let result = self.finish(control, *restored);
        if result.is_err() {
            self.give_up(control);
        }
        self.publish_phase(control);
        result
    }

    /// Lets the peers of the paused device in this process find it on the network, because another device continues
    /// with its state. Does nothing if the device is not paused.
    pub fn leave(&self) {
        let _commands = self.lock_commands();
        if self.is_paused() {
            self.core().hca.leave();
        }
    }

    fn finish(&self, control: &mut Control, restored: Restored) -> Result<(), RestoreError> {
        let core = self.core();
        let Restored { session, interrupts, rings } = restored;
        if let Some((session, event_rings, active)) = session {
            core.memory.lock_all()?;
            core.check_memory(&session, &rings)?;
            core.map_regions()?;
            core.bind_restored_gids()?;
            if active {
                event_rings.set_paused(true);
                core.hub.install(event_rings);
                control.state = State::Active(session);
                core.gate.set_active(true);
            } else {
                control.state = State::Ready(session, Box::new(event_rings));
            }
        }
        core.interrupts.restore(interrupts);
        Ok(())
    }

    /// Ends the connections of the paused device if another machine has begun to run with the state that was saved.
    /// That machine continues them, so packets of this one would contradict those that the peers have received since.
    fn end_connections_of_twin(&self) {
        let (core, saved) = (self.core(), self.control.lock().twins.take());
        let has_twin = saved.is_some_and(|before| core.hca.twins() > before);
        if !has_twin || !self.is_paused() {
            return;
        }
        let ended = core.hca.end_connections();
        core.stats.counts.connections_not_restored.add(ended as u64);
        core.log.warn(
            module_path!(),
            format_args!("another machine runs with the saved state of this one: {ended} connections end"),
        );
    }

    /// Returns to the power-on state after a refusal.
    fn give_up(&self, control: &mut Control) {
        self.power_on(control);
        self.core().renew_offer();
        self.core().paused.store(false, Ordering::Release);
        self.core().hca.resume();
    }
}

impl<H: SaveHca> Migratable for PvrdmaDevice<H> {
    fn pause(&self) {
        Self::pause(self);
    }

    fn save(&self, to: &mut dyn Write) -> Result<(), StateError> {
        Ok(Self::save(self, to)?)
    }

    fn restore(&self, from: &mut dyn Read) -> Result<(), StateError> {
        Ok(self.restore_alone(from)?)
    }

    fn restore_with_network(&self, from: &mut dyn Read) -> Result<(), StateError> {
        Ok(Self::restore(self, from)?)
    }

    fn leave(&self) {
        Self::leave(self);
    }

    fn blockers(&self) -> Vec<String> {
        self.core().hca.blockers()
    }

    fn resume(&self) -> Result<(), StateError> {
        let restored = self.control.lock().restored.is_some();
        self.finish_restore()?;
        self.end_connections_of_twin();
        Self::resume(self);
        if restored {
            self.core().hca.announce();
        }
        Ok(())
    }
}

impl<H: SaveHca> Core<H> {
    /// Checks that the slots and all rings are mapped.
    fn check_memory(&self, session: &Session, rings: &[PageList]) -> Result<(), RestoreError> {
        let unmapped = |what| move |source: DmaError| RestoreError::Memory { what, source };
        let view = self.memory.view();
        let &Session { shared_region: _, command_slot, response_slot, uar_pfn: _, version: _ } = session;
        view.slice(command_slot, REQUEST_SIZE, Direction::Read).map_err(unmapped("command slot"))?;
        view.slice(response_slot, RESPONSE_SIZE, Direction::Write).map_err(unmapped("response slot"))?;
        rings.iter().try_for_each(|pages| check_mapped(&view, pages, Direction::Write)).map_err(unmapped("ring"))
    }

    fn map_regions(&self) -> Result<(), RestoreError> {
        for (handle, mr) in self.objects.mrs.all() {
            let refused = |source| RestoreError::object(self.objects.mrs.what(), handle, source);
            self.hca.map_mr(&mr.verbs).map_err(refused)?;
        }
        Ok(())
    }

    fn bind_restored_gids(&self) -> Result<(), RestoreError> {
        let entries = self.objects.gids.lock().entries();
        for gid in entries {
            let refused = |source| RestoreError::object("GID", gid.index.into(), source);
            self.hca.restore_gid(gid.index, gid.gid, gid.kind, gid.vlan).map_err(refused)?;
        }
        Ok(())
    }
}
