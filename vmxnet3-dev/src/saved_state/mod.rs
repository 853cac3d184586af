//! Saving and restoring a device, see [`Migratable`](pvrdma_pci_function::Migratable).
//!
//! All of a state is checked before any of it takes effect; a refused state leaves the device as after a reset. The
//! rings are looked up in the memory map when the pause ends, because a VMM may map the guest's memory after it has
//! passed the state. `stream.rs` writes a state to a stream of bytes, and reads it from one.
//!
//! # State that is not saved
//!
//! * The state of the link: that of the destination holds. If it is not the one of which the driver was last notified,
//!   the driver is notified when the pause ends.
//! * Doorbells: the end of the pause looks at all rings.
//! * Transmit completions and batches of received frames for which the driver has not been interrupted. They make a
//!   masked vector pending; on unmasked vectors the end of the pause interrupts the driver in any case.
//! * A frame for which there was no receive buffer: the port has it, and may lose it.
//! * Name, speed, number of vectors, and offloads of the port: the configuration of the destination.

pub(crate) mod error;
#[cfg(feature = "saved-state")]
mod stream;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use pvrdma_pci_function::{CONFIG_SIZE, PciFunction};
use pvrdma_saved_state::vmxnet3 as saved;

use crate::abi::command::Coalesce;
use crate::cmd::Registers;
use crate::core::{Core, Pause};
use crate::device::{Control, Vmxnet3Device};
use crate::intr::Interrupts;
use crate::session::Session;
pub use error::{RestoreError, SaveError};
pub(crate) use error::{exact, narrow, present, require};

/// State of a paused device as a value, for a VMM that saves it in a format of its own. Untrusted where it is restored.
#[derive(Clone, PartialEq, Debug, Default)]
#[non_exhaustive]
pub struct Vmxnet3State {
    /// Registers, interrupts, statistics, and the session of the driver.
    pub function: saved::Function,
    /// Multicast addresses of the session's filter, 6 bytes each.
    pub multicast: Vec<u8>,
}

/// A state that has been checked.
struct Checked {
    function: saved::Function,
    session: Option<Session>,
    registers: Registers,
    mac: [u8; 6],
    coalesce: Coalesce,
    interrupts: saved::Interrupts,
}

impl Vmxnet3Device {
    /// Does the same as [`Migratable::pause`](pvrdma_pci_function::Migratable::pause).
    pub fn pause(&self) {
        let _control = self.control.lock();
        self.core.pause();
    }

    /// Returns the state of the paused device. It remains paused.
    ///
    /// # Errors
    /// The device is not paused.
    pub fn state(&self) -> Result<Vmxnet3State, SaveError> {
        self.saved(&self.control.lock())
    }

    /// Resets the device, and replaces its state, which is checked first. The device is paused afterwards.
    ///
    /// # Errors
    /// The state is refused. The device is then as after a reset.
    pub fn set_state(&self, state: Vmxnet3State) -> Result<(), RestoreError> {
        let mut control = self.control.lock();
        self.reset_with(&mut control);
        let checked = self.check_state(state)?;
        self.apply(&mut control, checked);
        Ok(())
    }

    /// Does the same as [`Migratable::resume`](pvrdma_pci_function::Migratable::resume).
    ///
    /// # Errors
    /// The guest does not have the memory of a restored session.
    pub fn resume_state(&self) -> Result<(), RestoreError> {
        let core = &self.core;
        let mut control = self.control.lock();
        let Some(Pause { session, restored }) = core.paused.lock().take() else { return Ok(()) };
        // Without bus mastering no memory can be accessed now; accesses check for themselves later.
        if let Some(session) = session.as_ref().filter(|_| restored && core.is_bus_master()) {
            let checked = session.check_memory(&core.memory.view());
            if let Err(error) = checked {
                self.reset_with(&mut control);
                return Err(error);
            }
        }
        core.end_pause(session);
        drop(control);
        self.run_deferred();
        Ok(())
    }

    /// Returns the state of a paused device.
    fn saved(&self, control: &Control) -> Result<Vmxnet3State, SaveError> {
        let Self { core, control: _, pci } = self;
        let Control { registers: Registers { revision, shared }, result } = *control;
        let session = core.paused.lock().as_ref().ok_or(SaveError::NotPaused)?.session.clone();
        let session = session.map(|session| session.save());
        let mut config_space = vec![0; CONFIG_SIZE];
        pci.lock().read(0, &mut config_space, false);
        let (session, multicast) = session.unzip();
        let function =
            saved::Function { config_space, revision: revision.into(), shared, result, session, ..core.save() };
        Ok(Vmxnet3State { function, multicast: multicast.unwrap_or_default() })
    }

    fn check_state(&self, state: Vmxnet3State) -> Result<Checked, RestoreError> {
        let config = &self.core.config;
        let Vmxnet3State { mut function, multicast } = state;
        let interrupts = present("interrupts", function.interrupts.take())?;
        Interrupts::check(&interrupts, config.vectors)?;
        let session = match function.session.take() {
            Some(session) => Some(Session::restore(session, &multicast, interrupts.auto_mask, config.vectors)?),
            None => {
                require("length of the multicast table", multicast.len() as u64, multicast.is_empty())?;
                None
            }
        };
        require("revision", function.revision, (1..=3).contains(&function.revision))?;
        let registers = Registers { revision: narrow("revision", function.revision)?, shared: function.shared };
        exact::<CONFIG_SIZE>("configuration space", &function.config_space)?;
        let scheme = exact("coalescing scheme", &function.coalesce)?;
        let coalesce = present("known coalescing scheme", Coalesce::parse(&scheme))?;
        Core::check(&function)?;
        let mac = exact("MAC address", &function.mac)?;
        Ok(Checked { function, session, registers, mac, coalesce, interrupts })
    }

    /// Applies a state to the device after a reset, and pauses it.
    fn apply(&self, control: &mut Control, checked: Checked) {
        let Checked { function, session, registers, mac, coalesce, interrupts } = checked;
        let core = &self.core;
        core.pause();
        core.interrupts.restore(&interrupts);
        core.set_coalesce(coalesce);
        core.restore(&function, mac);
        *control = Control { registers, result: function.result };
        *core.paused.lock() = Some(Pause { session: session.map(Arc::new), restored: true });
        // Last, because it enables access to memory.
        self.config_write(0, &function.config_space);
    }
}
