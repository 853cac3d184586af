//! Writing a saved state.

use std::fmt;
use std::io::Write;

use prost::Message;

use super::record::{END, EndMessage, FRAME, MAGIC};
use crate::{Header, MAX_RECORD, Record, SaveError};

/// Writes a saved state, record by record.
///
/// Each record is one `write_all` on the output. A writer that is dropped without [`Self::finish`] leaves a stream that
/// every reader refuses.
pub struct Writer<'a> {
    out: &'a mut dyn Write,
    limit: u64,
    written: u64,
    records: u64,
    crc: crc32fast::Hasher,
    /// Bytes of the record, reused.
    buffer: Vec<u8>,
}

impl fmt::Debug for Writer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { out: _, limit, written, records, crc: _, buffer: _ } = self;
        let mut debug = f.debug_struct("Writer");
        debug.field("limit", limit).field("written", written).field("records", records).finish_non_exhaustive()
    }
}

impl<'a> Writer<'a> {
    /// Begins a stream of at most `limit` bytes, and writes its header.
    ///
    /// # Errors
    /// The output fails, or the header is too long.
    pub fn new(out: &'a mut dyn Write, header: &Header, limit: u64) -> Result<Self, SaveError> {
        let crc = crc32fast::Hasher::new();
        let mut writer = Self { out, limit, written: 0, records: 0, crc, buffer: Vec::new() };
        let message = header.to_message();
        let length = checked_length(END, message.encoded_len())?;
        writer.buffer.extend_from_slice(&MAGIC);
        writer.buffer.extend_from_slice(&length.to_le_bytes());
        message.encode_raw(&mut writer.buffer);
        writer.send()?;
        Ok(writer)
    }

    /// Writes a record.
    ///
    /// # Errors
    /// The output fails, the record is too long, or the stream would have more bytes than allowed.
    pub fn write<R: Record>(&mut self, message: &R) -> Result<(), SaveError> {
        self.frame(R::KIND, message)?;
        self.records += 1;
        Ok(())
    }

    /// Writes a record of any kind and content.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn write_raw(&mut self, kind: u16, body: &[u8]) -> Result<(), SaveError> {
        let length = checked_length(kind, body.len())?;
        self.buffer.extend_from_slice(&kind.to_le_bytes());
        self.buffer.extend_from_slice(&[0; 2]);
        self.buffer.extend_from_slice(&length.to_le_bytes());
        self.buffer.extend_from_slice(body);
        self.send()?;
        self.records += 1;
        Ok(())
    }

    /// Writes the end record.
    ///
    /// # Errors
    /// The output fails, or the stream would have more bytes than allowed.
    pub fn finish(mut self) -> Result<(), SaveError> {
        let crc = self.crc.clone().finalize();
        self.frame(END, &EndMessage { records: self.records, crc })?;
        Ok(self.out.flush()?)
    }

    /// Bytes written so far.
    pub const fn written(&self) -> u64 {
        self.written
    }

    fn frame(&mut self, kind: u16, message: &impl Message) -> Result<(), SaveError> {
        let length = checked_length(kind, message.encoded_len())?;
        self.buffer.reserve(FRAME);
        self.buffer.extend_from_slice(&kind.to_le_bytes());
        self.buffer.extend_from_slice(&[0; 2]);
        self.buffer.extend_from_slice(&length.to_le_bytes());
        message.encode_raw(&mut self.buffer);
        self.send()
    }

    /// Writes the buffer, and empties it.
    fn send(&mut self) -> Result<(), SaveError> {
        let written = self.written.saturating_add(self.buffer.len() as u64);
        let result = if written > self.limit {
            Err(SaveError::TooLong { limit: self.limit })
        } else {
            self.out.write_all(&self.buffer).map_err(SaveError::Io)
        };
        self.crc.update(&self.buffer);
        self.buffer.clear();
        self.written = written;
        result
    }
}

fn checked_length(kind: u16, length: usize) -> Result<u32, SaveError> {
    let short = u32::try_from(length).ok().filter(|_| length <= MAX_RECORD);
    short.ok_or(SaveError::RecordTooLong { kind, length })
}
