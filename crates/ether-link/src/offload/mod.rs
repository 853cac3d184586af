//! What a frame's sender left to be done before it is on a wire: a checksum, and segmentation of TCP.
//!
//! Between guests of one process nobody does it: a long frame is handed over whole, as between two interfaces of one
//! kernel. A [`GsoLink`](crate::GsoLink) does it in front of links that carry frames to a wire.

pub(crate) mod headers;
#[cfg(test)]
pub(crate) mod sample;

use std::num::NonZeroU16;

use headers::{Headers, finish_checksum};

/// What is still to be done to a frame (`virtio_net_hdr` says the same).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Offload {
    checksum: Option<Place>,
    segment: Option<NonZeroU16>,
}

/// Where a checksum is missing. Counted from the beginning of the frame, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Place {
    start: u16,
    at: u16,
}

impl Offload {
    /// Nothing: the frame is as it is on a wire.
    pub const NONE: Self = Self { checksum: None, segment: None };

    /// The sum from byte `start` to the end is to be stored at byte `at`, which holds the sum of the pseudo header.
    pub const fn checksum(start: u16, at: u16) -> Self {
        Self { checksum: Some(Place { start, at }), segment: None }
    }

    /// The TCP frame with such a checksum is to be cut into segments with `mss` bytes of data.
    pub const fn segmentation(start: u16, at: u16, mss: NonZeroU16) -> Self {
        Self { checksum: Some(Place { start, at }), segment: Some(mss) }
    }

    /// Returns `true` if nothing is left to be done.
    pub const fn is_none(self) -> bool {
        self.checksum.is_none() && self.segment.is_none()
    }

    /// Where the bytes begin that the missing checksum covers, and where it belongs, in bytes from the frame's
    /// beginning.
    pub fn missing_checksum(self) -> Option<(u16, u16)> {
        self.checksum.map(|Place { start, at }| (start, at))
    }

    /// Bytes of data in each segment, if the frame is to be cut.
    pub const fn mss(self) -> Option<NonZeroU16> {
        self.segment
    }

    /// The same for a frame that has become so many bytes longer (or shorter) in front of what is summed.
    #[must_use]
    pub fn moved(self, bytes: i16) -> Self {
        let checksum = self.checksum.map(|Place { start, at }| Place {
            start: start.saturating_add_signed(bytes),
            at: at.saturating_add_signed(bytes),
        });
        Self { checksum, ..self }
    }

    /// Returns `true` if [`Self::finish`] can cut the frame. It knows no extension headers of IPv6, and one tag.
    pub fn can_segment(frame: &[u8]) -> bool {
        Headers::of(frame).is_some_and(|headers| headers.is_tcp() && headers.len() < frame.len())
    }

    /// Bytes of the longest frame that it becomes.
    pub fn longest(self, frame: &[u8]) -> usize {
        let headers = self.segment.and_then(|mss| Some((Headers::of(frame)?.len(), usize::from(mss.get()))));
        headers.map_or(frame.len(), |(headers, mss)| frame.len().min(headers.saturating_add(mss)))
    }

    /// Does what is left: gives `take` each frame as it is on a wire, in `room`, which is used again. Returns `false`
    /// if the frame is not what it is said to be.
    pub(crate) fn finish(self, frame: &[u8], room: &mut Vec<u8>, mut take: impl FnMut(&[u8])) -> bool {
        let Some(mss) = self.segment.map(|mss| usize::from(mss.get())) else {
            let Some(Place { start, at }) = self.checksum else {
                take(frame);
                return true;
            };
            room.clear();
            room.extend_from_slice(frame);
            let done = finish_checksum(room, (start.into(), usize::from(at.saturating_sub(start))));
            if done {
                take(room);
            }
            return done;
        };
        let Some(headers) = Headers::of(frame).filter(Headers::is_tcp) else { return false };
        let data = frame.get(headers.len()..).unwrap_or_default();
        let count = data.len().div_ceil(mss);
        for (index, part) in data.chunks(mss).enumerate() {
            room.clear();
            room.resize(headers.len(), 0);
            room.extend_from_slice(part);
            if headers.write(index, mss, index + 1 == count, room).is_none() {
                return false;
            }
            take(room);
        }
        count > 0
    }
}
