//! Pending offloads of a frame: a checksum, or TCP segmentation, that its sender has left to a later stage.
//!
//! Between guests of one process, the receiver does this work: a long frame is delivered in one piece, as between two
//! interfaces of one kernel. In front of links that carry frames to a wire, a [`GsoLink`](crate::GsoLink) does it.

pub mod headers;
#[cfg(any(test, feature = "testing"))]
pub mod sample;
#[cfg(test)]
mod tests;
mod transport;

use std::num::NonZeroU16;

use headers::Headers;
use transport::Covered;

/// Unfinished work on a frame (`virtio_net_hdr` describes the same).
///
/// An offload contains no offsets. A link that does the work takes them from the headers of the frame, and changes only
/// fields that TCP, UDP and IP define: the checksum, and for segmentation also lengths, sequence number, flags and
/// identification. A port that has inspected a frame relies on this, because all other bytes leave unchanged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Offload(Work);

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Work {
    #[default]
    Nothing,
    /// The checksum field of TCP or UDP contains the sum of the pseudo header.
    Checksum,
    /// As `Checksum`, and the TCP frame must be segmented, with this number of data bytes in each segment.
    Segment(NonZeroU16),
}

impl Offload {
    /// No work: the frame has its form on the wire.
    pub const NONE: Self = Self(Work::Nothing);

    /// Checksum offload: stores the sum from byte `start` to the end of the IP packet at byte `at`, which contains the
    /// sum of the pseudo header. `None` unless these are the offsets of the checksum of an unfragmented TCP segment or
    /// UDP datagram.
    #[inline]
    pub fn checksum(frame: &[u8], start: u16, at: u16) -> Option<Self> {
        let offsets = Covered::of(frame)?.offsets()?;
        (offsets == (start, at)).then_some(Self(Work::Checksum))
    }

    /// Segmentation offload: splits the TCP frame, whose checksum field contains the sum of the pseudo header, into
    /// segments with `mss` bytes of data. `None` if links cannot segment the frame: it is not TCP with data, or it
    /// has IPv6 extension headers or two VLAN tags.
    #[inline]
    pub fn segmentation(frame: &[u8], mss: NonZeroU16) -> Option<Self> {
        can_segment(frame).then_some(Self(Work::Segment(mss)))
    }

    /// Returns `true` if there is no unfinished work.
    #[inline]
    pub const fn is_none(self) -> bool {
        matches!(self.0, Work::Nothing)
    }

    /// Returns `true` if a frame has the headers that this work needs. A frame without them is lost when the work is
    /// done.
    #[inline]
    pub fn fits(self, frame: &[u8]) -> bool {
        match self.0 {
            Work::Nothing => true,
            Work::Checksum => is_whole(frame),
            Work::Segment(_) => can_segment(frame),
        }
    }

    /// Returns the offset in the frame of the first byte that the missing checksum covers, and the offset of the
    /// checksum. `None` if none is missing, or the frame has no field for it.
    #[inline]
    pub fn missing_checksum(self, frame: &[u8]) -> Option<(u16, u16)> {
        Covered::of(frame).filter(|_| !self.is_none())?.offsets()
    }

    /// Returns the data bytes of each segment, if the frame must be segmented.
    #[inline]
    pub const fn mss(self) -> Option<NonZeroU16> {
        match self.0 {
            Work::Segment(mss) => Some(mss),
            Work::Nothing | Work::Checksum => None,
        }
    }

    /// Returns the maximum length in bytes of the frames that result from the work.
    #[inline]
    pub fn longest(self, frame: &[u8]) -> usize {
        let headers = self.mss().and_then(|mss| Some((Headers::of(frame)?.len, usize::from(mss.get()))));
        headers.map_or(frame.len(), |(headers, mss)| frame.len().min(headers.saturating_add(mss)))
    }

    /// Does the work: calls `take` with each resulting frame in its form on the wire, built in the reusable buffer
    /// `room`. Returns `false` if the frame does not [fit](Self::fits).
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
                let done = Covered::of(frame).and_then(|covered| covered.complete(room)).is_some();
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

/// Returns `true` for an unfragmented TCP segment or UDP datagram whose lengths all agree.
#[inline]
pub fn is_whole(frame: &[u8]) -> bool {
    Covered::of(frame).is_some()
}

/// Returns `true` if a frame can be segmented. Both parsers must find the same TCP header, because [`Headers`] accepts
/// fragments, and [`Covered`] accepts frames that `Headers` cannot rewrite.
#[inline]
fn can_segment(frame: &[u8]) -> bool {
    let Some((headers, covered)) = Headers::of(frame).zip(Covered::of(frame)) else { return false };
    let is_same = headers.is_tcp() && headers.transport == covered.start;
    // Bytes after the IP packet (padding) would become data of the last segment.
    is_same && headers.len < frame.len() && covered.end == frame.len()
}
