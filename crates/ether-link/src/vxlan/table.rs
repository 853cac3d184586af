//! Table of the addresses seen behind each remote.

use std::collections::HashMap;
use std::time::Duration;

use super::inner::Station;

/// Maximum number of remotes of a link, both configured and learned. It bounds the memory of the table, and the number
/// of datagrams into which a flooded frame is copied.
pub const MAX_REMOTES: usize = 640;
/// Maximum number of known addresses behind one remote. Frames to further addresses are flooded, so that a remote with
/// many addresses does not take the room of others.
pub const MAX_STATIONS: usize = 256;
/// Time after which a silent address is forgotten, as in Linux.
pub const AGE: Duration = Duration::from_secs(300);
/// Interval at which the time of an active address is updated.
const REFRESH: Duration = Duration::from_secs(1);

/// Result of learning an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Learned {
    /// The address was known behind this remote.
    Known,
    /// The address is new.
    New,
    /// The address was behind another remote.
    Moved,
    /// The remote already has its share of addresses.
    Refused,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    remote: usize,
    seen: Duration,
}

/// Addresses, each with the index of the remote behind which it was last seen.
#[derive(Debug)]
pub(super) struct Table {
    stations: HashMap<Station, Entry>,
    /// Number of addresses behind each remote.
    counts: [usize; MAX_REMOTES],
    /// The last learned MAC address and the last learned GID. Frames arrive in trains, so this saves most lookups.
    recent: [Option<(Station, Entry)>; 2],
    swept: Duration,
}

impl Default for Table {
    fn default() -> Self {
        Self { stations: HashMap::new(), counts: [0; MAX_REMOTES], recent: [None; 2], swept: Duration::ZERO }
    }
}

impl Table {
    /// Returns the number of addresses in the table, some of which may have expired.
    pub(super) fn len(&self) -> usize {
        self.stations.len()
    }

    /// Learns that `station` is behind `remote`.
    pub(super) fn learn(&mut self, station: Station, remote: usize, now: Duration) -> Learned {
        let kind = usize::from(matches!(station, Station::Gid(_)));
        if let Some(Some((known, entry))) = self.recent.get(kind)
            && (*known, entry.remote) == (station, remote)
            && now.saturating_sub(entry.seen) < REFRESH
        {
            return Learned::Known;
        }
        let entry = Entry { remote, seen: now };
        let learned = self.note(station, entry);
        if learned != Learned::Refused
            && let Some(recent) = self.recent.get_mut(kind)
        {
            *recent = Some((station, entry));
        }
        learned
    }

    fn note(&mut self, station: Station, entry: Entry) -> Learned {
        let before = self.stations.get(&station).copied();
        if before.is_some_and(|before| before.remote == entry.remote) {
            self.stations.insert(station, entry);
            return Learned::Known;
        }
        if self.count(entry.remote) >= MAX_STATIONS {
            self.sweep(entry.seen);
            if self.count(entry.remote) >= MAX_STATIONS {
                return Learned::Refused;
            }
        }
        // The sweep may have removed the address, so the entry looked up before it must not be used.
        let before = self.stations.insert(station, entry);
        if let Some(count) = self.counts.get_mut(entry.remote) {
            *count += 1;
        }
        let Some(before) = before else { return Learned::New };
        self.uncount(before.remote);
        Learned::Moved
    }

    /// Returns the remote that `station` is behind, if it was seen recently.
    pub(super) fn find(&self, station: &Station, now: Duration) -> Option<usize> {
        let entry = self.stations.get(station)?;
        (now.saturating_sub(entry.seen) < AGE).then_some(entry.remote)
    }

    /// Forgets all addresses behind a remote.
    pub(super) fn forget(&mut self, remote: usize) {
        self.recent = [None; 2];
        self.stations.retain(|_, entry| entry.remote != remote);
        if let Some(count) = self.counts.get_mut(remote) {
            *count = 0;
        }
    }

    /// Forgets silent addresses. A sweep visits the whole table, so its rate is limited.
    fn sweep(&mut self, now: Duration) {
        if now.saturating_sub(self.swept) < REFRESH {
            return;
        }
        self.swept = now;
        self.recent = [None; 2];
        let counts = &mut self.counts;
        self.stations.retain(|_, entry| {
            let stays = now.saturating_sub(entry.seen) < AGE;
            if let (false, Some(count)) = (stays, counts.get_mut(entry.remote)) {
                *count = count.saturating_sub(1);
            }
            stays
        });
    }

    /// Returns the number of addresses behind a remote. An invalid index has no room.
    fn count(&self, remote: usize) -> usize {
        self.counts.get(remote).copied().unwrap_or(usize::MAX)
    }

    fn uncount(&mut self, remote: usize) {
        if let Some(count) = self.counts.get_mut(remote) {
            *count = count.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;
    use pvrdma_packet::MacAddr;

    use super::*;

    fn mac(number: u32) -> Station {
        let [a, b, c, d] = number.to_be_bytes();
        Station::Mac(MacAddr([2, 0, a, b, c, d]))
    }

    const START: Duration = Duration::from_secs(1000);

    #[test]
    fn stations_move_age_and_are_forgotten() {
        let mut table = Table::default();
        assert_eq!(table.find(&mac(1), START), None);
        assert_eq!(table.learn(mac(1), 0, START), Learned::New);
        assert_eq!(table.learn(mac(1), 0, START), Learned::Known);
        assert_eq!(table.learn(mac(1), 3, START), Learned::Moved);
        assert_eq!(table.learn(Station::Gid([9; 16]), 3, START), Learned::New);
        assert_eq!(table.find(&mac(1), START + AGE - REFRESH), Some(3));
        assert_eq!(table.find(&mac(1), START + AGE), None);
        // An active address stays known, although not every frame updates its time.
        for second in 0..=AGE.as_secs() {
            table.learn(mac(1), 3, START + Duration::from_secs(second));
        }
        assert_eq!(table.find(&mac(1), START + AGE), Some(3));
        table.forget(3);
        assert_eq!((table.find(&mac(1), START), table.len(), table.counts[3]), (None, 0, 0));
        assert_eq!(table.learn(mac(1), 3, START + AGE), Learned::New, "the cache of recent updates is cleared, too");
        assert_eq!(table.learn(mac(1), MAX_REMOTES, START), Learned::Refused);
    }

    #[test]
    fn a_remote_has_its_share_and_no_more() {
        let mut table = Table::default();
        let share = u32::try_from(MAX_STATIONS).unwrap();
        table.learn(mac(u32::MAX), 1, START);
        let refused = (0..10 * share).filter(|&number| table.learn(mac(number), 0, START) == Learned::Refused).count();
        assert_eq!((refused, table.len()), (9 * MAX_STATIONS, MAX_STATIONS + 1));
        assert_eq!(table.find(&mac(u32::MAX), START), Some(1));
        // A remote cannot take over addresses of another remote either.
        assert_eq!(table.learn(mac(u32::MAX), 0, START), Learned::Refused);
        assert_eq!(table.find(&mac(u32::MAX), START), Some(1));
        // After the addresses have aged, there is room again.
        assert_eq!(table.learn(mac(share), 0, START + AGE), Learned::New);
        assert_eq!(table.len(), 1);
    }

    proptest! {
        /// Compared with a map that keeps all entries, as long as no remote exceeds its share.
        #[test]
        fn it_is_a_map_with_ageing(
            steps in prop::collection::vec((0..20_u32, 0..MAX_REMOTES, 0..200_u64), 1..200),
        ) {
            let (mut table, mut model) = (Table::default(), HashMap::new());
            let mut now = START;
            for (number, remote, seconds) in steps {
                now += Duration::from_secs(seconds);
                prop_assert_ne!(table.learn(mac(number), remote, now), Learned::Refused);
                model.insert(number, (remote, now));
                for number in 0..20 {
                    let expected = model.get(&number).filter(|(_, seen)| now - *seen < AGE).map(|&(remote, _)| remote);
                    prop_assert_eq!(table.find(&mac(number), now), expected);
                }
                prop_assert_eq!(table.counts.iter().sum::<usize>(), table.len());
            }
        }
    }
}
