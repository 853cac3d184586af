//! A bad link: loses, repeats, reorders, damages and delays frames, the same ones for the same seed.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::{Frames, Link, Readiness};

/// How often each fault happens to a frame, in hundredths of a percent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Faults {
    /// It is lost.
    pub loss: u16,
    /// It comes twice.
    pub duplicate: u16,
    /// It changes places with its successor.
    pub reorder: u16,
    /// One bit of it is wrong.
    pub corrupt: u16,
    /// It comes up to [`Faults::MAX_DELAY`] calls of [`Link::receive`] later.
    pub delay: u16,
}

impl Faults {
    /// Longest delay, in calls.
    pub const MAX_DELAY: u64 = 16;

    /// All of one in a hundred frames each.
    pub const ONE_PERCENT: Self = Self { loss: 100, duplicate: 100, reorder: 100, corrupt: 100, delay: 100 };
}

/// What happens to the frames that are received.
#[derive(Debug)]
struct State {
    random: u64,
    calls: u64,
    /// Frames with the call that they wait for.
    held: VecDeque<(u64, Vec<u8>)>,
    incoming: Frames,
}

impl State {
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
}

/// A link with faults in the direction towards us. Wrap both ends for both directions.
pub struct FaultLink<L> {
    inner: L,
    faults: Faults,
    state: Mutex<State>,
    lost: AtomicU64,
}

impl<L: fmt::Debug> fmt::Debug for FaultLink<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultLink").field("inner", &self.inner).field("faults", &self.faults).finish_non_exhaustive()
    }
}

impl<L: Link> FaultLink<L> {
    /// Wraps a link.
    pub fn new(inner: L, faults: Faults, seed: u64) -> Self {
        // Zero is the one state that the generator never leaves.
        let random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let state = State { random, calls: 0, held: VecDeque::new(), incoming: Frames::default() };
        Self { inner, faults, state: Mutex::new(state), lost: AtomicU64::new(0) }
    }
}

impl<L: Link> Link for FaultLink<L> {
    fn receive(&self, frames: &mut Frames, most: usize) {
        let state = &mut *self.state.lock();
        state.calls = state.calls.wrapping_add(1);
        let now = state.calls;
        let mut incoming = std::mem::take(&mut state.incoming);
        incoming.clear();
        self.inner.receive(&mut incoming, most);
        for frame in incoming.iter() {
            if state.happens(self.faults.loss) {
                self.lost.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            let mut frame = frame.to_vec();
            if state.happens(self.faults.corrupt) && !frame.is_empty() {
                let bit = state.next();
                let at = usize::try_from(bit / 8).unwrap_or(0) % frame.len();
                if let Some(octet) = frame.get_mut(at) {
                    *octet ^= 1 << (bit % 8);
                }
            }
            let due = if state.happens(self.faults.delay) {
                now.saturating_add(1 + state.next() % Faults::MAX_DELAY)
            } else {
                now
            };
            if state.happens(self.faults.duplicate) {
                state.held.push_back((due, frame.clone()));
            }
            state.held.push_back((due, frame));
            if state.happens(self.faults.reorder) && state.held.len() > 1 {
                let last = state.held.len() - 1;
                state.held.swap(last - 1, last);
            }
        }
        state.incoming = incoming;
        state.held.retain(|(due, frame)| {
            if *due <= now {
                frames.push(frame);
            }
            *due > now
        });
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        self.inner.send(frames, from)
    }

    fn readiness(&self) -> Readiness {
        let mut readiness = self.inner.readiness();
        if !self.state.lock().held.is_empty() {
            let soon = Duration::from_millis(1);
            readiness.wait = Some(readiness.wait.map_or(soon, |wait| wait.min(soon)));
        }
        readiness
    }

    fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed).saturating_add(self.inner.lost())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::memory;

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
}
