//! Which station is behind which remote.

use std::collections::HashMap;
use std::time::Duration;

use super::inner::Station;

/// Remotes that a link knows at most, configured and learned ones together.
pub const MAX_REMOTES: usize = 64;
/// Stations that are known behind one remote at most. A remote that shows more than these gets its surplus flooded to
/// it, and takes nothing from the others.
pub const MAX_STATIONS: usize = 256;
/// How long a station that says nothing is known. Linux has the same.
pub const AGE: Duration = Duration::from_secs(300);
/// Stations that speak all the time are noted this often.
const REFRESH: Duration = Duration::from_secs(1);

/// What came of learning.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Learned {
    /// It was known there.
    Known,
    /// It is new.
    New,
    /// It was behind another remote.
    Moved,
    /// The remote has its share of stations already.
    Refused,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    remote: usize,
    seen: Duration,
}

/// Stations, with the index of the remote that each was last seen behind.
#[derive(Debug)]
pub(super) struct Table {
    stations: HashMap<Station, Entry>,
    /// Stations behind each remote.
    counts: [usize; MAX_REMOTES],
    /// The last Ethernet address and the last GID that were noted: frames come in trains.
    recent: [Option<(Station, Entry)>; 2],
    swept: Duration,
}

impl Default for Table {
    fn default() -> Self {
        Self { stations: HashMap::new(), counts: [0; MAX_REMOTES], recent: [None; 2], swept: Duration::ZERO }
    }
}

impl Table {
    /// Stations that are known, or were until lately.
    pub(super) fn len(&self) -> usize {
        self.stations.len()
    }

    /// Notes that `station` spoke from behind `remote`.
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
        // Sweeping may have taken it.
        let before = self.stations.insert(station, entry);
        if let Some(count) = self.counts.get_mut(entry.remote) {
            *count += 1;
        }
        let Some(before) = before else { return Learned::New };
        self.uncount(before.remote);
        Learned::Moved
    }

    /// The remote that `station` is behind, if it spoke lately.
    pub(super) fn find(&self, station: &Station, now: Duration) -> Option<usize> {
        let entry = self.stations.get(station)?;
        (now.saturating_sub(entry.seen) < AGE).then_some(entry.remote)
    }

    /// Forgets everything behind a remote.
    pub(super) fn forget(&mut self, remote: usize) {
        self.recent = [None; 2];
        self.stations.retain(|_, entry| entry.remote != remote);
        if let Some(count) = self.counts.get_mut(remote) {
            *count = 0;
        }
    }

    /// Forgets who is silent. Looking through all takes a while, so not too often.
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

    /// A remote that there cannot be has no room.
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
        // Who speaks stays known, although not every word is noted.
        for second in 0..=AGE.as_secs() {
            table.learn(mac(1), 3, START + Duration::from_secs(second));
        }
        assert_eq!(table.find(&mac(1), START + AGE), Some(3));
        table.forget(3);
        assert_eq!((table.find(&mac(1), START), table.len(), table.counts[3]), (None, 0, 0));
        assert_eq!(table.learn(mac(1), 3, START + AGE), Learned::New, "what was noted lately is forgotten, too");
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
        // Nor can it take over the stations of another one.
        assert_eq!(table.learn(mac(u32::MAX), 0, START), Learned::Refused);
        assert_eq!(table.find(&mac(u32::MAX), START), Some(1));
        // With time there is room again.
        assert_eq!(table.learn(mac(share), 0, START + AGE), Learned::New);
        assert_eq!(table.len(), 1);
    }

    proptest! {
        /// Compared with a map that keeps everything, as long as no remote exceeds its share.
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
