//! Sending: runs of packets leave as super-frames, with few system calls.

use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use pvrdma_link::{Frames, Offload};
use rustix::io::Errno;

use super::offload::{self, Headers, MAX_HEADERS, OFFLOAD_LEN, SuperFrameHeaders};
use super::priority::priority;
use super::socket::{self, MAX_MESSAGES};

/// Result of sending frames.
#[derive(Debug, Default)]
pub(super) struct Sent {
    /// Number of frames that need not be offered again.
    pub(super) taken: usize,
    /// Number of these that were not sent.
    pub(super) lost: usize,
    /// Number of these that the kernel rejects in this form (`EINVAL`).
    pub(super) refused: usize,
    /// Error that ended the call before all frames were taken.
    pub(super) error: Option<Errno>,
}

/// Sending half of the link.
#[derive(Debug)]
pub(super) struct Output {
    /// The kernel accepts UDP super-frames.
    super_frames: AtomicBool,
    /// The kernel accepts tagged super-frames, too.
    tagged: AtomicBool,
    /// Frames with an offload are given to the kernel unfinished. A refusal does not change this, because it may be the
    /// fault of a single frame.
    open_frames: bool,
    /// Priority of the frames that the socket sends. Senders hold the read lock, so that it cannot change during a
    /// call.
    priority: RwLock<u8>,
}

impl Default for Output {
    fn default() -> Self {
        Self {
            super_frames: AtomicBool::new(true),
            tagged: AtomicBool::new(true),
            open_frames: true,
            priority: RwLock::new(0),
        }
    }
}

/// One message: its frames, and the bytes in front of them.
struct Message {
    first: usize,
    count: usize,
    /// Offload header, followed by the headers of a super-frame.
    head: [u8; OFFLOAD_LEN + MAX_HEADERS],
    head_len: usize,
    /// Number of bytes at the beginning of each frame that are left out, because the head contains them.
    skip: usize,
    is_tagged: bool,
    priority: u8,
}

impl Message {
    fn plain(frames: &Frames, first: usize) -> Self {
        let (head, head_len) = ([0; OFFLOAD_LEN + MAX_HEADERS], OFFLOAD_LEN);
        let priority = frames.get(first).map_or(0, priority);
        Self { first, count: 1, head, head_len, skip: 0, is_tagged: false, priority }
    }

    /// Creates a message for a frame whose offload is left to the kernel.
    fn open(frames: &Frames, index: usize) -> Option<Self> {
        let mut message = Self::plain(frames, index);
        let open = Headers::left_open(frames.get(index)?, frames.offload(index))?;
        message.head.get_mut(..OFFLOAD_LEN)?.copy_from_slice(&open);
        Some(message)
    }

    /// Creates a super-frame from the run that starts at `first`, if there is one.
    fn super_frame(frames: &Frames, first: usize) -> Option<Self> {
        let (count, mut headers) = offload::run(frames.iter_from(first))?;
        let skip = headers.len;
        let payload = |frame: &[u8]| frame.len().saturating_sub(skip);
        let segment = payload(frames.get(first)?);
        let total = frames.iter_from(first).take(count).map(payload).sum();
        let offload = headers.widen(total, segment)?;
        let mut message = Self { count, skip, is_tagged: headers.are_tagged(), ..Self::plain(frames, first) };
        message.head_len = OFFLOAD_LEN + skip;
        message.head.get_mut(..OFFLOAD_LEN)?.copy_from_slice(&offload);
        message.head.get_mut(OFFLOAD_LEN..message.head_len)?.copy_from_slice(headers.bytes());
        Some(message)
    }
}

impl Output {
    /// Creates the half that leaves no work to the kernel.
    pub(super) fn without_offload() -> Self {
        Self { super_frames: AtomicBool::new(false), open_frames: false, ..Self::default() }
    }

    /// Sends the frames from index `from` on.
    pub(super) fn send(&self, socket: &OwnedFd, frames: &Frames, from: usize) -> Sent {
        let mut sent = Sent::default();
        while from + sent.taken < frames.len() {
            let messages = self.messages(frames, from + sent.taken);
            let class = self.take_priority(socket, messages.first().map_or(0, |first| first.priority));
            let result = transmit(socket, frames, &messages);
            drop(class);
            match result {
                Ok(count) => sent.taken += messages.iter().take(count).map(|message| message.count).sum::<usize>(),
                Err(Errno::INTR) => {}
                Err(Errno::INVAL)
                    if self.has_super_frames() && messages.first().is_some_and(|first| first.count > 1) =>
                {
                    let is_tagged = messages.first().is_some_and(|first| first.is_tagged);
                    // Log: twice for a link.
                    log::info!("this kernel takes no {}super-frames of UDP", if is_tagged { "tagged " } else { "" });
                    if is_tagged { &self.tagged } else { &self.super_frames }.store(false, Ordering::Relaxed);
                }
                // The queue of the interface is full, or the frame is longer than the interface permits.
                Err(errno @ (Errno::NOBUFS | Errno::MSGSIZE | Errno::INVAL)) => {
                    let count = messages.first().map_or(1, |first| first.count);
                    sent.taken += count;
                    sent.lost += count;
                    sent.refused += if errno == Errno::INVAL { count } else { 0 };
                }
                Err(errno) => {
                    sent.error = Some(errno);
                    break;
                }
            }
        }
        sent
    }

    /// Sets the priority of the socket, which cannot change while the result is held. Without the privilege for it, the
    /// frames are sent with the previous priority.
    fn take_priority(&self, socket: &OwnedFd, priority: u8) -> RwLockReadGuard<'_, u8> {
        let current = self.priority.read();
        if *current == priority {
            return current;
        }
        drop(current);
        let mut current = self.priority.write();
        if *current != priority {
            let _ = socket::set_priority(socket.as_fd(), priority);
            *current = priority;
        }
        RwLockWriteGuard::downgrade(current)
    }

    /// Resets the state for a new socket, whose priority is 0.
    pub(super) fn forget_socket(&self) {
        *self.priority.write() = 0;
    }

    /// Returns `true` if the offload of a frame can be left to the kernel.
    pub(super) fn takes(&self, frame: &[u8], offload: Offload) -> bool {
        self.open_frames && Headers::left_open(frame, offload).is_some()
    }

    fn has_super_frames(&self) -> bool {
        self.super_frames.load(Ordering::Relaxed)
    }

    fn messages(&self, frames: &Frames, from: usize) -> Vec<Message> {
        let mut messages = Vec::with_capacity(MAX_MESSAGES);
        let mut next = from;
        while next < frames.len() && messages.len() < MAX_MESSAGES {
            let joined = if !frames.offload(next).is_none() {
                Message::open(frames, next)
            } else if self.has_super_frames() {
                Message::super_frame(frames, next)
                    .filter(|joined| !joined.is_tagged || self.tagged.load(Ordering::Relaxed))
            } else {
                None
            };
            let message = joined.unwrap_or_else(|| Message::plain(frames, next));
            if messages.first().is_some_and(|first: &Message| first.priority != message.priority) {
                break;
            }
            next += message.count;
            messages.push(message);
        }
        messages
    }
}

fn transmit(socket: &OwnedFd, frames: &Frames, messages: &[Message]) -> Result<usize, Errno> {
    let mut parts = Vec::new();
    let mut ends = Vec::with_capacity(messages.len());
    for message in messages {
        parts.push(IoSlice::new(message.head.get(..message.head_len).unwrap_or_default()));
        for frame in frames.iter_from(message.first).take(message.count) {
            parts.push(IoSlice::new(frame.get(message.skip..).unwrap_or_default()));
        }
        ends.push(parts.len());
    }
    socket::send(socket.as_fd(), &parts, &ends)
}
