//! Fault injection: a link that loses, duplicates, reorders, corrupts and delays frames, the same ones for the same
//! seed.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_verbs::{Counter, MacAddr};
use serde::{Deserialize, Serialize};

use super::{Frames, Link, LinkInspect, Readiness};

/// When a link that holds frames wants to be called again.
const SOON: Duration = Duration::from_millis(1);
/// When a link that may hold frames the next moment does. More than [`SOON`], which says that there are some.
const LATER: Duration = Duration::from_millis(2);
/// Frames that are delayed at a time, in one direction.
const MAX_HELD: usize = 4096;

/// How often each fault happens to a frame, in hundredths of a percent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Faults {
    /// The frame is lost.
    pub loss: u16,
    /// The frame comes twice.
    pub duplicate: u16,
    /// The frame changes places with the one before it.
    pub reorder: u16,
    /// One bit of the frame is inverted.
    pub corrupt: u16,
    /// The frame comes up to [`Faults::MAX_DELAY`] calls of [`Link::receive`] later.
    pub delay: u16,
}

impl Faults {
    /// Longest delay, in calls.
    pub const MAX_DELAY: u64 = 16;

    /// All of one in a hundred frames each.
    pub const ONE_PERCENT: Self = Self { loss: 100, duplicate: 100, reorder: 100, corrupt: 100, delay: 100 };

    /// Returns `true` if the frames that are not lost stay as they are and where they are.
    const fn only_lose(&self) -> bool {
        self.duplicate == 0 && self.reorder == 0 && self.corrupt == 0 && self.delay == 0
    }
}

/// What happens to the frames of one direction.
#[derive(Debug)]
struct State {
    random: u64,
    /// Calls of [`Link::receive`], which are the clock of delays.
    calls: u64,
    /// Frames with the call that they wait for.
    held: VecDeque<(u64, Vec<u8>)>,
}

impl State {
    fn new(seed: u64) -> Self {
        // Zero is the one state that the generator never leaves.
        Self { random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, calls: 0, held: VecDeque::new() }
    }

    fn next(&mut self) -> u64 {
        // xorshift64*: good enough to spread faults, and the same everywhere.
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    fn happens(&mut self, rate: u16) -> bool {
        self.next() % 10_000 < u64::from(rate)
    }

    /// Decides about a frame. Returns `false` if it is lost.
    fn take(&mut self, faults: &Faults, frame: &[u8]) -> bool {
        if self.happens(faults.loss) {
            return false;
        }
        let mut frame = frame.to_vec();
        if self.happens(faults.corrupt) && !frame.is_empty() {
            let bit = self.next();
            let at = usize::try_from(bit / 8).unwrap_or(0) % frame.len();
            if let Some(byte) = frame.get_mut(at) {
                *byte ^= 1 << (bit % 8);
            }
        }
        let mut due = self.calls;
        if self.happens(faults.delay) {
            let late = 1 + self.next() % Faults::MAX_DELAY;
            if self.held.len() < MAX_HELD {
                due = due.saturating_add(late);
            }
        }
        if self.happens(faults.duplicate) {
            self.held.push_back((due, frame.clone()));
        }
        self.held.push_back((due, frame));
        if self.happens(faults.reorder) && self.held.len() > 1 {
            let last = self.held.len() - 1;
            self.held.swap(last - 1, last);
        }
        true
    }

    /// Appends the frames whose time has come.
    fn release(&mut self, frames: &mut Frames) {
        let now = self.calls;
        self.held.retain(|(due, frame)| {
            if *due <= now {
                frames.push(frame);
            }
            *due > now
        });
    }
}

/// The direction away from us.
#[derive(Debug)]
struct Outbound {
    state: State,
    /// What became of the frames that were taken last, and how many of these have left.
    pending: Frames,
    left: usize,
}

impl Outbound {
    /// Sends what is pending. Returns `true` if all has left.
    fn flush(&mut self, link: &impl Link) -> bool {
        if self.left < self.pending.len() || link.unsent() {
            self.left = self.left.saturating_add(link.send(&self.pending, self.left));
        }
        if self.left < self.pending.len() {
            return false;
        }
        self.pending.clear();
        self.left = 0;
        !link.unsent()
    }
}

/// A link with faults in the direction towards us ([`FaultLink::new`]; wrap both ends for both directions) or in both
/// ([`FaultLink::both_ways`], for a link whose other end is not ours).
pub struct FaultLink<L> {
    inner: L,
    faults: Faults,
    inbound: Mutex<(State, Frames)>,
    outbound: Option<Mutex<Outbound>>,
    lost: AtomicU64,
}

impl<L: fmt::Debug> fmt::Debug for FaultLink<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultLink").field("inner", &self.inner).field("faults", &self.faults).finish_non_exhaustive()
    }
}

impl<L: Link> FaultLink<L> {
    /// Wraps a link whose frames towards us suffer.
    pub fn new(inner: L, faults: Faults, seed: u64) -> Self {
        let inbound = Mutex::new((State::new(seed), Frames::default()));
        Self { inner, faults, inbound, outbound: None, lost: AtomicU64::new(0) }
    }

    /// Wraps a link whose frames suffer in both directions, independently.
    pub fn both_ways(inner: L, faults: Faults, seed: u64) -> Self {
        let state = State::new(!seed);
        let outbound = Outbound { state, pending: Frames::default(), left: 0 };
        Self { outbound: Some(Mutex::new(outbound)), ..Self::new(inner, faults, seed) }
    }

    fn suffer(&self, state: &mut State, frame: &[u8]) {
        if !state.take(&self.faults, frame) {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Sends frames whose delay is over.
    fn release_outbound(&self) {
        let Some(outbound) = &self.outbound else { return };
        let outbound = &mut *outbound.lock();
        outbound.state.calls = outbound.state.calls.wrapping_add(1);
        // In order: what is pending was to leave before.
        if outbound.flush(&self.inner) {
            outbound.state.release(&mut outbound.pending);
            outbound.flush(&self.inner);
        }
    }
}

impl<L: Link> Link for FaultLink<L> {
    fn receive(&self, frames: &mut Frames, most: usize) {
        self.release_outbound();
        let (state, incoming) = &mut *self.inbound.lock();
        state.calls = state.calls.wrapping_add(1);
        if self.faults.only_lose() {
            let before = frames.len();
            self.inner.receive(frames, most);
            let lost = frames.retain_from(before, |_| !state.happens(self.faults.loss));
            self.lost.fetch_add(lost as u64, Ordering::Relaxed);
            return;
        }
        incoming.clear();
        self.inner.receive(incoming, most);
        for frame in incoming.iter() {
            self.suffer(state, frame);
        }
        state.release(frames);
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        let Some(outbound) = &self.outbound else { return self.inner.send(frames, from) };
        let outbound = &mut *outbound.lock();
        // What did not leave last time comes first.
        if !outbound.flush(&self.inner) {
            return 0;
        }
        for frame in frames.iter_from(from) {
            self.suffer(&mut outbound.state, frame);
        }
        outbound.state.release(&mut outbound.pending);
        outbound.flush(&self.inner);
        frames.len().saturating_sub(from)
    }

    fn unsent(&self) -> bool {
        let pending = |outbound: &Mutex<Outbound>| outbound.try_lock().is_none_or(|held| !held.pending.is_empty());
        self.outbound.as_ref().is_some_and(pending) || self.inner.unsent()
    }

    fn set_addresses(&self, addresses: &[MacAddr]) -> io::Result<()> {
        self.inner.set_addresses(addresses)
    }

    fn readiness(&self) -> Readiness {
        let mut readiness = self.inner.readiness();
        let wait = match &self.outbound {
            _ if !self.inbound.lock().0.held.is_empty() => Some(SOON),
            Some(outbound) => {
                let outbound = outbound.lock();
                let waiting = !outbound.state.held.is_empty() || !outbound.pending.is_empty();
                // Whoever sends does not wake who would look after what is delayed.
                if waiting { Some(SOON) } else { (self.faults.delay > 0).then_some(LATER) }
            }
            None => None,
        };
        readiness.wait = readiness.wait.into_iter().chain(wait).min();
        readiness
    }

    fn inspect(&self) -> LinkInspect {
        self.inner.inspect()
    }

    fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed).saturating_add(self.inner.lost())
    }

    fn counters(&self) -> Vec<Counter> {
        self.inner.counters()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory;

    /// What comes of a thousand numbered frames.
    fn run(faults: Faults, seed: u64) -> (Vec<Vec<u8>>, u64) {
        let (a, b) = memory::pair(2000).unwrap();
        let b = FaultLink::new(b, faults, seed);
        let mut frames = Frames::default();
        for number in 0..1000_u32 {
            frames.push(&number.to_be_bytes());
        }
        assert_eq!(a.send(&frames, 0), 1000);
        let mut got = Frames::default();
        b.receive(&mut got, 500);
        while b.readiness().wait.is_some() || got.len() < 400 {
            b.receive(&mut got, 500);
        }
        b.receive(&mut got, 500);
        while b.readiness().wait.is_some() {
            b.receive(&mut got, 500);
        }
        (got.iter().map(<[u8]>::to_vec).collect(), b.lost())
    }

    #[test]
    fn each_fault_does_what_it_says_and_a_seed_repeats_it() {
        let all: Vec<Vec<u8>> = (0..1000_u32).map(|number| number.to_be_bytes().to_vec()).collect();
        let sorted = |mut frames: Vec<Vec<u8>>| {
            frames.sort();
            frames
        };
        let rate = 1000;
        assert_eq!(run(Faults::default(), 1), (all.clone(), 0));
        let (got, lost) = run(Faults { loss: rate, ..Faults::default() }, 2);
        assert!((50..200).contains(&lost), "{lost}");
        assert_eq!(got.len() as u64 + lost, 1000);
        let (got, _) = run(Faults { duplicate: rate, ..Faults::default() }, 3);
        assert!((1050..1200).contains(&got.len()), "{}", got.len());
        for faults in [Faults { reorder: rate, ..Faults::default() }, Faults { delay: rate, ..Faults::default() }] {
            let (got, _) = run(faults, 4);
            assert_ne!(got, all);
            assert_eq!(sorted(got), all);
        }
        let (got, _) = run(Faults { corrupt: rate, ..Faults::default() }, 5);
        let wrong = got.iter().zip(&all).filter(|(got, sent)| got != sent).count();
        assert!((50..200).contains(&wrong), "{wrong}");
        assert_eq!(run(Faults::ONE_PERCENT, 6), run(Faults::ONE_PERCENT, 6));
        assert_ne!(run(Faults::ONE_PERCENT, 6), run(Faults::ONE_PERCENT, 7));
    }

    /// The same with faults on the way out, through a link that takes few frames at a time.
    fn run_outbound(faults: Faults, seed: u64, capacity: usize) -> (Vec<Vec<u8>>, u64) {
        let (a, b) = memory::pair(capacity).unwrap();
        let a = FaultLink::both_ways(a, faults, seed);
        let (mut frames, mut ignored, mut got) = (Frames::default(), Frames::default(), Frames::default());
        let mut number = 0_u32;
        while number < 1000 {
            frames.clear();
            let batch = 1 + number % 40;
            for number in number..number + batch {
                frames.push(&number.to_be_bytes());
            }
            number += batch;
            let mut from = 0;
            while from < frames.len() {
                from += a.send(&frames, from);
                b.receive(&mut got, 7);
                a.receive(&mut ignored, 10);
            }
        }
        while a.readiness().wait == Some(SOON) {
            a.receive(&mut ignored, 10);
            b.receive(&mut got, 500);
        }
        b.receive(&mut got, 5000);
        assert!(ignored.is_empty());
        (got.iter().map(<[u8]>::to_vec).collect(), a.lost())
    }

    #[test]
    fn both_ways_means_what_we_send_as_well() {
        let count = run_outbound(Faults::default(), 1, 9).0.len();
        let all: Vec<Vec<u8>> =
            (0..u32::try_from(count).unwrap()).map(|number| number.to_be_bytes().to_vec()).collect();
        assert_eq!(run_outbound(Faults::default(), 1, 9), (all.clone(), 0));
        for capacity in [5, 2000] {
            let (got, lost) = run_outbound(Faults { loss: 1000, ..Faults::default() }, 2, capacity);
            assert!((50..200).contains(&lost) && got.is_sorted());
            assert_eq!(got.len() as u64 + lost, count as u64);
            let (got, _) = run_outbound(Faults { duplicate: 1000, ..Faults::default() }, 3, capacity);
            assert!((count + 50..count + 200).contains(&got.len()), "{}", got.len());
            for faults in [Faults { reorder: 1000, ..Faults::default() }, Faults { delay: 1000, ..Faults::default() }] {
                let (mut got, _) = run_outbound(faults, 4, capacity);
                assert_ne!(got, all);
                got.sort();
                assert_eq!(got, all);
            }
            let (got, _) = run_outbound(Faults { corrupt: 1000, ..Faults::default() }, 5, capacity);
            let wrong = got.iter().zip(&all).filter(|(got, sent)| got != sent).count();
            assert!((50..200).contains(&wrong), "{wrong}");
            let worst = Faults { loss: 500, duplicate: 300, reorder: 500, corrupt: 200, delay: 300 };
            assert_eq!(run_outbound(worst, 6, capacity), run_outbound(worst, 6, capacity));
        }
    }
}
