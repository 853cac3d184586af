//! Ethernet frames on their way between devices and links, with what is still to be done to them.

use std::fmt;
use std::num::NonZeroU16;

use thiserror::Error;

use crate::offload::checksum::Missing;
use crate::offload::headers::{ETHERNET_LEN, Headers, TAG_LEN, Transport};
use crate::offload::{checksum, segment};

/// Longest frame that is not to be segmented, in bytes: MTU 9,000, header and two tags.
pub const MAX_FRAME: usize = 9000 + ETHERNET_LEN + 2 * TAG_LEN;
/// Longest frame that is to be segmented, in bytes: an IP packet of 64 KiB, header and two tags.
pub const MAX_SUPER_FRAME: usize = 65_535 + ETHERNET_LEN + 2 * TAG_LEN;
/// Most segments of one frame.
pub const MAX_SEGMENTS: usize = 2048;

/// Why bytes are no frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum FrameError {
    /// Shorter than an Ethernet header, or longer than a frame may be.
    #[error("frame of {0} bytes")]
    Length(usize),
    /// A checksum is to be calculated over other bytes than those of TCP or UDP, or stored elsewhere.
    #[error("checksum from byte {start}, stored at byte {at}, is not that of TCP or UDP in a frame of {len} bytes")]
    Checksum {
        /// First byte that is summed.
        start: u16,
        /// Where the sum goes.
        at: u16,
        /// Bytes of the frame.
        len: usize,
    },
    /// Only unfragmented TCP with data can be segmented.
    #[error("segmentation of what is no TCP")]
    NoTcp,
    /// Segments as small would be too many.
    #[error("segments of {0} bytes")]
    Mss(u16),
}

/// What is known of the TCP or UDP checksum of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Checksum {
    /// Nothing.
    #[default]
    Unknown,
    /// It is right.
    Verified,
    /// It is not there yet: the sum from byte `start`, the header of TCP or UDP, to the end of the IP packet is to be
    /// stored at byte `at`, which holds the sum of the pseudo header.
    Partial {
        /// First byte that is summed.
        start: u16,
        /// Where the sum goes.
        at: u16,
    },
}

/// A frame without FCS.
///
/// The constructors parse the bytes, which do not change as long as the frame exists: a missing checksum is that of TCP
/// or UDP, and only TCP is segmented. The frames that leave have all other bytes as they are here.
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
    /// A frame whose checksums are in place. `verified`: somebody has looked.
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

    /// A frame with a checksum to calculate: the sum from byte `start` to the end of the IP packet goes to byte `at`.
    /// These must be the header and the checksum of an unfragmented TCP segment or UDP datagram.
    ///
    /// # Errors
    /// [`FrameError::Length`] and [`FrameError::Checksum`].
    pub fn with_partial_checksum(bytes: &'a [u8], start: u16, at: u16) -> Result<Self, FrameError> {
        Self::partial(bytes, &Headers::parse(bytes), (start, at))
    }

    /// The same of a frame with these headers.
    pub(crate) fn partial(bytes: &'a [u8], headers: &Headers, (start, at): (u16, u16)) -> Result<Self, FrameError> {
        let frame = Self::new(bytes, false)?;
        let checksum = Checksum::Partial { start, at };
        if partial_checksum(headers) != Some(checksum) {
            return Err(FrameError::Checksum { start, at, len: bytes.len() });
        }
        Ok(Self { checksum, ..frame })
    }

    /// A TCP frame to be cut into segments with `mss` bytes of data. Its lengths and its IPv4 checksum are those of the
    /// whole frame, its TCP checksum is the sum of the pseudo header.
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
        // What follows the IP packet would be neither data nor header.
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

    /// The bytes.
    pub const fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// What is known of its checksum.
    pub const fn checksum(&self) -> Checksum {
        self.checksum
    }

    /// Bytes of data in each segment, if it is to be segmented.
    pub const fn mss(&self) -> Option<NonZeroU16> {
        self.mss
    }

    /// The checksum that is missing in it; these are its headers.
    pub(crate) fn missing_checksum(&self, headers: &Headers) -> Option<Missing> {
        let (Checksum::Partial { start, at }, Some(ip)) = (self.checksum, &headers.ip) else { return None };
        Some(Missing::new(self.bytes, ip, start.into(), at.into()))
    }

    /// Where it goes.
    pub(crate) fn destination(&self) -> [u8; 6] {
        self.bytes.first_chunk().copied().unwrap_or_default()
    }

    /// Gives `take` the frame as others on a wire send it: segmented, with all checksums. `room` is used again from
    /// call to call. Ends early when `take` returns `false`, and returns how many frames it took.
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

/// The missing checksum of an unfragmented TCP segment or UDP datagram.
fn partial_checksum(headers: &Headers) -> Option<Checksum> {
    let (offset, field) = match headers.transport? {
        Transport::Tcp { offset, .. } => (offset, checksum::TCP_CHECKSUM),
        Transport::Udp { offset } => (offset, checksum::UDP_CHECKSUM),
    };
    let start = u16::try_from(offset).ok()?;
    Some(Checksum::Partial { start, at: start.checked_add(field)? })
}

/// What happened to a frame that a port was given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sent {
    /// The port has it, or it got lost as on a wire.
    Taken,
    /// There is no room. The device keeps the frame in its ring until it is told to go on
    /// ([`crate::Vmxnet3Device::resume_transmit`]).
    Full,
}

/// What a port does for the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PortOffloads {
    /// It takes frames whose checksum is to be calculated.
    pub checksum: bool,
    /// It takes frames that are to be segmented. Implies the other.
    pub segmentation: bool,
}

/// Where a device's frames go: a switch, or a link.
///
/// The device holds no lock that [`crate::Vmxnet3Device::receive`] of any device waits for, so a port may deliver at
/// once. It must not call back into the registers of a device.
pub trait FramePort: Send + Sync {
    /// What it does for the device.
    fn offloads(&self) -> PortOffloads;

    /// Takes one frame.
    fn send(&self, frame: &Frame<'_>) -> Sent;

    /// The end of a batch: the receivers of its frames may be interrupted now.
    fn flush(&self) {}

    /// Returns `true` if the port takes frames out of the rings itself when it hears of some
    /// ([`Self::transmit_pending`]). Then it is given none.
    fn pulls(&self) -> bool {
        false
    }

    /// Takes frames out of the rings on this thread, if it can at once. Whatever is left it hears of
    /// ([`Self::transmit_pending`]).
    fn pull(&self) {}

    /// The device has more to send than one call does: [`crate::Vmxnet3Device::resume_transmit`] goes on.
    fn transmit_pending(&self) {}

    /// The guest has receive buffers again after [`crate::Received::NoBuffers`].
    fn receive_ready(&self) {}
}
