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
    /// Up to [`Faults::MAX_PLACES`] later frames overtake the frame.
    pub reorder: u16,
    /// One bit of the frame is inverted.
    pub corrupt: u16,
    /// The frame comes up to [`Faults::MAX_DELAY`] calls of [`Link::receive`] later.
    pub delay: u16,
}

impl Faults {
    /// Longest delay, in calls.
    pub const MAX_DELAY: u64 = 16;
    /// Most frames that overtake another.
    pub const MAX_PLACES: u64 = 16;

    /// All of one in a hundred frames each.
    pub const ONE_PERCENT: Self = Self { loss: 100, duplicate: 100, reorder: 100, corrupt: 100, delay: 100 };

    /// Returns `true` if frames that are neither lost nor overtaken stay as they are and where they are.
    const fn leave_most(&self) -> bool {
        self.duplicate == 0 && self.corrupt == 0 && self.delay == 0
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
    /// Frames that are being overtaken, with how many more will do so.
    late: Vec<(u64, Vec<u8>)>,
    /// A frame was taken since the last release.
    taken: bool,
}

impl State {
    fn new(seed: u64) -> Self {
        // Zero is the one state that the generator never leaves.
        Self {
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            calls: 0,
            held: VecDeque::new(),
            late: Vec::new(),
            taken: false,
        }
    }

    /// Returns `true` if there are frames that come later.
    fn is_holding(&self) -> bool {
        !self.held.is_empty() || !self.late.is_empty()
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
        self.taken = true;
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
        if self.happens(faults.reorder) {
            let places = self.places();
            self.late.push((places, frame));
            return true;
        }
        self.held.push_back((due, frame));
        self.let_pass(1);
        true
    }

    /// How many frames overtake one that they overtake.
    fn places(&mut self) -> u64 {
        1 + self.next() % Faults::MAX_PLACES
    }

    /// So many frames have passed those that are late. Who was overtaken often enough comes now.
    fn let_pass(&mut self, count: u64) {
        let (now, held) = (self.calls, &mut self.held);
        self.late.retain_mut(|(places, frame)| {
            *places = places.saturating_sub(count);
            if *places == 0 {
                held.push_back((now, std::mem::take(frame)));
            }
            *places > 0
        });
    }

    /// Lets frames from index `from` on be overtaken, and copies only those that frames of another call overtake.
    fn reorder(&mut self, rate: u16, frames: &mut Frames, from: usize) {
        if rate == 0 {
            return;
        }
        let came = frames.len().saturating_sub(from);
        let late = std::mem::take(&mut self.late);
        for at in (from..frames.len()).rev() {
            if !self.happens(rate) {
                continue;
            }
            let places = self.places();
            let to = usize::try_from(places).map_or(usize::MAX, |places| at.saturating_add(places));
            if to < frames.len() {
                frames.put_behind(at, to);
            } else if let Some(frame) = frames.take_out(at) {
                self.late.push(((to - frames.len()) as u64 + 1, frame));
            }
        }
        // Those of earlier calls. When nothing comes nobody overtakes any more.
        for (places, frame) in late {
            let left = if came == 0 { 0 } else { places.saturating_sub(came as u64) };
            if left > 0 {
                self.late.push((left, frame));
                continue;
            }
            let to = from.saturating_add(usize::try_from(places).unwrap_or(usize::MAX)).min(frames.len());
            frames.push(&frame);
            frames.put_before(frames.len().saturating_sub(1), to);
        }
    }

    /// Appends the frames whose time has come. Nobody overtakes any more if nothing comes.
    fn release(&mut self, frames: &mut Frames) {
        if !std::mem::take(&mut self.taken) {
            self.let_pass(u64::MAX);
        }
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
        if self.faults.leave_most() {
            let before = frames.len();
            self.inner.receive(frames, most);
            let lost = frames.retain_from(before, |_| !state.happens(self.faults.loss));
            self.lost.fetch_add(lost as u64, Ordering::Relaxed);
            return state.reorder(self.faults.reorder, frames, before);
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
            _ if self.inbound.lock().0.is_holding() => Some(SOON),
            Some(outbound) => {
                let outbound = outbound.lock();
                let waiting = outbound.state.is_holding() || !outbound.pending.is_empty();
                // Whoever sends does not wake who would look after what is delayed.
                if waiting { Some(SOON) } else { (self.faults.delay > 0 || self.faults.reorder > 0).then_some(LATER) }
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

    /// A frame is overtaken by 16 others at most, within a call and across calls, and comes when no more do.
    #[test]
    fn late_frames_are_overtaken_by_few() {
        let (a, b) = memory::pair(2000).unwrap();
        let b = FaultLink::new(b, Faults { reorder: 300, ..Faults::default() }, 1);
        let (mut frames, mut got) = (Frames::default(), Frames::default());
        (0..1000_u32).for_each(|number| frames.push(&number.to_be_bytes()));
        assert_eq!(a.send(&frames, 0), 1000);
        while got.len() < 1000 {
            b.receive(&mut got, 20);
        }
        assert_eq!((got.len(), b.lost(), b.readiness().wait), (1000, 0, None));
        let numbers: Vec<_> = got.iter().map(|frame| u32::from_be_bytes(frame.try_into().unwrap())).collect();
        let mut sorted = numbers.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..1000));
        let overtaken = |at: usize| numbers[..at].iter().filter(|&&other| other > numbers[at]).count();
        let counts: Vec<_> = (0..1000).map(overtaken).filter(|&count| count > 0).collect();
        assert!((10..60).contains(&counts.len()), "{}", counts.len());
        let most = *counts.iter().max().unwrap();
        assert!((10..=18).contains(&most), "{most}: 16, and others that were late");
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
