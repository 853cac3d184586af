//! A cable inside the process.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::{Frames, Link, Readiness};

type Queue = Arc<Mutex<VecDeque<Vec<u8>>>>;

/// One end. It has nothing to wait for: its owner polls it.
#[derive(Debug)]
pub struct MemoryLink {
    input: Queue,
    output: Queue,
    capacity: usize,
    sent: AtomicU64,
}

/// Two ends of a cable that holds `capacity` frames in each direction.
pub fn pair(capacity: usize) -> (MemoryLink, MemoryLink) {
    let (one, other) = (Queue::default(), Queue::default());
    let end = |input: &Queue, output: &Queue| MemoryLink {
        input: Arc::clone(input),
        output: Arc::clone(output),
        capacity,
        sent: AtomicU64::new(0),
    };
    (end(&one, &other), end(&other, &one))
}

impl MemoryLink {
    /// Frames that were sent from this end.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }
}

impl Link for MemoryLink {
    fn receive(&self, frames: &mut Frames, most: usize) {
        let mut input = self.input.lock();
        let count = input.len().min(most);
        for frame in input.drain(..count) {
            frames.push(&frame);
        }
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        let mut output = self.output.lock();
        let room = self.capacity.saturating_sub(output.len());
        let before = output.len();
        output.extend(frames.iter_from(from).take(room).map(<[u8]>::to_vec));
        let taken = output.len() - before;
        self.sent.fetch_add(taken as u64, Ordering::Relaxed);
        taken
    }

    fn readiness(&self) -> Readiness {
        Readiness::default()
    }

    fn lost(&self) -> u64 {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_cross_in_order_and_room_is_limited() {
        let (a, b) = pair(2);
        let mut frames = Frames::default();
        for frame in [b"1", b"2", b"3"] {
            frames.push(frame);
        }
        assert_eq!(a.send(&frames, 0), 2);
        assert_eq!(a.send(&frames, 2), 0);
        let mut got = Frames::default();
        b.receive(&mut got, 1);
        assert_eq!(a.send(&frames, 2), 1);
        b.receive(&mut got, 9);
        assert_eq!(got.iter().collect::<Vec<_>>(), [b"1", b"2", b"3"]);
        a.receive(&mut got, 9);
        assert_eq!((got.len(), a.sent()), (3, 3));
    }
}
