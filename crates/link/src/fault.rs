//! Fault injection: a link that loses, duplicates, reorders, corrupts and delays frames, reproducibly for the same
//! seed.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_base::Counter;
use pvrdma_packet::MacAddr;
use serde::{Deserialize, Serialize};

use crate::{Frames, Link, LinkInspect, LinkReader, Offload, Readiness};

/// Time until the next call while a link holds frames.
const SOON: Duration = Duration::from_millis(1);
/// Time until the next call while a link holds no frames, but may at any time. It must differ from [`SOON`], by which
/// tests recognize that the link holds some.
const LATER: Duration = Duration::from_millis(2);
/// Highest number of delayed frames in one direction.
const MAX_HELD: usize = 4096;

/// Probability of each fault per frame, in hundredths of a percent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Faults {
    /// The frame is lost.
    pub loss: u16,
    /// The frame arrives twice.
    pub duplicate: u16,
    /// Up to [`Faults::MAX_PLACES`] later frames overtake the frame.
    pub reorder: u16,
    /// One bit of the frame is inverted.
    pub corrupt: u16,
    /// The frame arrives up to [`Faults::MAX_DELAY`] calls of [`Link::receive`] later.
    pub delay: u16,
}

impl Faults {
    /// Longest delay, in calls.
    pub const MAX_DELAY: u64 = 16;
    /// Highest number of frames that overtake a frame.
    pub const MAX_PLACES: u64 = 16;

    /// Each fault with a probability of one percent.
    pub const ONE_PERCENT: Self = Self { loss: 100, duplicate: 100, reorder: 100, corrupt: 100, delay: 100 };

    /// Returns `true` if frames that are neither lost nor overtaken keep their bytes and their place.
    const fn leave_most(&self) -> bool {
        self.duplicate == 0 && self.corrupt == 0 && self.delay == 0
    }
}

/// State of the faults of one direction.
#[derive(Debug)]
struct State {
    faults: Faults,
    random: u64,
    /// Number of calls of [`Link::receive`], which is the clock of delays.
    calls: u64,
    /// Delayed frames, each with the call in which it is released.
    held: VecDeque<(u64, Vec<u8>)>,
    /// Frames that are being overtaken, each with the number of frames that must still overtake it.
    late: Vec<(u64, Vec<u8>)>,
    /// A frame was added since the last release.
    taken: bool,
}

impl State {
    fn new(faults: Faults, seed: u64) -> Self {
        Self { faults, random: first_random(seed), calls: 0, held: VecDeque::new(), late: Vec::new(), taken: false }
    }

    /// Replaces the faults. Frames that are held keep their time.
    fn set(&mut self, faults: Faults, seed: u64) {
        self.faults = faults;
        self.random = first_random(seed);
    }

    /// Returns `true` if frames are held for later.
    fn is_holding(&self) -> bool {
        !self.held.is_empty() || !self.late.is_empty()
    }

    fn next(&mut self) -> u64 {
        // xorshift64*: good enough to spread faults, and deterministic on every machine.
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    fn happens(&mut self, rate: u16) -> bool {
        self.next() % 10_000 < u64::from(rate)
    }

    /// Applies the faults to a frame. Returns `false` if the frame is lost.
    fn take(&mut self, frame: &[u8]) -> bool {
        let faults = self.faults;
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

    /// Returns the number of frames that overtake a frame.
    fn places(&mut self) -> u64 {
        1 + self.next() % Faults::MAX_PLACES
    }

    /// Records that `count` frames have passed the held ones, and releases those that have been overtaken often enough.
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

    /// Reorders the frames from index `from` on. Copies only those that frames of a later call will overtake.
    fn reorder(&mut self, frames: &mut Frames, from: usize) {
        let rate = self.faults.reorder;
        if rate == 0 && self.late.is_empty() {
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
        // These frames have been held since earlier calls. If no frame arrives, they are released, because nothing can
        // overtake them.
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

    /// Appends the frames that are due. If no frame arrives, all overtaken ones are due as well.
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

/// Returns the initial state of the generator for a seed. Never zero, because the generator would stay there.
const fn first_random(seed: u64) -> u64 {
    seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

/// Outbound direction.
#[derive(Debug)]
struct Outbound {
    state: State,
    /// Frames that remain after the faults, and the number of them that have been sent.
    pending: Frames,
    left: usize,
}

impl Outbound {
    /// Sends the pending frames. Returns `true` if none is left.
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

    /// Returns `true` if something must be sent later. This includes the rest of a late frame that the inner link
    /// holds: the thread that released the late frame sent no frame of its own, so no caller knows that it has to wait
    /// for room.
    fn is_waiting(&self, link: &impl Link) -> bool {
        self.state.is_holding() || !self.pending.is_empty() || link.unsent()
    }
}

/// A link with faults in the inbound direction ([`FaultLink::new`]; wrap both ends for both directions) or in both
/// ([`FaultLink::both_ways`], for a link whose other end cannot be wrapped). Without faults it behaves like the inner
/// link.
pub struct FaultLink<L> {
    inner: L,
    /// There are no faults, and no frame is held because of earlier ones. Set to `true` under the locks of both
    /// directions, and to `false` under the inbound one.
    transparent: AtomicBool,
    inbound: Mutex<(State, Frames)>,
    outbound: Option<Mutex<Outbound>>,
    lost: AtomicU64,
}

impl<L: fmt::Debug> fmt::Debug for FaultLink<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultLink").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl<L: Link> FaultLink<L> {
    /// Wraps a link and applies faults to inbound frames.
    pub fn new(inner: L, faults: Faults, seed: u64) -> Self {
        let inbound = Mutex::new((State::new(faults, seed), Frames::default()));
        let transparent = AtomicBool::new(faults == Faults::default());
        Self { inner, transparent, inbound, outbound: None, lost: AtomicU64::new(0) }
    }

    /// Wraps a link and applies faults to frames in both directions, independently.
    pub fn both_ways(inner: L, faults: Faults, seed: u64) -> Self {
        let state = State::new(faults, !seed);
        let outbound = Outbound { state, pending: Frames::default(), left: 0 };
        Self { outbound: Some(Mutex::new(outbound)), ..Self::new(inner, faults, seed) }
    }

    /// Replaces the faults, in the same directions. Threads that wait for the link must query its readiness again.
    pub fn set_faults(&self, faults: Faults, seed: u64) {
        let mut inbound = self.inbound.lock();
        inbound.0.set(faults, seed);
        if let Some(outbound) = &self.outbound {
            outbound.lock().state.set(faults, !seed);
        }
        // Frames held because of the previous faults are released first.
        self.transparent.store(false, Ordering::Release);
        drop(inbound);
        self.settle();
    }

    fn is_transparent(&self) -> bool {
        self.transparent.load(Ordering::Acquire)
    }

    /// Makes the wrapper transparent if there is nothing left to do.
    fn settle(&self) {
        let (inbound, outbound) = (self.inbound.lock(), self.outbound.as_ref().map(Mutex::lock));
        let outbound_idle = outbound
            .as_ref()
            .is_none_or(|outbound| !outbound.is_waiting(&self.inner) && outbound.state.faults == Faults::default());
        if outbound_idle && inbound.0.faults == Faults::default() && !inbound.0.is_holding() {
            self.transparent.store(true, Ordering::Release);
        }
    }

    fn suffer(&self, state: &mut State, frame: &[u8]) {
        if !state.take(frame) {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Receives frames with faults applied.
    fn receive_suffering(&self, frames: &mut Frames, most: usize) {
        let (state, incoming) = &mut *self.inbound.lock();
        state.calls = state.calls.wrapping_add(1);
        if state.faults.leave_most() && state.held.is_empty() {
            let before = frames.len();
            self.inner.receive(frames, most);
            let lost = frames.retain_from(before, |_| !state.happens(state.faults.loss));
            self.lost.fetch_add(lost as u64, Ordering::Relaxed);
            return state.reorder(frames, before);
        }
        incoming.clear();
        self.inner.receive(incoming, most);
        for frame in incoming.iter() {
            self.suffer(state, frame);
        }
        state.release(frames);
    }

    /// Sends outbound frames whose delay is over.
    fn release_outbound(&self) {
        let Some(outbound) = &self.outbound else { return };
        let outbound = &mut *outbound.lock();
        outbound.state.calls = outbound.state.calls.wrapping_add(1);
        // This keeps the order: pending frames were due before the delayed ones.
        if outbound.flush(&self.inner) {
            outbound.state.release(&mut outbound.pending);
            outbound.flush(&self.inner);
        }
    }
}

impl<L: Link> Link for FaultLink<L> {
    fn receive(&self, frames: &mut Frames, most: usize) {
        if self.is_transparent() {
            return self.inner.receive(frames, most);
        }
        self.release_outbound();
        self.receive_suffering(frames, most);
        if self.inbound.lock().0.faults == Faults::default() {
            self.settle();
        }
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        let Some(outbound) = self.outbound.as_ref().filter(|_| !self.is_transparent()) else {
            return self.inner.send(frames, from);
        };
        let outbound = &mut *outbound.lock();
        // The flag is checked again under the lock: a wrapper that has become transparent meanwhile would never release
        // a frame that is added now.
        if self.is_transparent() {
            return self.inner.send(frames, from);
        }
        // Frames that could not be sent in the last call come first.
        if !outbound.flush(&self.inner) {
            return 0;
        }
        for (frame, offload) in frames.iter_with_offloads(from) {
            if offload.is_none() {
                self.suffer(&mut outbound.state, frame);
            } else {
                // The faults were set after the caller had asked if the link accepts this frame. The frame is lost, as
                // if by a fault.
                self.lost.fetch_add(1, Ordering::Relaxed);
            }
        }
        outbound.state.release(&mut outbound.pending);
        outbound.flush(&self.inner);
        frames.len().saturating_sub(from)
    }

    fn takes(&self, frame: &[u8], offload: Offload) -> bool {
        (self.outbound.is_none() || self.is_transparent()) && self.inner.takes(frame, offload)
    }

    fn set_reader(&self, reader: Weak<dyn LinkReader>) {
        self.inner.set_reader(reader);
    }

    fn line(&self) -> Option<usize> {
        self.inner.line()
    }

    fn unsent(&self) -> bool {
        if self.is_transparent() {
            return self.inner.unsent();
        }
        let pending = |outbound: &Mutex<Outbound>| outbound.try_lock().is_none_or(|held| !held.pending.is_empty());
        self.outbound.as_ref().is_some_and(pending) || self.inner.unsent()
    }

    fn set_addresses(&self, addresses: &[MacAddr]) -> io::Result<()> {
        self.inner.set_addresses(addresses)
    }

    fn leaves_process(&self) -> bool {
        self.inner.leaves_process()
    }

    fn readiness(&self) -> Readiness {
        let mut readiness = self.inner.readiness();
        if self.is_transparent() {
            return readiness;
        }
        let wait = match &self.outbound {
            _ if self.inbound.lock().0.is_holding() => Some(SOON),
            Some(outbound) => {
                let outbound = outbound.lock();
                // The sending thread does not wake the thread that releases delayed frames, so the latter must check by
                // itself.
                let faults = outbound.state.faults;
                if outbound.is_waiting(&self.inner) {
                    Some(SOON)
                } else {
                    (faults.delay > 0 || faults.reorder > 0).then_some(LATER)
                }
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

    fn detach(&self) {
        self.inner.detach();
    }
}

#[cfg(test)]
mod tests {
    use pvrdma_base::Snapshot;

    use super::*;
    use crate::memory;

    /// Returns the frames that arrive out of a thousand numbered ones, and the number lost.
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
    fn each_fault_has_its_effect_and_a_seed_repeats_it() {
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

    /// A frame is overtaken by at most 16 others, within a call and across calls, and arrives once no more frames do.
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

    /// Does the same with faults in the outbound direction, through a link that takes few frames at a time.
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
    fn both_ways_includes_sent_frames() {
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

    /// Without faults the wrapper behaves like the inner link, and when the faults change, no held frame is lost or
    /// stuck.
    #[test]
    fn faults_come_and_go_while_frames_pass() {
        let (a, b) = memory::pair(5000).unwrap();
        let a = FaultLink::both_ways(a, Faults::default(), 1);
        let (mut sent, mut got, mut ignored) = (0_u32, Frames::default(), Frames::default());
        let mut send = |count: u32| {
            let mut frames = Frames::default();
            (sent..sent + count).for_each(|number| frames.push(&number.to_be_bytes()));
            sent += count;
            assert_eq!(a.send(&frames, 0), frames.len());
        };
        send(100);
        b.receive(&mut got, 5000);
        assert_eq!((got.len(), a.is_transparent()), (100, true));
        a.set_faults(Faults { delay: 5000, reorder: 1000, ..Faults::default() }, 7);
        send(100);
        b.receive(&mut got, 5000);
        assert!(got.len() < 200 && a.readiness().wait == Some(SOON));
        // Other frames neither pass the held frames nor wait forever behind them.
        a.set_faults(Faults::default(), 1);
        assert!(!a.is_transparent());
        send(100);
        for _ in 0..=Faults::MAX_DELAY {
            a.receive(&mut ignored, 10);
        }
        assert!(a.is_transparent() && a.readiness().wait.is_none());
        b.receive(&mut got, 5000);
        let mut numbers: Vec<_> = got.iter().map(|frame| u32::from_be_bytes(frame.try_into().unwrap())).collect();
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(0..300));
        a.set_faults(Faults { loss: 10_000, ..Faults::default() }, 1);
        send(100);
        b.receive(&mut got, 5000);
        assert_eq!((got.len(), a.lost()), (300, 100));
    }

    /// A link that takes all frames, and keeps the rest of the last one while it has no room.
    #[derive(Debug, Default)]
    struct Narrow {
        room: AtomicBool,
        left: AtomicBool,
    }

    impl Link for Narrow {
        fn receive(&self, _frames: &mut Frames, _most: usize) {}

        fn send(&self, frames: &Frames, from: usize) -> usize {
            let count = frames.len() - from;
            let left = count > 0 || self.left.load(Ordering::Relaxed);
            self.left.store(left && !self.room.load(Ordering::Relaxed), Ordering::Relaxed);
            count
        }

        fn unsent(&self) -> bool {
            self.left.load(Ordering::Relaxed)
        }

        fn readiness(&self) -> Readiness {
            Readiness::default()
        }

        fn lost(&self) -> u64 {
            0
        }

        fn inspect(&self) -> LinkInspect {
            LinkInspect { kind: "narrow", name: String::new(), peers: Vec::new(), up: Snapshot::Taken(true) }
        }
    }

    /// The reading thread releases late frames, and the inner link keeps the rest of one: no other caller knows of it.
    #[test]
    fn the_rest_of_a_late_frame_is_sent() {
        let link = FaultLink::both_ways(Narrow::default(), Faults { delay: 10_000, ..Faults::default() }, 1);
        let (mut frames, mut ignored) = (Frames::default(), Frames::default());
        frames.push(b"late");
        assert_eq!((link.send(&frames, 0), link.inner.unsent()), (1, false));
        link.set_faults(Faults::default(), 1);
        for _ in 0..=Faults::MAX_DELAY {
            link.receive(&mut ignored, 10);
        }
        assert!(link.inner.unsent() && link.unsent());
        assert_eq!(link.readiness().wait, Some(SOON));
        link.inner.room.store(true, Ordering::Relaxed);
        link.receive(&mut ignored, 10);
        assert_eq!((link.inner.unsent(), link.readiness().wait, link.is_transparent()), (false, None, true));
    }

    /// The same in the inbound direction: late frames arrive without further frames once the faults are over.
    #[test]
    fn inbound_faults_end() {
        let (a, b) = memory::pair(5000).unwrap();
        let b = FaultLink::new(b, Faults { delay: 5000, reorder: 2000, ..Faults::default() }, 3);
        let (mut frames, mut got) = (Frames::default(), Frames::default());
        (0..500_u32).for_each(|number| frames.push(&number.to_be_bytes()));
        assert_eq!(a.send(&frames, 0), 500);
        b.receive(&mut got, 500);
        assert!(got.len() < 500);
        b.set_faults(Faults { reorder: 2000, ..Faults::default() }, 3);
        b.receive(&mut got, 500);
        b.set_faults(Faults::default(), 3);
        while !b.is_transparent() {
            b.receive(&mut got, 500);
        }
        assert_eq!((got.len(), b.lost(), b.readiness().wait), (500, 0, None));
    }
}
