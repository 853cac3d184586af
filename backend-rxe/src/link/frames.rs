//! A batch of frames in one buffer.

/// Frames, one after the other in a buffer that is used again.
#[derive(Clone, Debug, Default)]
pub struct Frames {
    /// Longer than what is in use: growing it writes zeros, which would cost more than the frames.
    octets: Vec<u8>,
    ends: Vec<usize>,
}

impl Frames {
    /// How many there are.
    pub const fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is none.
    pub const fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Octets in all frames.
    pub fn octets(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// One frame.
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        let end = *self.ends.get(index)?;
        let start = index.checked_sub(1).map_or(Some(0), |before| self.ends.get(before).copied())?;
        self.octets.get(start..end)
    }

    /// All frames from `from` on.
    pub fn iter_from(&self, from: usize) -> impl Iterator<Item = &[u8]> {
        (from..self.len()).map_while(|index| self.get(index))
    }

    /// All frames.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.iter_from(0)
    }

    /// Appends a frame.
    pub fn push(&mut self, frame: &[u8]) {
        self.push_with(frame.len(), |room| {
            room.copy_from_slice(frame);
            Some(frame.len())
        });
    }

    /// Appends the frame that `fill` writes into a buffer of `room` octets; it gives the length, or `None` for no frame.
    /// Says whether there was one.
    pub fn push_with(&mut self, room: usize, fill: impl FnOnce(&mut [u8]) -> Option<usize>) -> bool {
        let start = self.octets();
        let Some(end) = start.checked_add(room) else { return false };
        if self.octets.len() < end {
            self.octets.resize(end, 0);
        }
        let Some(buffer) = self.octets.get_mut(start..end) else { return false };
        let Some(length) = fill(buffer).filter(|&length| length <= room) else { return false };
        // Not past `end`, which did not overflow.
        self.ends.push(start + length);
        true
    }

    /// Appends frames of another batch.
    pub fn extend_from(&mut self, other: &Self, from: usize) {
        for frame in other.iter_from(from) {
            self.push(frame);
        }
    }

    /// Forgets all frames and keeps the buffer.
    pub fn clear(&mut self) {
        self.ends.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_keep_their_borders() {
        let mut frames = Frames::default();
        assert_eq!((frames.get(0), frames.octets()), (None, 0));
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
        let mut copy = Frames::default();
        copy.extend_from(&frames, 1);
        assert_eq!((copy.len(), copy.get(0)), (2, Some(&b"four"[..])));
        frames.clear();
        assert!(frames.is_empty() && frames.get(0).is_none());
        frames.push(b"x");
        assert_eq!(frames.get(0), Some(&b"x"[..]));
    }
}
