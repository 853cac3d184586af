//! Saving and restoring a device, see [`Migratable`].
//!
//! The state is one record with the registers and the session of the driver, and records with the multicast addresses.
//! All of it is read and checked before any of it takes effect; a refused state leaves the device as after a reset. The
//! rings are looked up in the memory map when the pause ends, because a VMM may map the guest's memory after it has
//! passed the state.
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
#[cfg(test)]
mod tests;

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use pvrdma_packet::MacAddr;
use pvrdma_pci_function::{CONFIG_SIZE, Migratable, PciFunction, StateError};
use pvrdma_saved_state::{DeviceKind, Header, Reader, Writer, vmxnet3 as saved};

use crate::abi::command::Coalesce;
use crate::cmd::Registers;
use crate::core::{Core, Pause};
use crate::device::{Control, Vmxnet3Device};
use crate::intr::Interrupts;
use crate::session::Session;
pub use error::{RestoreError, SaveError};
pub(crate) use error::{exact, narrow, present, require};

/// Maximum length of a state, in bytes: the function, 64 KiB of multicast addresses, and their records.
const MAX_STATE: u64 = 256 << 10;
/// Maximum number of bytes of multicast addresses in a record.
const MULTICAST_RECORD: usize = 1024 * 6;

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
    /// Does the same as [`Migratable::save`].
    ///
    /// # Errors
    /// The device is not paused, or `to` fails.
    pub fn save_state(&self, to: &mut dyn Write) -> Result<(), SaveError> {
        // Held to the end, so that no thread ends the pause.
        let control = self.control.lock();
        let Some((function, multicast)) = self.saved(&control) else { return Err(SaveError::NotPaused) };
        let config = &self.core.config;
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let time = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let header = Header::new(DeviceKind::Vmxnet3, config.mac.0);
        let live = self.core.memory.has_dirty_log();
        let mut writer = Writer::new(to, &Header { name: config.name.clone(), time, live, ..header }, MAX_STATE)?;
        writer.write(&function)?;
        for addresses in multicast.chunks(MULTICAST_RECORD) {
            writer.write(&saved::MulticastAddresses { addresses: addresses.to_vec() })?;
        }
        Ok(writer.finish()?)
    }

    /// Does the same as [`Migratable::restore`].
    ///
    /// # Errors
    /// The state is refused, or `from` fails.
    pub fn restore_state(&self, from: &mut dyn Read) -> Result<(), RestoreError> {
        let mut control = self.control.lock();
        self.reset_with(&mut control);
        let checked = self.read_state(from)?;
        self.apply(&mut control, checked);
        Ok(())
    }

    /// Does the same as [`Migratable::resume`].
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

    /// Returns the state of a paused device, and the multicast table of its session.
    fn saved(&self, control: &Control) -> Option<(saved::Function, Vec<u8>)> {
        let Self { core, control: _, pci } = self;
        let Control { registers: Registers { revision, shared }, result } = *control;
        let session = core.paused.lock().as_ref()?.session.clone();
        let session = session.map(|session| session.save());
        let mut config_space = vec![0; CONFIG_SIZE];
        pci.lock().read(0, &mut config_space, false);
        let (session, multicast) = session.unzip();
        let function =
            saved::Function { config_space, revision: revision.into(), shared, result, session, ..core.save() };
        Some((function, multicast.unwrap_or_default()))
    }

    /// Reads a state to its end, and checks it.
    fn read_state(&self, from: &mut dyn Read) -> Result<Checked, RestoreError> {
        let config = &self.core.config;
        let mut reader = Reader::new(from, MAX_STATE)?;
        let Header { device, mac, .. } = *reader.header();
        if device != DeviceKind::Vmxnet3 {
            return Err(RestoreError::Device);
        }
        if mac != config.mac.0 {
            return Err(RestoreError::Mac(MacAddr(mac)));
        }
        let mut function: saved::Function = reader.expect()?;
        let mut multicast = Vec::new();
        while let Some(record) = reader.next()? {
            multicast.extend(record.decode::<saved::MulticastAddresses>()?.addresses);
        }
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

impl Migratable for Vmxnet3Device {
    fn pause(&self) {
        let _control = self.control.lock();
        self.core.pause();
    }

    fn save(&self, to: &mut dyn Write) -> Result<(), StateError> {
        Ok(self.save_state(to)?)
    }

    fn restore(&self, from: &mut dyn Read) -> Result<(), StateError> {
        Ok(self.restore_state(from)?)
    }

    fn resume(&self) -> Result<(), StateError> {
        Ok(self.resume_state()?)
    }
}
