//! Bytes of a connection that wait for more bytes, for a receive or for TCP.

use std::time::Duration;

use pvrdma_verbs_types::{RequesterOps, ResponderOps};

use crate::stream::Stream;
use crate::wire::fpdu;

/// Capacity in bytes above which an empty buffer is freed.
const KEPT_CAPACITY: usize = 16 * 1024;

/// The beginning of a frame of the startup or of an FPDU, or an FPDU that waits for a receive.
#[derive(Debug, Default)]
pub(super) struct Partial(Vec<u8>);

impl Partial {
    pub(super) const fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
        if self.0.capacity() > KEPT_CAPACITY {
            self.0 = Vec::new();
        }
    }

    /// Adds bytes of the startup, up to `most` in all, and returns them with those from before.
    pub(super) fn collect(&mut self, bytes: &[u8], most: usize) -> &[u8] {
        let room = most.saturating_sub(self.0.len()).min(bytes.len());
        self.0.extend_from_slice(bytes.get(..room).unwrap_or_default());
        &self.0
    }

    /// Passes bytes to the stream, and keeps an incomplete FPDU and one that waits for a receive. Returns the number of
    /// bytes that were passed or kept. Only FPDUs that arrive in several parts are copied.
    pub(super) fn deliver(
        &mut self,
        stream: &mut Stream,
        now: Duration,
        bytes: &[u8],
        ops: &mut (impl RequesterOps + ResponderOps),
    ) -> usize {
        if stream.end().is_some() {
            self.clear();
            return bytes.len();
        }
        let mut used = 0;
        loop {
            let rest = bytes.get(used..).unwrap_or_default();
            if self.0.is_empty() {
                used = used.saturating_add(stream.receive(now, rest, ops));
            }
            let rest = bytes.get(used..).unwrap_or_default();
            // One FPDU is completed at a time, so that no more than one is kept.
            let added = self.missing(rest).min(rest.len());
            self.0.extend_from_slice(rest.get(..added).unwrap_or_default());
            used = used.saturating_add(added);
            if self.0.is_empty() {
                return used;
            }
            if stream.receive(now, &self.0, ops) > 0 {
                self.clear();
            } else if stream.waits_for_receive() || used >= bytes.len() {
                return used;
            }
        }
    }

    /// Number of bytes that complete the FPDU, as far as the kept bytes and `rest` behind them show it.
    fn missing(&self, rest: &[u8]) -> usize {
        let mut all = self.0.iter().chain(rest);
        let (Some(&high), Some(&low)) = (all.next(), all.next()) else {
            return fpdu::LENGTH_LEN.saturating_sub(self.0.len());
        };
        let length = u16::from_be_bytes([high, low]);
        fpdu::fpdu_len(length.into()).saturating_sub(self.0.len())
    }
}

/// Frames of the startup that TCP has not accepted.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    frames: Vec<u8>,
    written: usize,
    taken: usize,
}

impl Outgoing {
    pub(super) fn push(&mut self, frame: Vec<u8>) {
        self.frames.extend(frame);
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Returns `true` if TCP has accepted everything.
    pub(super) const fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Writes the next bytes.
    pub(super) fn write(&mut self, out: &mut [u8]) -> Option<usize> {
        let rest = self.frames.get(self.written..).filter(|rest| !rest.is_empty())?;
        let length = rest.len().min(out.len());
        out.get_mut(..length)?.copy_from_slice(rest.get(..length)?);
        self.written = self.written.saturating_add(length);
        (length > 0).then_some(length)
    }

    /// Records that TCP has accepted `bytes` bytes. Returns how many of them are behind these frames: bytes of the
    /// stream.
    pub(super) fn taken(&mut self, bytes: usize) -> usize {
        let here = bytes.min(self.written.saturating_sub(self.taken));
        self.taken = self.taken.saturating_add(here);
        if self.taken == self.frames.len() {
            self.clear();
        }
        bytes.saturating_sub(here)
    }
}
