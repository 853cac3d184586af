//! A batch of frames in one buffer.

use std::ops::Range;

use crate::Offload;

/// Batch of frames in a reusable buffer.
#[derive(Clone, Debug, Default)]
pub struct Frames {
    /// Buffer, which may be longer than the part in use. It does not shrink, because growing it again would write
    /// zeros, and that costs more than the frames themselves.
    bytes: Vec<u8>,
    /// Bytes at the beginning of the buffer that are allocated to frames or reservations.
    used: usize,
    /// Positions of the frames, in their order.
    spans: Vec<Span>,
    /// Bytes in all frames.
    total: usize,
    /// Number of frames with an unfinished offload.
    open: usize,
}

/// Position of a frame in the buffer, and its offload.
#[derive(Clone, Debug)]
struct Span {
    bytes: Range<usize>,
    offload: Offload,
}

impl Frames {
    /// Number of frames.
    #[inline]
    pub const fn len(&self) -> usize {
        self.spans.len()
    }

    /// Returns `true` if there is no frame.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// Bytes of all frames together.
    #[inline]
    pub const fn bytes(&self) -> usize {
        self.total
    }

    /// Size of the buffer, in bytes.
    #[inline]
    pub const fn capacity(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the number of reserved bytes of the buffer, including those of frames.
    #[inline]
    pub const fn reserved(&self) -> usize {
        self.used
    }

    /// Returns the frame at an index.
    #[inline]
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        self.bytes.get(self.spans.get(index)?.bytes.clone())
    }

    /// Returns the unfinished offload of a frame.
    #[inline]
    pub fn offload(&self, index: usize) -> Offload {
        self.spans.get(index).map_or(Offload::NONE, |span| span.offload)
    }

    /// Returns `true` if a frame has an unfinished offload.
    #[inline]
    pub const fn has_offloads(&self) -> bool {
        self.open > 0
    }

    /// Iterates over the frames from `from` on, with their offloads.
    #[inline]
    pub fn iter_with_offloads(&self, from: usize) -> impl Iterator<Item = (&[u8], Offload)> {
        (from..self.len()).map_while(|index| Some((self.get(index)?, self.offload(index))))
    }

    /// Iterates over the frames from `from` on.
    #[inline]
    pub fn iter_from(&self, from: usize) -> impl Iterator<Item = &[u8]> {
        (from..self.len()).map_while(|index| self.get(index))
    }

    /// Iterates over all frames.
    #[inline]
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.iter_from(0)
    }

    /// Appends a frame.
    #[inline]
    pub fn push(&mut self, frame: &[u8]) {
        self.push_with(frame.len(), |room| {
            room.copy_from_slice(frame);
            Some(frame.len())
        });
    }

    /// Appends a frame with an unfinished offload.
    #[inline]
    pub fn push_with_offload(&mut self, frame: &[u8], offload: Offload) {
        self.push(frame);
        self.leave(offload);
    }

    /// Sets the unfinished offload of the last frame.
    #[inline]
    pub fn leave(&mut self, offload: Offload) {
        if let Some(last) = self.spans.last_mut().filter(|last| last.offload != offload) {
            self.open = self.open.saturating_sub(usize::from(!last.offload.is_none()));
            self.open = self.open.saturating_add(usize::from(!offload.is_none()));
            last.offload = offload;
        }
    }

    /// Appends the frame that `fill` writes into a buffer of `room` bytes. `fill` returns the length of the frame, or
    /// `None` for no frame. Returns `true` if a frame was appended.
    #[inline]
    pub fn push_with(&mut self, room: usize, fill: impl FnOnce(&mut [u8]) -> Option<usize>) -> bool {
        let span = self.reserve(room);
        let start = span.start;
        let length = fill(self.room(span)).filter(|&length| length <= room);
        // Room that the frame does not need is available to the next frame.
        self.used = start.saturating_add(length.unwrap_or(0));
        length.is_some_and(|length| self.mark(start..start.saturating_add(length)))
    }

    /// Reserves `length` bytes, in which the caller can assemble frames.
    #[inline]
    pub fn reserve(&mut self, length: usize) -> Range<usize> {
        let (start, end) = (self.used, self.used.saturating_add(length));
        if self.bytes.len() < end {
            // A new zeroed allocation is cheaper than growing in place: the allocator maps zero pages, which cost
            // nothing until they are written.
            let mut bytes = vec![0; end.max(self.bytes.len().saturating_mul(2))];
            if let (Some(to), Some(from)) = (bytes.get_mut(..start), self.bytes.get(..start)) {
                to.copy_from_slice(from);
            }
            self.bytes = bytes;
        }
        self.used = end;
        start..end
    }

    /// Returns the bytes of a reservation.
    #[inline]
    pub fn room(&mut self, span: Range<usize>) -> &mut [u8] {
        self.bytes.get_mut(span).unwrap_or_default()
    }

    /// Releases the last reservation, if it contains no frame.
    #[inline]
    pub fn release(&mut self, span: Range<usize>) {
        if span.end == self.used && self.spans.last().is_none_or(|last| last.bytes.end <= span.start) {
            self.used = span.start.min(self.used);
        }
    }

    /// Appends the reserved bytes at `span` as a frame. Returns `false`, and appends nothing, if these bytes are not
    /// reserved.
    #[inline]
    pub fn mark(&mut self, span: Range<usize>) -> bool {
        let inside = span.start <= span.end && span.end <= self.used;
        if inside {
            self.total = self.total.saturating_add(span.len());
            self.spans.push(Span { bytes: span, offload: Offload::NONE });
        }
        inside
    }

    /// Drops the frames from index `from` on that `keep` rejects. Returns the number dropped.
    #[inline]
    pub fn retain_from(&mut self, from: usize, mut keep: impl FnMut(&[u8]) -> bool) -> usize {
        let (before, bytes, total, open) = (self.spans.len(), &self.bytes, &mut self.total, &mut self.open);
        let mut index = 0;
        self.spans.retain(|span| {
            index += 1;
            let kept = index <= from || bytes.get(span.bytes.clone()).is_some_and(&mut keep);
            if !kept {
                *total = total.saturating_sub(span.bytes.len());
                *open = open.saturating_sub(usize::from(!span.offload.is_none()));
            }
            kept
        });
        before.saturating_sub(self.spans.len())
    }

    /// Removes a frame and returns a copy of it.
    #[cfg(any(test, feature = "fault"))]
    pub(crate) fn take_out(&mut self, index: usize) -> Option<Vec<u8>> {
        let frame = self.get(index)?.to_vec();
        let span = self.spans.remove(index);
        self.total = self.total.saturating_sub(span.bytes.len());
        self.open = self.open.saturating_sub(usize::from(!span.offload.is_none()));
        Some(frame)
    }

    /// Moves a frame behind the later frame at `to`.
    #[cfg(any(test, feature = "fault"))]
    pub(crate) fn put_behind(&mut self, index: usize, to: usize) {
        if let Some(spans) = self.spans.get_mut(index..=to) {
            spans.rotate_left(1);
        }
    }

    /// Moves a frame in front of the earlier frame at `to`.
    #[cfg(any(test, feature = "fault"))]
    pub(crate) fn put_before(&mut self, index: usize, to: usize) {
        if let Some(spans) = self.spans.get_mut(to..=index) {
            spans.rotate_right(1);
        }
    }

    /// Removes all frames and keeps the buffer.
    #[inline]
    pub fn clear(&mut self) {
        self.spans.clear();
        (self.used, self.total, self.open) = (0, 0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offload::sample::{long_tcp, open_checksum};

    #[test]
    fn frames_keep_their_borders() {
        let mut frames = Frames::default();
        assert_eq!((frames.get(0), frames.bytes()), (None, 0));
        frames.push(b"one");
        assert!(!frames.push_with(100, |_| None));
        assert!(!frames.push_with(2, |_| Some(3)), "a frame longer than its room is refused");
        assert!(frames.push_with(100, |room| {
            room[..4].copy_from_slice(b"four");
            Some(4)
        }));
        frames.push(b"");
        assert_eq!(frames.iter().collect::<Vec<_>>(), [&b"one"[..], b"four", b""]);
        assert_eq!(frames.iter_from(1).next(), Some(&b"four"[..]));
        let mut copy = frames.clone();
        assert_eq!(copy.retain_from(0, |frame| frame != b"one"), 1);
        assert_eq!((copy.len(), copy.get(0)), (2, Some(&b"four"[..])));
        assert_eq!(copy.retain_from(1, |_| false), 1);
        assert_eq!(copy.retain_from(0, |frame| frame == b"four"), 0);
        assert_eq!((copy.len(), copy.bytes()), (1, 4));
        frames.clear();
        assert!(frames.is_empty() && frames.get(0).is_none());
        frames.push(b"x");
        assert_eq!(frames.get(0), Some(&b"x"[..]));
        let span = frames.reserve(8);
        frames.room(span.clone()).copy_from_slice(b"two+one.");
        assert!(frames.mark(span.start + 4..span.start + 7) && frames.mark(span.start..span.start + 3));
        assert!(!frames.mark(span.start..span.end + 1), "not set aside");
        let (before, spare) = (frames.reserved(), frames.reserve(100));
        frames.release(spare.start..spare.end - 1);
        assert_eq!(frames.reserved(), before + 100, "not all of it");
        frames.release(spare);
        frames.release(span.clone());
        assert_eq!(frames.reserved(), before, "there are frames in it");
        assert_eq!(frames.iter_from(1).collect::<Vec<_>>(), [&b"one"[..], b"two"]);
        assert_eq!(frames.bytes(), 7);
    }
    #[test]
    fn pending_offloads_stay_with_their_frame() {
        let (tcp, segmentation) = long_tcp([2; 6], [4; 6], b"data", 2);
        let (checksum, none) = (open_checksum(&tcp), Offload::NONE);
        let mut frames = Frames::default();
        frames.push(b"plain");
        frames.leave(none);
        assert!(!frames.has_offloads());
        frames.push_with_offload(b"open", checksum);
        frames.push(b"plain");
        frames.leave(segmentation);
        frames.push(b"last");
        let offloads = |frames: &Frames| frames.iter_with_offloads(0).map(|(_, offload)| offload).collect::<Vec<_>>();
        assert_eq!(offloads(&frames), [none, checksum, segmentation, none]);
        assert_eq!(frames.retain_from(0, |frame| frame != b"plain"), 2);
        assert_eq!((offloads(&frames), frames.has_offloads()), (vec![checksum, none], true));
        assert_eq!((frames.retain_from(0, |frame| frame != b"open"), frames.has_offloads()), (1, false));
        frames.push_with_offload(b"open", checksum);
        frames.clear();
        frames.push(b"plain");
        assert!(!frames.has_offloads() && frames.offload(0).is_none() && frames.offload(9).is_none());
    }
}
