//! Addresses: those of the host, those of guests, and which of the host's stands for which of a guest.
//!
//! A guest binds the addresses of its network interface. Where the host's table has the same address, the host's index of it is
//! used, and peers see the guest's address. Otherwise one address of the host stands for the guest, and what the guest
//! calls a peer by is translated if that peer is a guest of this process, too.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs;
use std::net::Ipv6Addr;
#[cfg(test)]
use std::path::Path;
use std::path::PathBuf;
use std::sync::Weak;
use std::thread;
use std::time::Duration;

use parking_lot::RwLock;
use pvrdma_verbs::{Gid, GidType, VerbsError};

use crate::adapter::Adapter;
use crate::backend::GidIndex;

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

/// The host's table, as it is in `/sys` now.
#[derive(Clone, Debug)]
pub(crate) struct HostGids {
    /// `…/ports/N`. Its `gid_attrs/types` says what the library's stable functions do not.
    folder: PathBuf,
    port: u8,
    entries: u32,
}

impl HostGids {
    pub(crate) fn new(device: &str, port: u8, entries: u32) -> Self {
        let folder = PathBuf::from(format!("/sys/class/infiniband/{device}/ports/{port}"));
        Self { folder, port, entries: entries.min(MAX_ENTRIES) }
    }

    /// A table that a test keeps in a folder.
    #[cfg(test)]
    pub(crate) fn in_folder(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), port: 1, entries: MAX_ENTRIES }
    }

    /// Makes an entry of such a table.
    #[cfg(test)]
    pub(crate) fn set(&self, entry: &HostGid) {
        for folder in ["gids", "gid_attrs/types"] {
            fs::create_dir_all(self.folder.join(folder)).unwrap();
        }
        fs::write(self.folder.join(format!("gids/{}", entry.index)), Ipv6Addr::from(entry.gid.0).to_string()).unwrap();
        let kind = if entry.kind == GidType::RoceV2 { "RoCE v2" } else { "IB/RoCE v1" };
        fs::write(self.folder.join(format!("gid_attrs/types/{}", entry.index)), kind).unwrap();
    }

    /// What is at an index now.
    pub(crate) fn entry(&self, index: u8) -> Option<HostGid> {
        let gid = parse(&fs::read_to_string(self.folder.join(format!("gids/{index}"))).ok()?)?;
        if gid.is_zero() {
            return None;
        }
        // Empty entries cannot be read.
        let kind = match fs::read_to_string(self.folder.join(format!("gid_attrs/types/{index}"))).ok()?.trim() {
            "RoCE v2" => GidType::RoceV2,
            "IB/RoCE v1" => GidType::RoceV1,
            _ => return None,
        };
        Some(HostGid { index, gid, kind })
    }

    /// The network interface that an entry comes from.
    pub(crate) fn interface(&self, index: u8) -> Result<String, String> {
        let path = self.folder.join(format!("gid_attrs/ndevs/{index}"));
        let name = fs::read_to_string(&path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        Ok(name.trim().to_owned())
    }

    /// What is in the table now.
    fn list(&self) -> Vec<HostGid> {
        let (mut found, mut gap) = (Vec::new(), 0);
        for index in (0..self.entries).map_while(|index| u8::try_from(index).ok()) {
            match self.entry(index) {
                Some(entry) => {
                    gap = 0;
                    found.push(entry);
                }
                None if gap < MAX_GAP => gap += 1,
                None => break,
            }
        }
        found
    }

    /// The entry with a guest's address, if the host has it.
    pub(crate) fn find(&self, gid: Gid, kind: GidType) -> Option<HostGid> {
        self.list().into_iter().find(|entry| entry.gid == gid && entry.kind == kind)
    }

    /// The same for an address that was added just now.
    pub(crate) fn await_new(&self, gid: Gid, kind: GidType) -> Option<HostGid> {
        soon(|| self.find(gid, kind))
    }

    /// Waits until addresses that were removed just now are gone.
    pub(crate) fn await_gone(&self, gids: &[Gid]) {
        if soon(|| (!self.list().iter().any(|entry| gids.contains(&entry.gid))).then_some(())).is_none() {
            log::warn!("port {} keeps GIDs whose addresses were removed", self.port);
        }
    }

    /// The entry that stands for guests.
    pub(crate) fn choose(&self, wanted: GidIndex) -> Result<HostGid, String> {
        let list = self.list();
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

/// What is to be found in the table shortly: the kernel changes it a moment after the addresses.
fn soon<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    const STEP: Duration = Duration::from_millis(2);
    const STEPS: u32 = 500;
    (0..STEPS).find_map(|_| {
        look().or_else(|| {
            thread::sleep(STEP);
            None
        })
    })
}

/// A GID as `/sys` writes it: eight groups of four digits.
fn parse(text: &str) -> Option<Gid> {
    text.trim().parse::<Ipv6Addr>().ok().map(|address| Gid(address.octets()))
}

/// A guest's GID as the host sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Bound {
    pub(crate) gid: Gid,
    pub(crate) kind: GidType,
    /// What stands for it.
    pub(crate) host: HostGid,
}

impl Bound {
    /// Whether the host has the guest's own address, so that nothing else stands for it.
    pub(crate) fn is_own(&self) -> bool {
        self.host.gid == self.gid && self.host.kind == self.kind
    }
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

    /// The device whose own address an entry of the host's table is.
    pub(crate) fn owner_of(&self, entry: &HostGid) -> Option<Weak<Adapter>> {
        let fabric = self.0.read();
        let (owner, bound) = fabric.get(&entry.gid)?;
        (bound.host == *entry).then(|| Weak::clone(owner))
    }

    /// What to call a peer on the wire.
    pub(crate) fn translate(&self, gid: Gid) -> Gid {
        self.0.read().get(&gid).map_or(gid, |(_, bound)| bound.host.gid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_of_the_kernel() {
        let mut bytes = [0; 16];
        bytes[10..].copy_from_slice(&[0xff, 0xff, 192, 168, 77, 1]);
        assert_eq!(parse("0000:0000:0000:0000:0000:ffff:c0a8:4d01\n"), Some(Gid(bytes)));
        assert_eq!(parse("0000:0000:0000:0000:0000:0000:0000:0000\n"), Some(Gid::default()));
        assert_eq!(parse(""), None);
    }

    #[test]
    fn the_table_is_searched_beyond_gaps() {
        let folder = tempfile::tempdir().unwrap();
        let gids = HostGids::in_folder(folder.path());
        let entry = |index, last| HostGid {
            index,
            gid: Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, last]),
            kind: GidType::RoceV2,
        };
        assert!(gids.choose(GidIndex::Auto).is_err());
        let entries = [entry(1, 1), HostGid { kind: GidType::RoceV1, ..entry(2, 1) }, entry(30, 2), entry(90, 3)];
        entries.iter().for_each(|entry| gids.set(entry));
        assert_eq!(gids.find(entry(30, 2).gid, GidType::RoceV2), Some(entry(30, 2)));
        assert_eq!(gids.find(entry(1, 1).gid, GidType::RoceV1).map(|entry| entry.index), Some(2));
        // Too far behind the others.
        assert_eq!(gids.find(entry(90, 3).gid, GidType::RoceV2), None);
        assert_eq!(gids.choose(GidIndex::Auto), Ok(entry(1, 1)));
        assert_eq!(gids.choose(GidIndex::Fixed(30)), Ok(entry(30, 2)));
    }

    #[test]
    fn an_entry_belongs_to_who_has_its_address() {
        let gid = |last| Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, last]);
        let entry = |index, last| HostGid { index, gid: gid(last), kind: GidType::RoceV2 };
        let fabric = Fabric::default();
        let owner = Weak::new();
        let own = Bound { gid: gid(1), kind: GidType::RoceV2, host: entry(3, 1) };
        // For this one the host's first address stands.
        let other = Bound { gid: gid(2), kind: GidType::RoceV2, host: entry(0, 9) };
        fabric.bind(&owner, own).unwrap();
        fabric.bind(&owner, other).unwrap();
        assert!(own.is_own() && !other.is_own());
        assert!(fabric.owner_of(&entry(3, 1)).is_some());
        // The index was given to another address since, the address has another index, and an address of the host itself.
        for entry in [entry(3, 7), entry(4, 1), entry(0, 9), HostGid { kind: GidType::RoceV1, ..entry(3, 1) }] {
            assert!(fabric.owner_of(&entry).is_none(), "{entry:?}");
        }
    }
}
