//! The trait of a link, and the state that it shows.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::Duration;

use pvrdma_base::{Counter, Snapshot};
use pvrdma_packet::MacAddr;
#[cfg(feature = "serde")]
use serde::Serialize;

use crate::{Frames, Offload};

/// Maximum length of a frame that a link carries, in bytes: 64 KiB, Ethernet header and tag.
pub const MAX_LINK_FRAME: usize = 65_536 + 18;

/// Descriptors and timeout to wait for before the next call of a link can make progress.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    /// Readable when frames or connections have arrived.
    pub readable: Option<Arc<OwnedFd>>,
    /// Writable when there is room again.
    pub writable: Option<Arc<OwnedFd>>,
    /// Longest time to wait, whatever the state of the descriptors.
    pub wait: Option<Duration>,
    /// Readable when the caller must query the readiness again, because it may have changed.
    pub changed: Option<Arc<OwnedFd>>,
}

/// State of a link at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(Serialize))]
pub struct LinkInspect {
    /// Kind of link: the name of its module.
    pub kind: &'static str,
    /// Interface, address or path of the link. Empty if it has none.
    pub name: String,
    /// Addresses of the other ends, as far as they are configured.
    pub peers: Vec<String>,
    /// `true` if frames can pass: the interface exists, or a peer is connected.
    pub up: Snapshot<bool>,
}

/// Reader of a link: the code that its thread runs when the link is readable.
pub trait LinkReader: Send + Sync {
    /// Reads the pending frames on the calling thread, which saves waking the link's thread. Does not block: if another
    /// thread is reading, it returns at once.
    fn read(&self);
}

/// Receiver of the frames that arrive on a link. The thread that reads the frames may call [`take`](Self::take)
/// directly, which saves a copy and a wake-up. All other frames must be fetched with [`receive`](Link::receive).
pub trait LinkReceiver: Send + Sync {
    /// Takes as many frames of `list` as possible on the calling thread without waiting for another thread. They
    /// arrived after all frames received so far. Returns the number taken; the rest is delivered through
    /// [`Link::receive`].
    fn take(&self, frames: &Frames, list: &[usize]) -> usize;
}

/// An end of an Ethernet link. All methods may be called from several threads.
pub trait Link: Send + Sync + fmt::Debug {
    /// Appends arrived frames, at most `most`.
    fn receive(&self, frames: &mut Frames, most: usize);

    /// Sends the frames from index `from` on, in order, and returns the number that the link took. If it took fewer
    /// than all, it has no room now. The remaining frames are unchanged; the caller may offer them again, or other
    /// frames in their place.
    ///
    /// A frame may have an unfinished offload only if the link [accepts](Self::takes) that. A
    /// [`GsoLink`](crate::GsoLink) in front of the link accepts every frame.
    fn send(&self, frames: &Frames, from: usize) -> usize;

    /// Returns `true` if the link accepts a frame with this unfinished offload.
    fn takes(&self, _frame: &[u8], _offload: Offload) -> bool {
        false
    }

    /// Returns `true` if the link still holds a part of the frames that it took, because it has no room for them. Once
    /// the link is writable, the next call of [`Self::send`] sends this part; an empty batch suffices.
    fn unsent(&self) -> bool {
        false
    }

    /// Returns the descriptors and the timeout to wait for.
    fn readiness(&self) -> Readiness;

    /// Sets the reader of this link. A link may call it on a thread that produces frames for the link. If frames are
    /// left, the link becomes readable all the same.
    fn set_reader(&self, _reader: Weak<dyn LinkReader>) {}

    /// Sets the receiver of incoming frames. It must be callable from any thread. Once this returns, the previous
    /// receiver is no longer called.
    fn set_receiver(&self, _receiver: Weak<dyn LinkReceiver>) {}

    /// Requests frames to these addresses and to groups. A link may deliver other frames as well.
    ///
    /// # Errors
    /// The system refuses.
    fn set_addresses(&self, _addresses: &[MacAddr]) -> io::Result<()> {
        Ok(())
    }

    /// Returns `false` if the link ends in this process, so that no other host can be behind it.
    fn leaves_process(&self) -> bool {
        true
    }

    /// Identifies the line to which this link and others of this process send: links of one line have room together.
    /// `None`: the link has a line of its own. The number stays that of the line while one of its links exists.
    fn line(&self) -> Option<usize> {
        None
    }

    /// Returns the number of frames that the link took and then lost, in either direction.
    fn lost(&self) -> u64;

    /// Describes the link. Never blocks.
    fn inspect(&self) -> LinkInspect;

    /// Returns the additional counters of this kind of link.
    fn counters(&self) -> Vec<Counter> {
        Vec::new()
    }

    /// Ends the use of the link, although other threads may hold it for longer: a port of a switch leaves the switch,
    /// and its address is free.
    fn detach(&self) {}
}

impl<L: Link + ?Sized> Link for Arc<L> {
    #[inline]
    fn receive(&self, frames: &mut Frames, most: usize) {
        (**self).receive(frames, most);
    }

    #[inline]
    fn send(&self, frames: &Frames, from: usize) -> usize {
        (**self).send(frames, from)
    }

    #[inline]
    fn takes(&self, frame: &[u8], offload: Offload) -> bool {
        (**self).takes(frame, offload)
    }

    #[inline]
    fn unsent(&self) -> bool {
        (**self).unsent()
    }

    #[inline]
    fn readiness(&self) -> Readiness {
        (**self).readiness()
    }

    #[inline]
    fn set_reader(&self, reader: Weak<dyn LinkReader>) {
        (**self).set_reader(reader);
    }

    #[inline]
    fn set_receiver(&self, receiver: Weak<dyn LinkReceiver>) {
        (**self).set_receiver(receiver);
    }

    #[inline]
    fn set_addresses(&self, addresses: &[MacAddr]) -> io::Result<()> {
        (**self).set_addresses(addresses)
    }

    #[inline]
    fn leaves_process(&self) -> bool {
        (**self).leaves_process()
    }

    #[inline]
    fn line(&self) -> Option<usize> {
        (**self).line()
    }

    #[inline]
    fn lost(&self) -> u64 {
        (**self).lost()
    }

    #[inline]
    fn inspect(&self) -> LinkInspect {
        (**self).inspect()
    }

    #[inline]
    fn counters(&self) -> Vec<Counter> {
        (**self).counters()
    }

    #[inline]
    fn detach(&self) {
        (**self).detach();
    }
}
