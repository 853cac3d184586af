//! A cable with a tap at each end.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicU32, AtomicUsize};

use parking_lot::Mutex;
use pvrdma_link::{Frames, Link, LinkInspect, ManualClock, Readiness, memory};
use pvrdma_rxe::{PortRules, Rxe, RxeConfig, VlanMode};

use crate::world::*;

/// A link that records the frames that are sent into it.
#[derive(Debug)]
pub(crate) struct Tap {
    inner: memory::MemoryLink,
    pub(crate) sent: Mutex<Frames>,
    /// Number of further RoCE v2 frames over IPv6 that get a congestion mark.
    pub(crate) congested: AtomicU32,
    /// Bytes sent since the port last read received frames, and the maximum of that.
    since_read: AtomicUsize,
    pub(crate) most_between_reads: AtomicUsize,
}

impl Tap {
    /// Resets the number of bytes sent between two reads.
    pub(crate) fn forget(&self) {
        self.since_read.store(0, SeqCst);
        self.most_between_reads.store(0, SeqCst);
    }

    /// Sends frames that do not come from the device.
    pub(crate) fn inject(&self, frames: &Frames) -> usize {
        self.inner.send(frames, 0)
    }
}

impl Link for Tap {
    fn receive(&self, frames: &mut Frames, most: usize) {
        self.since_read.store(0, SeqCst);
        self.inner.receive(frames, most);
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        let mut sent = self.sent.lock();
        let first = sent.len();
        for frame in frames.iter_from(from) {
            let mut frame = frame.to_vec();
            let at = if frame[12..14] == [0x81, 0] { 16 } else { 12 };
            if frame[at..at + 2] == [0x86, 0xdd] && self.congested.load(SeqCst) > 0 {
                self.congested.fetch_sub(1, SeqCst);
                // Neither a checksum nor the ICRC covers these bits.
                frame[at + 3] |= 0x30;
            }
            let bytes = self.since_read.fetch_add(frame.len(), SeqCst) + frame.len();
            self.most_between_reads.fetch_max(bytes, SeqCst);
            sent.push(&frame);
        }
        let count = self.inner.send(&sent, first);
        assert_eq!(first + count, sent.len(), "the cable is long enough");
        count
    }

    fn readiness(&self) -> Readiness {
        self.inner.readiness()
    }

    fn inspect(&self) -> LinkInspect {
        self.inner.inspect()
    }

    fn lost(&self) -> u64 {
        0
    }
}

/// Creates two engines on a cable with a tap at each end, for nodes 1 and 2.
pub(crate) fn tapped(rules: [PortRules; 2]) -> (World, [Arc<Tap>; 2]) {
    tapped_in(VlanMode::Untagged, rules)
}

/// The same on a network with these VLANs.
pub(crate) fn tapped_in(vlan: VlanMode, rules: [PortRules; 2]) -> (World, [Arc<Tap>; 2]) {
    let clock = Arc::new(ManualClock::default());
    let config = RxeConfig::default().with_workers(0).with_clock(Arc::clone(&clock) as _).with_vlan(vlan);
    tapped_with(rules, &config, clock)
}

/// Same as [`tapped`], with engines of this configuration. `clock` is the clock of the world; the engines use it if
/// their configuration says so.
pub(crate) fn tapped_with(
    rules: [PortRules; 2],
    config: &RxeConfig,
    clock: Arc<ManualClock>,
) -> (World, [Arc<Tap>; 2]) {
    let [near, far] = [(); 2].map(|()| Rxe::new(config.clone()).unwrap());
    let (one, other) = memory::pair(10_000).unwrap();
    let tap = |inner| Tap {
        inner,
        sent: Mutex::default(),
        congested: AtomicU32::new(0),
        since_read: AtomicUsize::new(0),
        most_between_reads: AtomicUsize::new(0),
    };
    let taps = [one, other].map(|inner| Arc::new(tap(inner)));
    let uplinks = [&near, &far]
        .into_iter()
        .zip(&taps)
        .zip(rules)
        .zip(1..)
        .map(|(((rxe, tap), rules), number)| plug(rxe, number, Arc::clone(tap), rules));
    let stations = Mutex::new(uplinks.collect());
    (World { rxe: near, clock, far: Some(far), stations }, taps)
}
