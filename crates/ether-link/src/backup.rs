//! A link over two others, of which one is active and the other one is the backup.
//!
//! This is the mode `active-backup` of Linux's bonding driver: frames pass the active link only, so that switches see
//! the addresses of the devices at one port and no frame arrives twice. The owner of the link selects the active one,
//! because carrier and MTU of an interface are known there ([`InterfaceWatch`](crate::InterfaceWatch)).

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use pvrdma_base::{Counter, counters};
use pvrdma_link::{Frames, Link, LinkInspect, Offload, Readiness};
use pvrdma_packet::MacAddr;

/// Number of frames that are dropped at once from the queue of a backup.
const DROPPED: usize = 64;
/// Maximum number of such batches. It bounds the time that a peer which sends without end can take.
const MAX_BATCHES: usize = 1024;

counters! {
    /// Counters of a link with a backup, in addition to those that every link has.
    struct BackupCounters {
        /// Changes of the active interface of an uplink, which is the first one when the process of the network starts.
        uplink_failovers,
        /// Frames that a backup interface had received when it became the active one.
        uplink_dropped_backup,
    }
}

/// Returns all counters of a link with a backup, at zero.
pub(crate) fn all_counters() -> Vec<Counter> {
    BackupCounters::default().list()
}

/// One of the two links of a [`BackupLink`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Member {
    /// The first link, which is active at the start.
    #[default]
    First,
    /// The second link.
    Second,
}

impl Member {
    /// Returns the other link.
    #[must_use]
    pub const fn other(self) -> Self {
        match self {
            Self::First => Self::Second,
            Self::Second => Self::First,
        }
    }

    /// Returns the value of this member from a pair.
    pub fn of<T>(self, [first, second]: &[T; 2]) -> &T {
        match self {
            Self::First => first,
            Self::Second => second,
        }
    }
}

/// A link that uses one of two links, and the other one after a call of [`select`](Self::select).
#[derive(Debug)]
pub struct BackupLink {
    links: [Arc<dyn Link>; 2],
    /// The second link is the active one.
    second: AtomicBool,
    /// Serializes changes of the active link.
    selecting: Mutex<()>,
    counters: BackupCounters,
}

impl BackupLink {
    /// Combines two links. The first one is active.
    pub fn new(links: [Arc<dyn Link>; 2]) -> Self {
        let (second, selecting) = (AtomicBool::new(false), Mutex::new(()));
        Self { links, second, selecting, counters: BackupCounters::default() }
    }

    /// Returns the active member.
    pub fn selected(&self) -> Member {
        if self.second.load(Ordering::Acquire) { Member::Second } else { Member::First }
    }

    /// Makes a link the active one, and drops the frames that it received as the backup. Returns `true` if it was not
    /// active before; the [readiness](Link::readiness) has changed then, and waiters must query it again.
    pub fn select(&self, member: Member) -> bool {
        let _turn = self.selecting.lock();
        if self.selected() == member {
            return false;
        }
        self.drop_received(&**member.of(&self.links));
        self.second.store(member == Member::Second, Ordering::Release);
        self.counters.uplink_failovers.add(1);
        true
    }

    fn drop_received(&self, link: &dyn Link) {
        let mut frames = Frames::default();
        for _ in 0..MAX_BATCHES {
            frames.clear();
            link.receive(&mut frames, DROPPED);
            if frames.is_empty() {
                break;
            }
            self.counters.uplink_dropped_backup.add(frames.len() as u64);
        }
    }

    fn active(&self) -> &dyn Link {
        &**self.selected().of(&self.links)
    }
}

impl Link for BackupLink {
    fn receive(&self, frames: &mut Frames, most: usize) {
        self.active().receive(frames, most);
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        self.active().send(frames, from)
    }

    fn takes(&self, frame: &[u8], offload: Offload) -> bool {
        // A frame that waits for room may leave by the other link.
        self.links.iter().all(|link| link.takes(frame, offload))
    }

    fn unsent(&self) -> bool {
        self.active().unsent()
    }

    fn readiness(&self) -> Readiness {
        self.active().readiness()
    }

    fn set_addresses(&self, addresses: &[MacAddr]) -> io::Result<()> {
        self.links.iter().try_for_each(|link| link.set_addresses(addresses))
    }

    fn leaves_process(&self) -> bool {
        self.links.iter().any(|link| link.leaves_process())
    }

    fn lost(&self) -> u64 {
        self.links.iter().fold(0, |sum, link| sum.saturating_add(link.lost()))
    }

    fn inspect(&self) -> LinkInspect {
        self.active().inspect()
    }

    fn counters(&self) -> Vec<Counter> {
        self.counters.list()
    }
}

#[cfg(test)]
mod tests {
    use pvrdma_link::memory::{self, MemoryLink};

    use super::*;

    fn bench() -> (BackupLink, [MemoryLink; 2]) {
        let [(a, far_a), (b, far_b)] = [(); 2].map(|()| memory::pair(100).unwrap());
        (BackupLink::new([Arc::new(a), Arc::new(b)]), [far_a, far_b])
    }

    fn batch(texts: &[&[u8]]) -> Frames {
        let mut frames = Frames::default();
        texts.iter().for_each(|text| frames.push(text));
        frames
    }

    fn arrived(link: &dyn Link) -> Vec<Vec<u8>> {
        let mut frames = Frames::default();
        link.receive(&mut frames, 1000);
        frames.iter().map(<[u8]>::to_vec).collect()
    }

    fn count(link: &BackupLink, name: &str) -> u64 {
        link.counters().iter().find(|counter| counter.name == name).unwrap().value
    }

    #[test]
    fn frames_pass_the_active_link_only() {
        let (link, [first, second]) = bench();
        for (member, near, other) in [(Member::First, &first, &second), (Member::Second, &second, &first)] {
            link.select(member);
            assert_eq!(link.send(&batch(&[b"out"]), 0), 1);
            assert_eq!((arrived(near), arrived(other)), (vec![b"out".to_vec()], vec![]));
            near.send(&batch(&[b"in"]), 0);
            other.send(&batch(&[b"twice"]), 0);
            assert_eq!(arrived(&link), [b"in"]);
            assert!(arrived(&link).is_empty(), "the backup is not read");
        }
    }

    #[test]
    fn frames_of_the_backup_are_dropped_when_it_becomes_active() {
        let (link, [_first, second]) = bench();
        let old = link.readiness().readable.unwrap();
        second.send(&batch(&[&b"1"[..]; 99]), 0);
        assert!(link.select(Member::Second));
        assert!(!Arc::ptr_eq(&old, &link.readiness().readable.unwrap()));
        second.send(&batch(&[b"new"]), 0);
        assert_eq!(arrived(&link), [b"new"]);
        assert_eq!(count(&link, "uplink_dropped_backup"), 99);
    }

    #[test]
    fn changes_are_counted() {
        let (link, _far) = bench();
        assert!(!link.select(Member::First));
        assert!(link.select(Member::Second) && !link.select(Member::Second) && link.select(Member::First));
        assert_eq!((link.selected(), count(&link, "uplink_failovers")), (Member::First, 2));
        assert_eq!(link.lost(), 0);
    }
}
