//! GID table of the host's port, as exposed by the kernel in `/sys/class/infiniband/DEVICE/ports/N`
//! (Documentation/ABI/stable/sysfs-class-infiniband).

use std::fs;
use std::net::Ipv6Addr;
#[cfg(test)]
use std::path::Path;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use pvrdma_verbs_types::{Gid, GidType};

use crate::config::GidIndex;

/// Number of entries of the host's table that are read. Some adapters have a thousand and use only the first few.
const MAX_ENTRIES: u32 = 256;
/// Number of consecutive empty entries that ends the search.
const MAX_GAP: u32 = 32;

/// An entry of the host's table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct HostGid {
    pub(crate) index: u8,
    pub(crate) gid: Gid,
    pub(crate) kind: GidType,
}

/// GID table of the host, read from `/sys` on each access.
#[derive(Clone, Debug)]
pub(crate) struct HostGids {
    /// `…/ports/N`. Its `gid_attrs/types` has data that the library's stable functions do not return.
    folder: PathBuf,
    port: u8,
    entries: u32,
}

impl HostGids {
    pub(crate) fn new(device: &str, port: u8, entries: u32) -> Self {
        let folder = PathBuf::from(format!("/sys/class/infiniband/{device}/ports/{port}"));
        Self { folder, port, entries: entries.min(MAX_ENTRIES) }
    }

    /// Returns a table that a test keeps in a folder.
    #[cfg(test)]
    pub(crate) fn in_folder(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), port: 1, entries: MAX_ENTRIES }
    }

    /// Adds an entry to a test's table.
    #[cfg(test)]
    pub(crate) fn set(&self, entry: &HostGid) {
        for folder in ["gids", "gid_attrs/types"] {
            fs::create_dir_all(self.folder.join(folder)).unwrap();
        }
        fs::write(self.folder.join(format!("gids/{}", entry.index)), Ipv6Addr::from(entry.gid.0).to_string()).unwrap();
        let kind = if entry.kind == GidType::RoceV2 { "RoCE v2" } else { "IB/RoCE v1" };
        fs::write(self.folder.join(format!("gid_attrs/types/{}", entry.index)), kind).unwrap();
    }

    /// Returns the entry that is currently at an index.
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

    /// Returns the network interface that an entry comes from.
    pub(crate) fn interface(&self, index: u8) -> Result<String, String> {
        let path = self.folder.join(format!("gid_attrs/ndevs/{index}"));
        let name = fs::read_to_string(&path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        Ok(name.trim().to_owned())
    }

    /// Returns the current entries of the table.
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

    /// Returns the entry with a guest's address, if the host has it.
    pub(crate) fn find(&self, gid: Gid, kind: GidType) -> Option<HostGid> {
        self.list().into_iter().find(|entry| entry.gid == gid && entry.kind == kind)
    }

    /// Like [`Self::find`], but waits for an address that was just added.
    pub(crate) fn await_new(&self, gid: Gid, kind: GidType) -> Option<HostGid> {
        soon(|| self.find(gid, kind))
    }

    /// Waits until addresses that were just removed are gone.
    pub(crate) fn await_gone(&self, gids: &[Gid]) {
        if soon(|| (!self.list().iter().any(|entry| gids.contains(&entry.gid))).then_some(())).is_none() {
            // Log: once, at the start.
            log::warn!("port {} keeps GIDs whose addresses were removed", self.port);
        }
    }

    /// Returns the entry used for guests without an own entry.
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

/// Polls the table for a result: the kernel updates it a moment after the addresses.
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

/// Parses a GID in the format of `/sys`: eight groups of four digits.
fn parse(text: &str) -> Option<Gid> {
    text.trim().parse::<Ipv6Addr>().ok().map(|address| Gid(address.octets()))
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
        // Too far behind the other entries.
        assert_eq!(gids.find(entry(90, 3).gid, GidType::RoceV2), None);
        assert_eq!(gids.choose(GidIndex::Auto), Ok(entry(1, 1)));
        assert_eq!(gids.choose(GidIndex::Fixed(30)), Ok(entry(30, 2)));
    }

    /// Prefers RoCE v2 to v1, then routable addresses, then IPv4, then the lowest index.
    #[test]
    fn the_substitute_address_is_the_one_that_most_peers_reach() {
        let folder = tempfile::tempdir().unwrap();
        let gids = HostGids::in_folder(folder.path());
        let gid = |text: &str| Gid(text.parse::<Ipv6Addr>().unwrap().octets());
        let choice = || gids.choose(GidIndex::Auto).map(|entry| entry.index);
        let entries = [
            (9, "fe80::1", GidType::RoceV1),
            (8, "::ffff:10.0.0.1", GidType::RoceV1),
            (7, "fe80::1", GidType::RoceV2),
            (6, "fd00::1", GidType::RoceV2),
            (5, "::ffff:10.0.0.1", GidType::RoceV2),
            (4, "::ffff:10.0.0.2", GidType::RoceV2),
        ];
        for (index, address, kind) in entries {
            gids.set(&HostGid { index, gid: gid(address), kind });
            assert_eq!(choice(), Ok(index), "{address}");
        }
        gids.set(&HostGid { index: 10, gid: gid("::ffff:10.0.0.3"), kind: GidType::RoceV2 });
        assert_eq!(choice(), Ok(4));
        assert!(gids.choose(GidIndex::Fixed(3)).is_err() && gids.choose(GidIndex::Fixed(300)).is_err());
    }

    #[test]
    fn entries_that_the_kernel_does_not_show_are_empty() {
        let folder = tempfile::tempdir().unwrap();
        let gids = HostGids::in_folder(folder.path());
        let entry = HostGid { index: 0, gid: Gid([1; 16]), kind: GidType::RoceV2 };
        gids.set(&entry);
        assert_eq!(gids.entry(0), Some(entry));
        gids.set(&HostGid { gid: Gid::default(), ..entry });
        assert_eq!((gids.entry(0), gids.entry(1)), (None, None));
        gids.set(&entry);
        for kind in ["", "RoCE v3", "Ethernet"] {
            fs::write(folder.path().join("gid_attrs/types/0"), kind).unwrap();
            assert_eq!(gids.entry(0), None, "{kind}");
        }
        fs::remove_file(folder.path().join("gid_attrs/types/0")).unwrap();
        assert_eq!(gids.entry(0), None);
    }
}
