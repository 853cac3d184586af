//! Saving and restoring an adapter's objects.
//!
//! The device saves its own state and asks its adapter for the adapter's part of each object. The adapter encodes that
//! part itself, as opaque bytes, so that the device does not depend on the adapter. The arguments of the verb that
//! creates an object (sizes, page lists, queues) are the device's part: restoring an object repeats that verb with the
//! adapter's part as an additional argument.
//!
//! The bytes may come from a file or another host, so they are no more trustworthy than a command of a guest: an
//! adapter checks them completely, and refuses them with an error.

use pvrdma_verbs_types::{Gid, GidType};

use crate::error::VerbsError;
use crate::hca::{MrRequest, QpInit, SrqInit};
use crate::pause::PauseHca;
use crate::queue::SavedRing;

/// State of a memory region.
#[derive(Debug)]
pub struct SavedMr {
    /// Request that creates such a region.
    pub request: MrRequest,
    /// Part of the adapter.
    pub adapter: Vec<u8>,
}

/// State of a shared receive queue.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SavedSrq {
    /// Its ring.
    pub ring: SavedRing,
    /// The armed limit, 0 if disarmed.
    pub limit: u32,
    /// Part of the adapter.
    pub adapter: Vec<u8>,
}

/// State of a queue pair.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SavedQp {
    /// Send ring.
    pub send: SavedRing,
    /// Receive ring, unless the QP has a shared receive queue.
    pub recv: Option<SavedRing>,
    /// Every send generates a completion.
    pub signal_all: bool,
    /// Part of the adapter.
    pub adapter: Vec<u8>,
}

/// An adapter whose objects can be saved, and restored in another adapter of the same kind.
///
/// All methods require that the adapter is paused. Objects keep their identity: keys, QPNs and PSNs are those of the
/// saved objects.
///
/// # Order
///
/// Restoring begins with an adapter without objects, with [`Self::restore_tables`], and then follows the order in which
/// a guest creates objects. Until then, guest memory need not be mapped. [`Self::map_mr`] and the binding of GIDs need
/// it, and come last, before the adapter is resumed.
pub trait SaveHca: PauseHca {
    /// Name of the format of the adapter's parts. States are restored only in an adapter with the same name.
    const FORMAT: &'static str;

    /// Returns the state that belongs to no object: the keys that were in use before.
    ///
    /// # Errors
    /// The adapter cannot save its objects now; the error names the reason.
    fn save_tables(&self) -> Result<Vec<u8>, VerbsError>;

    /// Restores the state that belongs to no object.
    ///
    /// # Errors
    /// The state is invalid, or there are objects.
    fn restore_tables(&self, saved: &[u8]) -> Result<(), VerbsError>;

    /// Binds a GID that was bound when the device was saved. The address is on its way from the saved device to this
    /// one, so no other host is asked for it.
    ///
    /// # Errors
    /// As for [`Hca::bind_gid_in_vlan`].
    fn restore_gid(&self, index: u8, gid: Gid, kind: GidType, vlan: Option<u16>) -> Result<(), VerbsError> {
        self.bind_gid_in_vlan(index, gid, kind, vlan)
    }

    /// Lets restored queue pairs whose peers were in the process in which they were saved find them on the network.
    /// Called after all of them were restored, if the device has moved without the other devices of that process.
    ///
    /// # Errors
    /// The peers cannot be reached.
    fn move_connections(&self) -> Result<(), VerbsError> {
        Ok(())
    }

    /// Ends all restored connections: their queue pairs are in the error state, and their requests flush when the
    /// adapter is resumed. Called after all of them were restored. Returns their number.
    fn end_connections(&self) -> usize {
        0
    }

    /// Announces the restored addresses to hosts and switches, which may know them at the place of the saved device.
    /// Called after the adapter was resumed.
    fn announce(&self) {}

    /// Returns the number of times that another machine announced an address of this adapter from the MAC address of
    /// this adapter. If the number grows after the state was saved, the machine that restored it runs.
    fn twins(&self) -> u64 {
        0
    }

    /// Lets the peers of this adapter in the process find it on the network. Called when another adapter has its state
    /// and is about to run; this one is reset next.
    fn leave(&self) {}

    /// Describes the objects with which the device cannot move to another host.
    fn blockers(&self) -> Vec<String> {
        Vec::new()
    }

    /// Saves a memory region.
    ///
    /// # Errors
    /// The region is destroyed.
    fn save_mr(&self, mr: &Self::Mr) -> Result<SavedMr, VerbsError>;

    /// Restores a memory region. The caller has checked the request as that of a guest.
    ///
    /// # Errors
    /// The state is invalid, or as for [`crate::Hca::register_mr`].
    fn restore_mr(&self, pd: &Self::Pd, saved: SavedMr) -> Result<Self::Mr, VerbsError>;

    /// Maps the memory of a restored region: checks its pages and pins them as the policy requires.
    ///
    /// # Errors
    /// The memory is not mapped, or cannot be pinned.
    fn map_mr(&self, mr: &Self::Mr) -> Result<(), VerbsError>;

    /// Saves a shared receive queue.
    ///
    /// # Errors
    /// The queue is destroyed, or its ring cannot be saved.
    fn save_srq(&self, srq: &Self::Srq) -> Result<SavedSrq, VerbsError>;

    /// Restores a shared receive queue. The ring is at its saved position.
    ///
    /// # Errors
    /// The state is invalid, or as for [`crate::Hca::create_srq`].
    fn restore_srq(&self, init: SrqInit<'_, Self>, adapter: &[u8]) -> Result<Self::Srq, VerbsError>;

    /// Saves a queue pair.
    ///
    /// # Errors
    /// The QP is destroyed, or one of its rings cannot be saved.
    fn save_qp(&self, qp: &Self::Qp) -> Result<SavedQp, VerbsError>;

    /// Restores a queue pair with the QPN of `init`. The rings are at their saved positions.
    ///
    /// # Errors
    /// The state is invalid or does not match the rings, or as for [`crate::Hca::create_qp`].
    fn restore_qp(&self, init: QpInit<'_, Self>, adapter: &[u8]) -> Result<Self::Qp, VerbsError>;
}
