//! A state as a stream of bytes: one record with the registers and the session of the driver, and records with the
//! multicast addresses.

use std::io::{Read, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use pvrdma_packet::MacAddr;
use pvrdma_pci_function::{Migratable, StateError};
use pvrdma_saved_state::{DeviceKind, Header, Reader, Writer, vmxnet3 as saved};

use super::Vmxnet3State;
use super::error::{RestoreError, SaveError};
use crate::device::Vmxnet3Device;

/// Maximum length of a state, in bytes: the function, 64 KiB of multicast addresses, and their records.
pub(super) const MAX_STATE: u64 = 256 << 10;
/// Maximum number of bytes of multicast addresses in a record.
const MULTICAST_RECORD: usize = 1024 * 6;

impl Vmxnet3Device {
    /// Does the same as [`Migratable::save`].
    ///
    /// # Errors
    /// The device is not paused, or `to` fails.
    pub fn save_state(&self, to: &mut dyn Write) -> Result<(), SaveError> {
        // Held to the end, so that no thread ends the pause.
        let control = self.control.lock();
        let Vmxnet3State { function, multicast } = self.saved(&control)?;
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
        let checked = self.check_state(self.read_state(from)?)?;
        self.apply(&mut control, checked);
        Ok(())
    }

    /// Reads a state to its end.
    fn read_state(&self, from: &mut dyn Read) -> Result<Vmxnet3State, RestoreError> {
        let mut reader = Reader::new(from, MAX_STATE)?;
        let Header { device, mac, .. } = *reader.header();
        if device != DeviceKind::Vmxnet3 {
            return Err(RestoreError::Device);
        }
        if mac != self.core.config.mac.0 {
            return Err(RestoreError::Mac(MacAddr(mac)));
        }
        let function = reader.expect()?;
        let mut multicast = Vec::new();
        while let Some(record) = reader.next()? {
            multicast.extend(record.decode::<saved::MulticastAddresses>()?.addresses);
        }
        Ok(Vmxnet3State { function, multicast })
    }
}

impl Migratable for Vmxnet3Device {
    fn pause(&self) {
        Self::pause(self);
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
