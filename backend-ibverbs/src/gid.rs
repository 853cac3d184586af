//! Addresses: those of the host, those of guests, and which of the host's stands for which of a guest.
//!
//! A guest binds the addresses of its network interface. Where the host's table has the same address, the host's index of it is
//! used, and peers see the guest's address. Otherwise one address of the host stands for the guest, and what the guest
//! calls a peer by is translated if that peer is a guest of this process, too.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs;
use std::path::PathBuf;
use std::sync::Weak;
use std::thread;
use std::time::Duration;

use parking_lot::RwLock;
use rdma_backend::{Gid, GidType, VerbsError};

use crate::adapter::Adapter;
use crate::backend::GidIndex;
use crate::verbs::HostDevice;

/// Entries of the host's table that are looked at. Some adapters have a thousand and use the first few.
const MAX_ENTRIES: u32 = 256;
/// So many empty entries in a row end the search.
const MAX_GAP: u32 = 32;

/// An entry of the host's table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct HostGid {
    pub(crate) index: u8,
    pub(crate) gid: Gid,
    pub(crate) kind: GidType,
}

/// The host's table.
#[derive(Debug)]
pub(crate) struct HostGids {
    /// `…/gid_attrs`, which says what the library's stable functions do not.
    attributes: PathBuf,
    port: u8,
    entries: u32,
}

impl HostGids {
    pub(crate) fn new(device: &str, port: u8, entries: u32) -> Self {
        let attributes = PathBuf::from(format!("/sys/class/infiniband/{device}/ports/{port}/gid_attrs"));
        Self { attributes, port, entries: entries.min(MAX_ENTRIES) }
    }

    fn kind(&self, index: u8) -> Option<GidType> {
        // Empty entries cannot be read.
        match fs::read_to_string(self.attributes.join("types").join(index.to_string())).ok()?.trim() {
            "RoCE v2" => Some(GidType::RoceV2),
            "IB/RoCE v1" => Some(GidType::RoceV1),
            _ => None,
        }
    }

    /// The network interface that an entry comes from.
    pub(crate) fn interface(&self, index: u8) -> Result<String, String> {
        let path = self.attributes.join("ndevs").join(index.to_string());
        let name = fs::read_to_string(&path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        Ok(name.trim().to_owned())
    }

    /// What is in the table now.
    fn list(&self, device: &HostDevice) -> Vec<HostGid> {
        let (mut found, mut gap) = (Vec::new(), 0);
        for index in 0..self.entries {
            let Ok(narrow) = u8::try_from(index) else { break };
            let gid = device.gid(self.port, index).map(Gid).unwrap_or_default();
            if gid.is_zero() {
                gap += 1;
                if gap > MAX_GAP {
                    break;
                }
            } else if let Some(kind) = self.kind(narrow) {
                gap = 0;
                found.push(HostGid { index: narrow, gid, kind });
            }
        }
        found
    }

    /// The entry with a guest's address, if the host has it.
    pub(crate) fn find(&self, device: &HostDevice, gid: Gid, kind: GidType) -> Option<HostGid> {
        self.list(device).into_iter().find(|entry| entry.gid == gid && entry.kind == kind)
    }

    /// The same for an address that was added just now: the kernel fills the table a moment later.
    pub(crate) fn await_new(&self, device: &HostDevice, gid: Gid, kind: GidType) -> Option<HostGid> {
        const STEP: Duration = Duration::from_millis(2);
        const STEPS: u32 = 500;
        (0..STEPS).find_map(|_| {
            self.find(device, gid, kind).or_else(|| {
                thread::sleep(STEP);
                None
            })
        })
    }

    /// The entry that stands for guests.
    pub(crate) fn choose(&self, device: &HostDevice, wanted: GidIndex) -> Result<HostGid, String> {
        let list = self.list(device);
        let chosen = match wanted {
            GidIndex::Fixed(index) => list.iter().find(|entry| u32::from(entry.index) == index),
            GidIndex::Auto => list.iter().min_by_key(|entry| {
                let link_local = entry.gid.0[..2] == [0xfe, 0x80];
                (entry.kind != GidType::RoceV2, link_local, entry.gid.ipv4().is_none())
            }),
        };
        chosen.copied().ok_or_else(|| match wanted {
            GidIndex::Fixed(index) => format!("port {} has no GID at index {index}", self.port),
            GidIndex::Auto => format!("port {} has no GID (is its network interface up, with an address?)", self.port),
        })
    }
}

/// A guest's GID as the host sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Bound {
    pub(crate) gid: Gid,
    pub(crate) kind: GidType,
    /// What stands for it.
    pub(crate) host: HostGid,
}

/// Which device of this process has which GID.
#[derive(Debug, Default)]
pub(crate) struct Fabric(RwLock<HashMap<Gid, (Weak<Adapter>, Bound)>>);

impl Fabric {
    pub(crate) fn bind(&self, owner: &Weak<Adapter>, bound: Bound) -> Result<(), VerbsError> {
        match self.0.write().entry(bound.gid) {
            Entry::Occupied(entry) if entry.get().0.strong_count() > 0 && !entry.get().0.ptr_eq(owner) => {
                Err(VerbsError::InUse("GID"))
            }
            entry => {
                entry.insert_entry((Weak::clone(owner), bound));
                Ok(())
            }
        }
    }

    pub(crate) fn unbind(&self, owner: &Weak<Adapter>, gid: Gid) {
        if let Entry::Occupied(entry) = self.0.write().entry(gid)
            && entry.get().0.ptr_eq(owner)
        {
            entry.remove();
        }
    }

    /// The device that has a GID.
    pub(crate) fn owner(&self, gid: Gid) -> Option<Weak<Adapter>> {
        self.0.read().get(&gid).map(|(owner, _)| Weak::clone(owner))
    }

    /// What to call a peer on the wire.
    pub(crate) fn translate(&self, gid: Gid) -> Gid {
        self.0.read().get(&gid).map_or(gid, |(_, bound)| bound.host.gid)
    }
}
