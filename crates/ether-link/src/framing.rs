//! Framing in a byte stream: each frame is preceded by its length, four bytes in network order.

use pvrdma_link::MAX_LINK_FRAME;

/// Bytes of the length.
pub(crate) const PREFIX: usize = 4;

/// Error: the length is not that of a frame, so the other end does not use this protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct NoFrame;

/// Extracts frames from a stream.
#[derive(Debug)]
pub(crate) struct Deframer {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
}

impl Deframer {
    /// Creates a deframer that has room for `chunk` bytes whenever it contains no complete frame.
    pub(crate) fn new(chunk: usize) -> Self {
        Self { buffer: vec![0; chunk.saturating_add(PREFIX + MAX_LINK_FRAME)], start: 0, end: 0 }
    }

    /// Returns the next frame, if it is complete.
    ///
    /// # Errors
    /// The buffered data are not a frame.
    pub(crate) fn frame(&mut self) -> Result<Option<&[u8]>, NoFrame> {
        let held = self.buffer.get(self.start..self.end).ok_or(NoFrame)?;
        let Some((prefix, rest)) = held.split_first_chunk::<PREFIX>() else { return Ok(None) };
        let length = usize::try_from(u32::from_be_bytes(*prefix)).map_err(|_| NoFrame)?;
        if length > MAX_LINK_FRAME {
            return Err(NoFrame);
        }
        let Some(frame) = rest.get(..length) else { return Ok(None) };
        self.start = self.start.saturating_add(PREFIX + length);
        Ok(Some(frame))
    }

    /// Returns `true` if [`Self::frame`] would return a frame or an error.
    pub(crate) fn has_frame(&mut self) -> bool {
        let start = self.start;
        let said = !matches!(self.frame(), Ok(None));
        self.start = start;
        said
    }

    /// Returns the free part of the buffer, in which received bytes are stored.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end.saturating_sub(self.start));
        }
        self.buffer.get_mut(self.end..).unwrap_or_default()
    }

    /// Records that `count` bytes were stored there.
    pub(crate) fn filled(&mut self, count: usize) {
        self.end = self.end.saturating_add(count).min(self.buffer.len());
    }
}

/// Appends a frame with its length.
///
/// # Errors
/// The frame is too long.
pub(crate) fn put(frame: &[u8], to: &mut Vec<u8>) -> Result<(), NoFrame> {
    let length = u32::try_from(frame.len()).ok().filter(|_| frame.len() <= MAX_LINK_FRAME).ok_or(NoFrame)?;
    to.extend_from_slice(&length.to_be_bytes());
    to.extend_from_slice(frame);
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CHUNK: usize = 4096;

    /// Passes the data to a deframer as far as it has room, repeating pieces of these lengths, and returns all frames.
    fn split(bytes: &[u8], pieces: &[usize]) -> Result<Vec<Vec<u8>>, NoFrame> {
        let (mut deframer, mut frames, mut left) = (Deframer::new(CHUNK), Vec::new(), bytes);
        for piece in pieces.iter().cycle() {
            while let Some(frame) = deframer.frame()? {
                frames.push(frame.to_vec());
            }
            if left.is_empty() {
                return Ok(frames);
            }
            assert!(!deframer.has_frame());
            let room = deframer.room();
            assert!(room.len() >= CHUNK, "{}", room.len());
            let now;
            (now, left) = left.split_at((*piece).min(CHUNK).min(left.len()));
            room[..now.len()].copy_from_slice(now);
            deframer.filled(now.len());
        }
        unreachable!("pieces go on")
    }

    #[test]
    fn frames_of_every_length() {
        for length in (0..=2048).chain(MAX_LINK_FRAME - 2..=MAX_LINK_FRAME) {
            let (frame, mut bytes) = (vec![length.to_le_bytes()[0]; length], Vec::new());
            put(&frame, &mut bytes).unwrap();
            put(b"next", &mut bytes).unwrap();
            assert_eq!(split(&bytes, &[CHUNK]), Ok(vec![frame, b"next".to_vec()]), "{length}");
        }
    }

    #[test]
    fn a_stream_may_be_split_anywhere() {
        let mut bytes = Vec::new();
        for frame in [&b""[..], b"1", b"two", b"", b"three"] {
            put(frame, &mut bytes).unwrap();
        }
        let whole = split(&bytes, &[CHUNK]).unwrap();
        assert_eq!(whole.len(), 5);
        for first in 1..bytes.len() {
            for second in 1..=bytes.len() - first {
                let last = bytes.len() - first - second;
                let pieces = [first, second, last.max(1)];
                assert_eq!(split(&bytes, &pieces).as_ref(), Ok(&whole), "{pieces:?}");
            }
        }
    }

    #[test]
    fn a_length_that_no_frame_has() {
        for length in [u32::try_from(MAX_LINK_FRAME).unwrap() + 1, 1 << 24, u32::MAX] {
            let mut bytes = Vec::new();
            put(b"before", &mut bytes).unwrap();
            bytes.extend_from_slice(&length.to_be_bytes());
            let mut deframer = Deframer::new(CHUNK);
            deframer.room()[..bytes.len()].copy_from_slice(&bytes);
            deframer.filled(bytes.len());
            assert_eq!(deframer.frame(), Ok(Some(&b"before"[..])));
            assert!(deframer.has_frame(), "the deframer has a frame");
            assert_eq!(deframer.frame(), Err(NoFrame));
            assert_eq!(deframer.frame(), Err(NoFrame), "still");
        }
        let mut none = Vec::new();
        assert_eq!(put(&vec![0; MAX_LINK_FRAME + 1], &mut none), Err(NoFrame));
        assert!(none.is_empty());
    }

    proptest! {
        #[test]
        fn frames_are_unchanged(
            frames in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..90), 0..9),
            pieces in proptest::collection::vec(1..200_usize, 1..9),
        ) {
            let mut bytes = Vec::new();
            for frame in &frames {
                put(frame, &mut bytes).unwrap();
            }
            prop_assert_eq!(split(&bytes, &pieces), Ok(frames));
        }
    }
}
