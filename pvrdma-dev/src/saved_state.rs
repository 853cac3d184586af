//! Saving and restoring a device, for snapshots and live migration. Not supported, and reported as such to the VMM.
//!
//! A VMM that can migrate its guest must call [`PvrdmaDevice::save`] first, and must not migrate the guest if that
//! fails. A device that is left out of a migration would be in power-on state at the destination while the guest's
//! driver assumes that it is active: every connection would be lost without an error, and a command would time out.
//!
//! # State that would have to be saved
//!
//! | State | Where it is | What makes it hard |
//! | --- | --- | --- |
//! | configuration space, registers, phase, session | `pci.rs`, `device.rs`, `dsr.rs` | nothing |
//! | interrupt mask and cause, causes held back | `intr.rs` | nothing |
//! | doorbell pages and their contexts | `uar.rs` | nothing |
//! | tables: handles, owners, numbers, rounds, GID bindings | `objects/` | handles must be given out as before |
//! | page lists of rings and regions | `objects/`, `ring/`, backend | the guest may have freed its page directories |
//! | indices of each ring, its broken state | `ring/` | must be taken while nothing runs |
//! | arming of each CQ, events that wait for room | `datapath/complete`, `events/` | nothing |
//! | keys of regions | backend | a host's adapter chooses its keys; the guest and its peers know them |
//! | QPs: state, attributes, PSNs, requests in flight, reorder buffer | backend | `inspect` shows it; nothing sets it |
//! | peers | other hosts | they must find the GID at its new place before their retries end |
//!
//! The last three need verbs that backends do not have: stop a QP between two packets, set its PSNs, read and set the
//! unacknowledged requests, and register memory under a given key.

use pvrdma_verbs::Backend;
use thiserror::Error;

use crate::device::PvrdmaDevice;

/// Saved state of a device. No value of this type can exist yet, so nothing can be restored from one by mistake.
#[derive(Debug)]
#[non_exhaustive]
pub enum SavedState {}

/// Reason why a device was not saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SaveError {
    /// This version cannot save any device, see [the module](self).
    #[error("the state of a PVRDMA device cannot be saved: the guest must not be migrated while it has one")]
    SavedStateNotSupported,
}

impl<B: Backend> PvrdmaDevice<B> {
    /// Saves the device's state, to be restored at another place or time.
    ///
    /// # Errors
    /// Always [`SaveError::SavedStateNotSupported`]; see [the module](self) for the requirements. The device continues
    /// unchanged.
    pub const fn save(&self) -> Result<SavedState, SaveError> {
        Err(SaveError::SavedStateNotSupported)
    }
}
