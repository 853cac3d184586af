//! Ethernet frames between devices and links, with their pending offloads.

use std::fmt;
use std::num::NonZeroU16;

use pvrdma_packet::Transport;
use thiserror::Error;

use crate::offload::checksum::Missing;
use crate::offload::headers::{ETHERNET_LEN, Headers, TAG_LEN};
use crate::offload::{checksum, segment};

/// Maximum length of a frame that is not to be segmented, in bytes: MTU 9,000, header and two tags.
pub const MAX_FRAME: usize = 9000 + ETHERNET_LEN + 2 * TAG_LEN;
/// Maximum length of a frame that is to be segmented, in bytes: an IP packet of 64 KiB, header and two tags.
pub const MAX_SUPER_FRAME: usize = 65_535 + ETHERNET_LEN + 2 * TAG_LEN;
/// Maximum number of segments of one frame.
pub const MAX_SEGMENTS: usize = 2048;

/// Reason bytes are not a valid frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum FrameError {
    /// Shorter than an Ethernet header, or longer than a frame may be.
    #[error("frame of {0} bytes")]
    Length(usize),
    /// The checksum to be calculated covers other bytes than those of TCP or UDP, or its offset is a different one.
    #[error("checksum from byte {start}, stored at byte {at}, is not that of TCP or UDP in a frame of {len} bytes")]
    Checksum {
        /// Offset of the first byte that is summed.
        start: u16,
        /// Offset of the checksum.
        at: u16,
        /// Length of the frame, in bytes.
        len: usize,
    },
    /// Only unfragmented TCP segments with data can be segmented.
    #[error("segmentation of a frame that is not TCP")]
    NoTcp,
    /// Segments of this size would exceed [`MAX_SEGMENTS`].
    #[error("segments of {0} bytes")]
    Mss(u16),
}

/// State of a frame's TCP or UDP checksum.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Checksum {
    /// Unknown.
    #[default]
    Unknown,
    /// Verified as correct.
    Verified,
    /// Not calculated yet. The sum from byte `start`, the header of TCP or UDP, to the end of the IP packet must be
    /// stored at byte `at`, which holds the sum of the pseudo header.
    Partial {
        /// Offset of the first byte that is summed.
        start: u16,
        /// Offset of the checksum.
        at: u16,
    },
}

/// An Ethernet frame without FCS.
///
/// The constructors parse the bytes, which do not change while the frame exists. They guarantee that a missing checksum
/// is that of TCP or UDP, and that only TCP is segmented. Frames on the wire differ from these bytes only in checksums
/// and segmentation.
#[derive(Clone, Copy)]
pub struct Frame<'a> {
    bytes: &'a [u8],
    checksum: Checksum,
    mss: Option<NonZeroU16>,
}

impl fmt::Debug for Frame<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frame")
            .field("len", &self.bytes.len())
            .field("checksum", &self.checksum)
            .field("mss", &self.mss)
            .finish()
    }
}

impl<'a> Frame<'a> {
    /// Creates a frame whose checksums are complete. `verified`: the checksums have been checked.
    ///
    /// # Errors
    /// [`FrameError::Length`].
    pub const fn new(bytes: &'a [u8], verified: bool) -> Result<Self, FrameError> {
        if bytes.len() < ETHERNET_LEN || bytes.len() > MAX_FRAME {
            return Err(FrameError::Length(bytes.len()));
        }
        let checksum = if verified { Checksum::Verified } else { Checksum::Unknown };
        Ok(Self { bytes, checksum, mss: None })
    }

    /// Creates a frame with a checksum to calculate: the sum from byte `start` to the end of the IP packet goes to byte
    /// `at`. These must be the header and the checksum of an unfragmented TCP segment or UDP datagram.
    ///
    /// # Errors
    /// [`FrameError::Length`] and [`FrameError::Checksum`].
    pub fn with_partial_checksum(bytes: &'a [u8], start: u16, at: u16) -> Result<Self, FrameError> {
        Self::partial(bytes, &Headers::parse(bytes), (start, at))
    }

    /// Like [`Self::with_partial_checksum`], for a frame with parsed headers.
    pub(crate) fn partial(bytes: &'a [u8], headers: &Headers, (start, at): (u16, u16)) -> Result<Self, FrameError> {
        let frame = Self::new(bytes, false)?;
        let checksum = Checksum::Partial { start, at };
        if partial_checksum(headers) != Some(checksum) {
            return Err(FrameError::Checksum { start, at, len: bytes.len() });
        }
        Ok(Self { checksum, ..frame })
    }

    /// Creates a TCP frame to be cut into segments with `mss` bytes of data. Its lengths and its IPv4 checksum must be
    /// those of the whole frame, its TCP checksum must be the sum of the pseudo header.
    ///
    /// # Errors
    /// [`FrameError::Length`], [`FrameError::NoTcp`] and [`FrameError::Mss`].
    pub fn to_be_segmented(bytes: &'a [u8], mss: u16) -> Result<Self, FrameError> {
        if bytes.len() < ETHERNET_LEN || bytes.len() > MAX_SUPER_FRAME {
            return Err(FrameError::Length(bytes.len()));
        }
        let headers = Headers::parse(bytes);
        let Some((ip, Transport::Tcp { offset, header_len })) = headers.ip.zip(headers.transport) else {
            return Err(FrameError::NoTcp);
        };
        let data = ip.end.saturating_sub(offset + header_len);
        // Bytes after the IP packet would be neither data nor header.
        if ip.fragment || ip.end != bytes.len() || data == 0 {
            return Err(FrameError::NoTcp);
        }
        let size = NonZeroU16::new(mss).ok_or(FrameError::Mss(mss))?;
        let segment_len = usize::from(mss) + offset + header_len;
        if segment_len > MAX_FRAME || data.div_ceil(usize::from(mss)) > MAX_SEGMENTS {
            return Err(FrameError::Mss(mss));
        }
        let checksum = partial_checksum(&headers).ok_or(FrameError::NoTcp)?;
        Ok(Self { bytes, checksum, mss: Some(size) })
    }

    /// Returns the bytes of the frame.
    pub const fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Returns the state of the checksum.
    pub const fn checksum(&self) -> Checksum {
        self.checksum
    }

    /// Returns the number of data bytes per segment, if the frame is to be segmented.
    pub const fn mss(&self) -> Option<NonZeroU16> {
        self.mss
    }

    /// Returns the checksum that is missing in the frame with these headers.
    pub(crate) fn missing_checksum(&self, headers: &Headers) -> Option<Missing> {
        let (Checksum::Partial { start, at }, Some(ip)) = (self.checksum, &headers.ip) else { return None };
        Some(Missing::new(self.bytes, ip, start.into(), at.into()))
    }

    /// Returns the destination MAC address.
    pub(crate) fn destination(&self) -> [u8; 6] {
        self.bytes.first_chunk().copied().unwrap_or_default()
    }

    /// Calls `take` with each frame as it appears on the wire: segmented, with all checksums complete. `room` is a
    /// buffer that is reused between calls. Stops when `take` returns `false`, and returns the number of frames that
    /// `take` accepted.
    pub fn for_each_wire_frame(&self, room: &mut Vec<u8>, mut take: impl FnMut(&Frame<'_>) -> bool) -> usize {
        if let Some(mss) = self.mss {
            return segment::segments(self.bytes, mss, room, |bytes| Frame::new(bytes, true).is_ok_and(|it| take(&it)));
        }
        let Checksum::Partial { start, at } = self.checksum else { return usize::from(take(self)) };
        let Some(ip) = Headers::parse(self.bytes).ip else { return 0 };
        room.clear();
        room.extend_from_slice(self.bytes);
        checksum::complete(room, start.into()..ip.end, at.into());
        usize::from(Frame::new(room, true).is_ok_and(|whole| take(&whole)))
    }
}

/// Returns the missing checksum of an unfragmented TCP segment or UDP datagram.
fn partial_checksum(headers: &Headers) -> Option<Checksum> {
    let (offset, field) = match headers.transport? {
        Transport::Tcp { offset, .. } => (offset, checksum::TCP_CHECKSUM),
        Transport::Udp { offset } => (offset, checksum::UDP_CHECKSUM),
    };
    let start = u16::try_from(offset).ok()?;
    Some(Checksum::Partial { start, at: start.checked_add(field)? })
}

/// Result of passing a frame to a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sent {
    /// The port accepted the frame, or it was lost as on a wire.
    Taken,
    /// The port has no room. The device keeps the frame in its ring until [`crate::Vmxnet3Device::resume_transmit`] is
    /// called.
    Full,
}

/// Offloads that a port performs for the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PortOffloads {
    /// Accepts frames whose checksum is still to be calculated.
    pub checksum: bool,
    /// Accepts frames that are still to be segmented. Implies `checksum`.
    pub segmentation: bool,
}

/// Destination of a device's frames: a switch, or a link.
///
/// During a call the device holds no lock that [`crate::Vmxnet3Device::receive`] of any device waits for, so a port may
/// deliver the frame inline. It must not call back into the registers of a device.
pub trait FramePort: Send + Sync {
    /// Returns the supported offloads.
    fn offloads(&self) -> PortOffloads;

    /// Sends one frame.
    fn send(&self, frame: &Frame<'_>) -> Sent;

    /// Ends a batch: the receivers of its frames may be interrupted now.
    fn flush(&self) {}

    /// Returns `true` if the port reads the transmit rings itself when [`Self::transmit_pending`] is called. The device
    /// then does not call [`Self::send`].
    fn pulls(&self) -> bool {
        false
    }

    /// Reads the transmit rings on the calling thread, if that is possible without waiting. If packets are left, the
    /// device calls [`Self::transmit_pending`].
    fn pull(&self) {}

    /// Notifies the port that the device has more to send than one call does: [`crate::Vmxnet3Device::resume_transmit`]
    /// continues.
    fn transmit_pending(&self) {}

    /// Notifies the port that the guest has receive buffers again after [`crate::Received::NoBuffers`].
    fn receive_ready(&self) {}
}
