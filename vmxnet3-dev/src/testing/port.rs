//! What a test device is connected to.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::{Checksum, Frame, FramePort, PortOffloads, Received, Sent, Vmxnet3Device};

/// A frame that a device has sent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SentFrame {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// What is known of its checksum.
    pub checksum: Checksum,
    /// Bytes of data in each segment.
    pub mss: Option<u16>,
}

/// Writes down what it is given.
#[derive(Debug, Default)]
pub struct RecordingPort {
    frames: Mutex<Vec<SentFrame>>,
    offloads: Mutex<PortOffloads>,
    room: Mutex<Option<usize>>,
    ready: AtomicU64,
    flushes: AtomicU64,
}

impl RecordingPort {
    /// What was sent since the last call.
    pub fn take(&self) -> Vec<SentFrame> {
        std::mem::take(&mut self.frames.lock())
    }

    /// What it takes from now on.
    pub fn set_offloads(&self, checksum: bool, segmentation: bool) {
        *self.offloads.lock() = PortOffloads { checksum, segmentation };
    }

    /// Takes so many frames more; `None`: all.
    pub fn set_room(&self, room: Option<usize>) {
        *self.room.lock() = room;
    }

    /// How often it was told that there are receive buffers.
    pub fn ready(&self) -> u64 {
        self.ready.load(Ordering::Relaxed)
    }

    /// How often a batch has ended.
    pub fn flushes(&self) -> u64 {
        self.flushes.load(Ordering::Relaxed)
    }
}

impl FramePort for RecordingPort {
    fn offloads(&self) -> PortOffloads {
        *self.offloads.lock()
    }

    fn send(&self, frame: &Frame<'_>) -> Sent {
        if let Some(room) = &mut *self.room.lock() {
            if *room == 0 {
                return Sent::Full;
            }
            *room -= 1;
        }
        let (bytes, mss) = (frame.bytes().to_vec(), frame.mss().map(Into::into));
        self.frames.lock().push(SentFrame { bytes, checksum: frame.checksum(), mss });
        Sent::Taken
    }

    fn flush(&self) {
        self.flushes.fetch_add(1, Ordering::Relaxed);
    }

    fn receive_ready(&self) {
        self.ready.fetch_add(1, Ordering::Relaxed);
    }
}

/// A cable to another device, which takes everything and loses nothing: what finds no buffer waits in the sender's
/// ring.
#[derive(Debug, Default)]
pub struct Cable {
    peer: OnceLock<Weak<Vmxnet3Device>>,
    waiting: AtomicBool,
}

impl Cable {
    /// Connects the other end.
    pub fn connect(&self, peer: &Arc<Vmxnet3Device>) {
        self.peer.set(Arc::downgrade(peer)).unwrap();
    }

    fn peer(&self) -> Option<Arc<Vmxnet3Device>> {
        self.peer.get().and_then(Weak::upgrade)
    }

    /// A frame waits for the peer's buffers.
    pub fn is_waiting(&self) -> bool {
        self.waiting.load(Ordering::Acquire)
    }
}

impl FramePort for Cable {
    fn offloads(&self) -> PortOffloads {
        PortOffloads { checksum: true, segmentation: true }
    }

    fn send(&self, frame: &Frame<'_>) -> Sent {
        self.waiting.store(true, Ordering::Release);
        let full = self.peer().is_some_and(|peer| peer.receive(frame) == Received::NoBuffers);
        if !full {
            self.waiting.store(false, Ordering::Release);
        }
        if full { Sent::Full } else { Sent::Taken }
    }

    fn flush(&self) {
        if let Some(peer) = self.peer() {
            peer.flush();
        }
    }

    fn receive_ready(&self) {
        // Our guest has buffers: the peer goes on.
        if let Some(peer) = self.peer() {
            peer.resume_transmit();
        }
    }
}
