//! The work on a frame that its sender left to others: a checksum, and segmentation of TCP.
//!
//! Between guests of one process the receiver does it: a long frame is handed over whole, as between two interfaces of
//! one kernel. A [`GsoLink`](crate::GsoLink) does it in front of links that carry frames to a wire.

pub mod headers;
#[cfg(any(test, feature = "testing"))]
pub mod sample;
#[cfg(test)]
mod tests;
mod transport;

use std::num::NonZeroU16;

use headers::Headers;
use transport::Transport;

/// Work that is still to be done to a frame (`virtio_net_hdr` describes the same).
///
/// It has no offsets. A link that does the work takes them from the headers of the frame, and changes nothing but
/// fields that TCP, UDP and IP define: the checksum, and for segmentation also lengths, sequence number, flags and
/// identification. A port that has inspected a frame relies on this: all other bytes leave as it saw them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Offload(Work);

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Work {
    #[default]
    Nothing,
    /// The checksum field of TCP or UDP holds the sum of the pseudo header.
    Checksum,
    /// The same, of TCP to be cut into segments with so many bytes of data.
    Segment(NonZeroU16),
}

impl Offload {
    /// Nothing: the frame is as it is on a wire.
    pub const NONE: Self = Self(Work::Nothing);

    /// The sum from byte `start` to the end of the IP packet is to be stored at byte `at`, which holds the sum of the
    /// pseudo header. `None`: that is not the checksum of an unfragmented TCP segment or UDP datagram.
    #[inline]
    pub fn checksum(frame: &[u8], start: u16, at: u16) -> Option<Self> {
        let offsets = Transport::of(frame)?.offsets()?;
        (offsets == (start, at)).then_some(Self(Work::Checksum))
    }

    /// The TCP frame, whose checksum is the sum of the pseudo header, is to be cut into segments with `mss` bytes of
    /// data. `None`: links cannot cut it, because it is no TCP with data, or has extension headers of IPv6 or two tags.
    #[inline]
    pub fn segmentation(frame: &[u8], mss: NonZeroU16) -> Option<Self> {
        can_segment(frame).then_some(Self(Work::Segment(mss)))
    }

    /// Returns `true` if nothing is left to be done.
    #[inline]
    pub const fn is_none(self) -> bool {
        matches!(self.0, Work::Nothing)
    }

    /// Returns `true` if a frame has the headers that this work needs. Others are lost when it is done.
    #[inline]
    pub fn fits(self, frame: &[u8]) -> bool {
        match self.0 {
            Work::Nothing => true,
            Work::Checksum => is_whole(frame),
            Work::Segment(_) => can_segment(frame),
        }
    }

    /// Offsets in the frame of the bytes that the missing checksum covers and of the checksum. `None`: none is missing,
    /// or the frame has no place for one.
    #[inline]
    pub fn missing_checksum(self, frame: &[u8]) -> Option<(u16, u16)> {
        Transport::of(frame).filter(|_| !self.is_none())?.offsets()
    }

    /// Bytes of data in each segment, if the frame is to be cut.
    #[inline]
    pub const fn mss(self) -> Option<NonZeroU16> {
        match self.0 {
            Work::Segment(mss) => Some(mss),
            Work::Nothing | Work::Checksum => None,
        }
    }

    /// Bytes of the longest frame that it becomes.
    #[inline]
    pub fn longest(self, frame: &[u8]) -> usize {
        let headers = self.mss().and_then(|mss| Some((Headers::of(frame)?.len, usize::from(mss.get()))));
        headers.map_or(frame.len(), |(headers, mss)| frame.len().min(headers.saturating_add(mss)))
    }

    /// Does the work: gives `take` each frame as it is on a wire, in `room`, which is used again. Returns `false` if
    /// the frame does not [fit](Self::fits).
    #[inline]
    pub fn finish(self, frame: &[u8], room: &mut Vec<u8>, mut take: impl FnMut(&[u8])) -> bool {
        let mss = match self.0 {
            Work::Nothing => {
                take(frame);
                return true;
            }
            Work::Checksum => {
                room.clear();
                room.extend_from_slice(frame);
                let done = Transport::of(frame).and_then(|transport| transport.complete(room)).is_some();
                if done {
                    take(room);
                }
                return done;
            }
            Work::Segment(mss) => usize::from(mss.get()),
        };
        let Some(headers) = Headers::of(frame).filter(|_| can_segment(frame)) else { return false };
        let data = frame.get(headers.len..).unwrap_or_default();
        let count = data.len().div_ceil(mss);
        for (index, part) in data.chunks(mss).enumerate() {
            room.clear();
            room.resize(headers.len, 0);
            room.extend_from_slice(part);
            if headers.write(index, mss, index + 1 == count, room).is_none() {
                return false;
            }
            take(room);
        }
        count > 0
    }
}

/// Returns `true` for an unfragmented TCP segment or UDP datagram, all of whose lengths agree.
#[inline]
pub fn is_whole(frame: &[u8]) -> bool {
    Transport::of(frame).is_some()
}

/// Both parsers must find the same TCP header: [`Headers`] takes a fragment for TCP, and [`Transport`] takes frames
/// that it cannot rewrite.
#[inline]
fn can_segment(frame: &[u8]) -> bool {
    let Some((headers, transport)) = Headers::of(frame).zip(Transport::of(frame)) else { return false };
    let is_same = headers.is_tcp() && headers.transport == transport.start;
    // What follows the IP packet would become data.
    is_same && headers.len < frame.len() && transport.end == frame.len()
}
