//! Ports for test devices.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use pvrdma_base::locks::Mutex;

use crate::{Checksum, Frame, FramePort, PortOffloads, Received, Sent, Vmxnet3Device};

/// A frame sent by a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SentFrame {
    /// Bytes of the frame.
    pub bytes: Vec<u8>,
    /// State of the checksum.
    pub checksum: Checksum,
    /// Number of data bytes per segment.
    pub mss: Option<u16>,
}

/// Port that records frames.
#[derive(Debug, Default)]
pub struct RecordingPort {
    frames: Mutex<Vec<SentFrame>>,
    offloads: Mutex<PortOffloads>,
    room: Mutex<Option<usize>>,
    ready: AtomicU64,
    flushes: AtomicU64,
}

impl RecordingPort {
    /// Returns the frames sent since the last call.
    pub fn take(&self) -> Vec<SentFrame> {
        std::mem::take(&mut self.frames.lock())
    }

    /// Sets the supported offloads.
    pub fn set_offloads(&self, checksum: bool, segmentation: bool) {
        *self.offloads.lock() = PortOffloads { checksum, segmentation };
    }

    /// Limits the number of further frames that the port accepts; `None`: no limit.
    pub fn set_room(&self, room: Option<usize>) {
        *self.room.lock() = room;
    }

    /// Returns how often the port was notified of receive buffers.
    pub fn ready(&self) -> u64 {
        self.ready.load(Ordering::Relaxed)
    }

    /// Returns how often a batch has ended.
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

/// Cable to another device. It accepts every frame and loses none: a frame without a receive buffer waits in the
/// sender's ring.
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

    /// Returns `true` if a frame waits for the peer's buffers.
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
        // The guest on this end has buffers again, so the peer resumes transmission.
        if let Some(peer) = self.peer() {
            peer.resume_transmit();
        }
    }
}
