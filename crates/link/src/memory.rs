//! A cable inside the process.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use pvrdma_base::Snapshot;

use crate::{Bell, Frames, Link, LinkInspect, Readiness};

/// One direction of the cable. The descriptors change together with the queue, under its lock, so they always match it.
#[derive(Debug)]
struct OneWay {
    frames: Mutex<VecDeque<Vec<u8>>>,
    /// Readable while the queue contains frames.
    filled: Bell,
    /// Writable while the queue has room.
    room: Bell,
    capacity: usize,
}

impl OneWay {
    fn new(capacity: usize) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self { frames: Mutex::default(), filled: Bell::new()?, room: Bell::new()?, capacity }))
    }
}

/// One end of the cable.
#[derive(Debug)]
pub struct MemoryLink {
    input: Arc<OneWay>,
    output: Arc<OneWay>,
    sent: AtomicU64,
}

/// Creates the two ends of a cable that holds `capacity` frames in each direction, at least one.
///
/// # Errors
/// The process has no descriptors left.
pub fn pair(capacity: usize) -> io::Result<(MemoryLink, MemoryLink)> {
    let (one, other) = (OneWay::new(capacity)?, OneWay::new(capacity)?);
    let end = |input: &Arc<OneWay>, output: &Arc<OneWay>| MemoryLink {
        input: Arc::clone(input),
        output: Arc::clone(output),
        sent: AtomicU64::new(0),
    };
    Ok((end(&one, &other), end(&other, &one)))
}

impl MemoryLink {
    /// Returns the number of frames sent from this end.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }
}

impl Link for MemoryLink {
    fn receive(&self, frames: &mut Frames, most: usize) {
        let OneWay { filled, room, capacity, .. } = &*self.input;
        let mut input = self.input.frames.lock();
        let count = input.len().min(most);
        if count == 0 {
            return;
        }
        if input.len() >= *capacity {
            room.clear();
        }
        for frame in input.drain(..count) {
            frames.push(&frame);
        }
        if input.is_empty() {
            filled.clear();
        }
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        let OneWay { filled, room, capacity, .. } = &*self.output;
        let mut output = self.output.frames.lock();
        let before = output.len();
        output.extend(frames.iter_from(from).take(capacity.saturating_sub(before)).map(<[u8]>::to_vec));
        let taken = output.len() - before;
        if taken > 0 && before == 0 {
            filled.ring();
        }
        if taken > 0 && output.len() >= *capacity {
            room.block();
        }
        self.sent.fetch_add(taken as u64, Ordering::Relaxed);
        taken
    }

    fn readiness(&self) -> Readiness {
        let (readable, writable) = (self.input.filled.descriptor(), self.output.room.descriptor());
        Readiness { readable: Some(readable), writable: Some(writable), ..Readiness::default() }
    }

    fn inspect(&self) -> LinkInspect {
        LinkInspect { kind: "memory", name: String::new(), peers: Vec::new(), up: Snapshot::Taken(true) }
    }

    fn lost(&self) -> u64 {
        0
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec};

    use super::*;

    #[test]
    fn frames_cross_in_order_and_room_is_limited() {
        let (a, b) = pair(2).unwrap();
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

    #[test]
    fn an_end_can_be_waited_for() {
        let (a, b) = pair(2).unwrap();
        let ready = |end: &MemoryLink| {
            let Readiness { readable, writable, .. } = end.readiness();
            let (readable, writable) = (readable.unwrap(), writable.unwrap());
            let mut fds = [PollFd::new(&*readable, PollFlags::IN), PollFd::new(&*writable, PollFlags::OUT)];
            rustix::event::poll(&mut fds, Some(&Timespec::default())).unwrap();
            fds.map(|fd| !fd.revents().is_empty())
        };
        assert_eq!((ready(&a), ready(&b)), ([false, true], [false, true]));
        let mut frames = Frames::default();
        for frame in [b"1", b"2", b"3"] {
            frames.push(frame);
        }
        assert_eq!(a.send(&frames, 0), 2);
        assert_eq!((ready(&a), ready(&b)), ([false, false], [true, true]));
        let mut got = Frames::default();
        b.receive(&mut got, 1);
        assert_eq!((ready(&a), ready(&b)), ([false, true], [true, true]));
        assert_eq!(a.send(&frames, 2), 1);
        assert_eq!(ready(&a), [false, false]);
        b.receive(&mut got, 9);
        b.receive(&mut got, 9);
        assert_eq!((ready(&a), ready(&b)), ([false, true], [false, true]));
        assert_eq!(got.len(), 3);
    }
}
