//! Migration of a device by its client: version 2 of VFIO's migration interface, as vfio-user carries it.
//!
//! | message | effect |
//! | --- | --- |
//! | DEVICE_FEATURE, MIG_DEVICE_STATE | moves the device through the states of [`MigrationState`] |
//! | MIG_DATA_READ | in STOP_COPY: moves a part of the saved state to the client; less than it asked for is the end |
//! | MIG_DATA_WRITE | in RESUMING: adds a part of the state |
//! | DEVICE_FEATURE, DMA_LOGGING_… | starts, reports and ends the log of written pages |
//!
//! A device is restored when it leaves RESUMING, and looks its memory up when it enters RUNNING. The client may
//! therefore map memory after it has written the state. Its writes to configuration space in RESUMING have no effect on
//! the restored objects: configuration space is part of the state.
//!
//! BARs are accessible in RUNNING only, because a paused function takes no register access. Configuration space,
//! memory and interrupts may change in every state.
//!
//! The state in transit and the log are charged to the memory that the device may keep.

mod data;
pub(crate) mod feature;
mod state;

use std::error::Error;
use std::io;

use pvrdma_guest_memory::{DirtyLogError, Kept};
use rustix::io::Errno;
use vfio_bindings::bindings::vfio::VFIO_MIGRATION_STOP_COPY;

use self::data::StateData;
pub use self::feature::{Feature, LogRanges};
use self::state::Arc;
pub use self::state::MigrationState;
use crate::endpoint::Endpoint;
use crate::migratable_device::MigratableDevice;

/// Estimate of a state's size beyond the device's objects, in bytes: registers, and the device's link.
const STATE_BASE: u64 = 64 << 10;

/// Migration of the device by the connected client.
pub(crate) struct Migration<'a> {
    endpoint: &'a Endpoint,
    state: MigrationState,
    /// The saved state in STOP_COPY, the state so far in RESUMING.
    data: Option<StateData>,
    /// The client has read the whole state that was saved last.
    read: bool,
}

impl<'a> Migration<'a> {
    pub(crate) const fn new(endpoint: &'a Endpoint) -> Self {
        Self { endpoint, state: MigrationState::Running, data: None, read: false }
    }

    /// Returns `true` if the client may access BARs now.
    pub(crate) fn allows_bars(&self) -> bool {
        self.state == MigrationState::Running
    }

    /// Executes a DEVICE_FEATURE request. `body` is the whole body of the message. Appends the body of the reply to
    /// `out`.
    ///
    /// # Errors
    /// The function cannot be migrated (`ENOTTY`), or the request is refused.
    pub(crate) fn feature(&mut self, feature: Feature<'_>, body: &[u8], out: &mut Vec<u8>) -> Result<(), Errno> {
        let device = self.endpoint.migration.as_ref().ok_or(Errno::NOTTY)?;
        match feature {
            Feature::Probe => out.extend(body),
            Feature::Migration => put(out, body, &u64::from(VFIO_MIGRATION_STOP_COPY).to_le_bytes()),
            Feature::GetState => put(out, body, &u64::from(self.state.number()).to_le_bytes()),
            Feature::SetState(target) => {
                self.set_state(device, target)?;
                out.extend(body);
            }
            Feature::DataSize => put(out, body, &self.data_size(device).to_le_bytes()),
            Feature::StartLog(ranges) => {
                let blockers = device.function.blockers();
                for blocker in &blockers {
                    self.endpoint.warn(module_path!(), format_args!("the device cannot migrate: {blocker}"));
                }
                if !blockers.is_empty() {
                    return Err(Errno::BUSY);
                }
                let started = self.endpoint.memory.start_dirty_log(&ranges.to_vec(), &device.budget);
                started.map_err(|error| self.refuse_log(&error))?;
                self.publish();
                out.extend(body);
            }
            Feature::StopLog => {
                self.endpoint.memory.stop_dirty_log();
                self.publish();
                out.extend(body);
            }
            Feature::ReportLog { iova, length, page_size } => {
                let words = self.endpoint.memory.report_dirty(iova, length, page_size);
                let words = words.map_err(|error| self.refuse_log(&error))?;
                let request = [iova, length, page_size].into_iter().chain(words);
                put(out, body, &request.flat_map(u64::to_le_bytes).collect::<Vec<_>>());
            }
        }
        Ok(())
    }

    /// Executes MIG_DATA_READ.
    ///
    /// # Errors
    /// The state of the device is not being read.
    pub(crate) fn read(&mut self, size: u32, out: &mut Vec<u8>) -> Result<(), Errno> {
        let data = self.data.as_mut().filter(|_| self.state == MigrationState::StopCopy).ok_or(Errno::INVAL)?;
        let size = u32::try_from(data.len()).unwrap_or(u32::MAX).min(size);
        out.extend(size.saturating_add(8).to_le_bytes());
        out.extend(size.to_le_bytes());
        data.drain_to(usize::try_from(size).map_err(|_| Errno::INVAL)?, out);
        self.read = data.len() == 0;
        Ok(())
    }

    /// Executes MIG_DATA_WRITE.
    ///
    /// # Errors
    /// No state is expected, or the device may not keep so much.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), Errno> {
        let data = self.data.as_mut().filter(|_| self.state == MigrationState::Resuming).ok_or(Errno::INVAL)?;
        data.append(bytes).map_err(|error| {
            self.endpoint.warn(module_path!(), format_args!("saved state refused: {error}"));
            Errno::NOMEM
        })
    }

    /// Handles the end of the connection, before the function is reset. If it comes in STOP and the client has read the
    /// whole state, the VM continues elsewhere.
    pub(crate) fn disconnected(&self) {
        if let Some(device) = self.endpoint.migration.as_ref()
            && self.state == MigrationState::Stop
            && self.read
        {
            self.endpoint.info(module_path!(), format_args!("the VM has moved away"));
            device.function.leave();
            (device.left)();
        }
    }

    /// Ends a migration after the function was reset: the device runs again.
    pub(crate) fn reset(&mut self) {
        (self.data, self.read) = (None, false);
        if let Some(device) = self.endpoint.migration.as_ref() {
            // Ends a pause that the reset has left; there is nothing to restore that could fail.
            let _ = device.function.resume();
        }
        self.state = MigrationState::Running;
        self.publish();
    }

    /// Moves the device to a state, arc by arc. After an error it is in the state that it has reached, or in ERROR.
    fn set_state(&mut self, device: &MigratableDevice, target: MigrationState) -> Result<(), Errno> {
        if self.state == MigrationState::Error || target == MigrationState::Error {
            return Err(Errno::INVAL);
        }
        while let Some((arc, next)) = self.state.towards(target) {
            let taken = self.take(device, arc);
            self.state = match taken {
                Err(_) if arc == Arc::Save => self.state,
                Err(_) => MigrationState::Error,
                Ok(()) => next,
            };
            self.publish();
            taken?;
        }
        Ok(())
    }

    fn take(&mut self, device: &MigratableDevice, arc: Arc) -> Result<(), Errno> {
        self.read &= arc == Arc::EndSave;
        match arc {
            Arc::Pause => device.function.pause(),
            Arc::Save => {
                let mut data = StateData::new(&device.budget);
                device.function.save(&mut data).map_err(|error| self.refuse("not saved", &*error, Errno::IO))?;
                self.data = Some(data);
            }
            Arc::EndSave => self.data = None,
            Arc::Expect => self.data = Some(StateData::new(&device.budget)),
            Arc::Restore => {
                let mut data = self.data.take().ok_or(Errno::INVAL)?;
                let restored = device.function.restore(&mut data);
                restored.map_err(|error| self.refuse("not restored", &*error, Errno::INVAL))?;
                if data.len() > 0 {
                    device.function.reset();
                    // A reset may leave the pause.
                    let _ = device.function.resume();
                    let left = format!("{} bytes follow the state", data.len());
                    return Err(self.refuse("not restored", &*Box::<dyn Error>::from(left), Errno::INVAL));
                }
            }
            Arc::Resume => {
                device.function.resume().map_err(|error| self.refuse("not resumed", &*error, Errno::FAULT))?;
            }
        }
        Ok(())
    }

    /// Returns the bytes of the state: exactly if it was saved, otherwise an estimate that is rather too high.
    fn data_size(&self, device: &MigratableDevice) -> u64 {
        match (&self.data, self.state) {
            (Some(data), MigrationState::StopCopy) => data.len(),
            _ => [Kept::Objects, Kept::Requests]
                .iter()
                .fold(STATE_BASE, |sum, &kept| sum.saturating_add(device.budget.used_for(kept))),
        }
    }

    /// Records if the client migrates the device: a hand-over to another process would lose the state of the migration.
    fn publish(&self) {
        let logging = self.endpoint.memory.has_dirty_log();
        self.endpoint.stats.set_migrating(self.state != MigrationState::Running || logging);
    }

    fn refuse(&self, what: &str, error: &(dyn Error + 'static), errno: Errno) -> Errno {
        let (mut reasons, mut memory, mut next) = (Vec::new(), false, Some(error));
        while let Some(error) = next {
            let io = error.downcast_ref::<io::Error>();
            memory |= io.is_some_and(|error| error.kind() == io::ErrorKind::OutOfMemory);
            reasons.push(error.to_string());
            next = error.source();
        }
        let reasons = reasons.join(": ");
        self.endpoint.warn(module_path!(), format_args!("the device is {what}: {reasons}"));
        if memory { Errno::NOMEM } else { errno }
    }

    fn refuse_log(&self, error: &DirtyLogError) -> Errno {
        self.endpoint.warn(module_path!(), format_args!("{error}"));
        match error {
            DirtyLogError::Budget(_) => Errno::NOMEM,
            DirtyLogError::Pieces(_) => Errno::NOTSUP,
            _ => Errno::INVAL,
        }
    }
}

/// Writes the reply to a request for a feature: the space that it takes, the flags of the request, and the data.
fn put(out: &mut Vec<u8>, body: &[u8], data: &[u8]) {
    let size = u32::try_from(data.len()).unwrap_or(u32::MAX).saturating_add(8);
    out.extend(size.to_le_bytes());
    out.extend(body.get(4..8).unwrap_or_default());
    out.extend(data);
}
