//! A batch of frames in one buffer.

use std::ops::Range;

/// Frames in a buffer that is used again.
#[derive(Clone, Debug, Default)]
pub struct Frames {
    /// Longer than what is in use: growing it writes zeros, which would cost more than the frames.
    bytes: Vec<u8>,
    /// Bytes that are given out.
    used: usize,
    /// Where the frames are, in their order.
    spans: Vec<Range<usize>>,
    /// Bytes in all frames.
    total: usize,
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

    /// One frame.
    #[inline]
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        self.bytes.get(self.spans.get(index)?.clone())
    }

    /// All frames from `from` on.
    #[inline]
    pub fn iter_from(&self, from: usize) -> impl Iterator<Item = &[u8]> {
        (from..self.len()).map_while(|index| self.get(index))
    }

    /// All frames.
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

    /// Appends the frame that `fill` writes into a buffer of `room` bytes; `fill` returns its length, or `None` for no
    /// frame. Returns `true` if there was one.
    #[inline]
    pub fn push_with(&mut self, room: usize, fill: impl FnOnce(&mut [u8]) -> Option<usize>) -> bool {
        let span = self.reserve(room);
        let start = span.start;
        let length = fill(self.room(span)).filter(|&length| length <= room);
        // What the frame does not need is for the next.
        self.used = start.saturating_add(length.unwrap_or(0));
        length.is_some_and(|length| self.mark(start..start.saturating_add(length)))
    }

    /// Sets `length` bytes aside, in which frames can be put together.
    #[inline]
    pub fn reserve(&mut self, length: usize) -> Range<usize> {
        let (start, end) = (self.used, self.used.saturating_add(length));
        if self.bytes.len() < end {
            // Zeros that were never written cost nothing until they are.
            let mut bytes = vec![0; end.max(self.bytes.len().saturating_mul(2))];
            if let (Some(to), Some(from)) = (bytes.get_mut(..start), self.bytes.get(..start)) {
                to.copy_from_slice(from);
            }
            self.bytes = bytes;
        }
        self.used = end;
        start..end
    }

    /// Bytes that were set aside.
    #[inline]
    pub fn room(&mut self, span: Range<usize>) -> &mut [u8] {
        self.bytes.get_mut(span).unwrap_or_default()
    }

    /// Appends a frame that lies in bytes that were set aside. Returns `true` if it does.
    #[inline]
    pub fn mark(&mut self, span: Range<usize>) -> bool {
        let inside = span.start <= span.end && span.end <= self.used;
        if inside {
            self.total = self.total.saturating_add(span.len());
            self.spans.push(span);
        }
        inside
    }

    /// Drops frames from index `from` on that `keep` does not want. Returns how many.
    #[inline]
    pub fn retain_from(&mut self, from: usize, mut keep: impl FnMut(&[u8]) -> bool) -> usize {
        let (before, bytes, total) = (self.spans.len(), &self.bytes, &mut self.total);
        let mut index = 0;
        self.spans.retain(|span| {
            index += 1;
            let kept = index <= from || bytes.get(span.clone()).is_some_and(&mut keep);
            *total = total.saturating_sub(if kept { 0 } else { span.len() });
            kept
        });
        before.saturating_sub(self.spans.len())
    }

    /// Forgets all frames and keeps the buffer.
    #[inline]
    pub fn clear(&mut self) {
        self.spans.clear();
        (self.used, self.total) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_keep_their_borders() {
        let mut frames = Frames::default();
        assert_eq!((frames.get(0), frames.bytes()), (None, 0));
        frames.push(b"one");
        assert!(!frames.push_with(100, |_| None));
        assert!(!frames.push_with(2, |_| Some(3)), "longer than its room");
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
        assert_eq!(frames.iter_from(1).collect::<Vec<_>>(), [&b"one"[..], b"two"]);
        assert_eq!(frames.bytes(), 7);
    }
}
