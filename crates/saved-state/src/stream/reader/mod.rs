//! Reading a saved state.

use std::fmt;
use std::io::Read;

use prost::Message;

use crate::stream::header::HeaderMessage;
use crate::stream::kinds::is_known;
use crate::stream::record::{END, EndMessage, FRAME, MAGIC};
use crate::{FEATURES, Header, LoadError, MAX_RECORD, Record};

/// Reads a saved state, record by record.
///
/// The stream may come from anywhere: everything malformed is refused, and at most one record is in memory. The records
/// before a malformed one have been returned already, so that the caller must be able to undo their effect. A message
/// may take more memory than its record has bytes; [`MAX_RECORD`] bounds it.
pub struct Reader<'a> {
    input: &'a mut dyn Read,
    limit: u64,
    header: Header,
    read: u64,
    records: u64,
    crc: crc32fast::Hasher,
    /// The body of the current record.
    body: Vec<u8>,
    /// The end record was read.
    ended: bool,
}

/// A record as it was read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RawRecord<'a> {
    /// Kind of the record.
    pub kind: u16,
    /// The encoded message.
    pub body: &'a [u8],
}

/// Hides the body, which may contain keys.
impl fmt::Debug for RawRecord<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RawRecord {{ kind: {:#06x}, {} bytes }}", self.kind, self.body.len())
    }
}

impl RawRecord<'_> {
    /// Decodes the message.
    ///
    /// # Errors
    /// The record has another kind, or its body is malformed.
    pub fn decode<R: Record>(&self) -> Result<R, LoadError> {
        if self.kind != R::KIND {
            return Err(LoadError::Unexpected { found: self.kind, expected: R::KIND });
        }
        decode(self.kind, self.body)
    }
}

impl fmt::Debug for Reader<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { input: _, limit, header, read, records, crc: _, body: _, ended } = self;
        let mut debug = f.debug_struct("Reader");
        debug.field("limit", limit).field("header", header).field("read", read).field("records", records);
        debug.field("ended", ended).finish_non_exhaustive()
    }
}

impl<'a> Reader<'a> {
    /// Reads the header of a stream of at most `limit` bytes.
    ///
    /// # Errors
    /// The input fails, or it is no saved state that this release can restore.
    pub fn new(input: &'a mut dyn Read, limit: u64) -> Result<Self, LoadError> {
        Self::with_features(input, limit, FEATURES)
    }

    pub(crate) fn with_features(input: &'a mut dyn Read, limit: u64, features: &[&str]) -> Result<Self, LoadError> {
        let mut source = Source { input, limit, read: 0 };
        let mut start = [0; MAGIC.len() + 4];
        source.fill(&mut start)?;
        let ([magic @ .., a, b, c, d], mut crc) = (start, crc32fast::Hasher::new());
        if magic != MAGIC {
            return Err(LoadError::NotSavedState);
        }
        let mut body = Vec::new();
        source.take(END, u32::from_le_bytes([a, b, c, d]), &mut body)?;
        crc.update(&start);
        crc.update(&body);
        let header = Header::from_message(decode::<HeaderMessage>(END, &body)?, features)?;
        let Source { input, limit, read } = source;
        Ok(Self { input, limit, header, read, records: 0, crc, body, ended: false })
    }

    /// The header of the stream.
    pub const fn header(&self) -> &Header {
        &self.header
    }

    /// Bytes read so far.
    pub const fn bytes(&self) -> u64 {
        self.read
    }

    /// Reads the next record of a known kind. Returns `None` after the last one, when the number of records and the
    /// checksum have been found to be right. Nothing is read beyond the end record.
    ///
    /// # Errors
    /// The input fails, or the stream is malformed.
    #[expect(clippy::should_implement_trait, reason = "an iterator cannot lend its items")]
    pub fn next(&mut self) -> Result<Option<RawRecord<'_>>, LoadError> {
        while !self.ended {
            let kind = self.read_record()?;
            if is_known(kind) {
                return Ok(Some(RawRecord { kind, body: &self.body }));
            }
        }
        Ok(None)
    }

    /// Reads the next record of a known kind, which must be of this type.
    ///
    /// # Errors
    /// As [`Self::next`], and the record is of another kind or malformed.
    pub fn expect<R: Record>(&mut self) -> Result<R, LoadError> {
        match self.next()? {
            Some(record) => record.decode(),
            None => Err(LoadError::Unexpected { found: END, expected: R::KIND }),
        }
    }

    /// Reads a record of any kind into the buffer, and checks the end record.
    fn read_record(&mut self) -> Result<u16, LoadError> {
        let Self { input, limit, read, body, .. } = self;
        let mut source = Source { input: &mut **input, limit: *limit, read: *read };
        let mut frame = [0; FRAME];
        source.fill(&mut frame)?;
        let [k, l, zeros @ .., a, b, c, d] = frame;
        let (kind, length) = (u16::from_le_bytes([k, l]), u32::from_le_bytes([a, b, c, d]));
        if zeros != [0; 2] {
            return Err(LoadError::RecordHeader { kind });
        }
        source.take(kind, length, body)?;
        *read = source.read;
        if kind == END {
            self.check_end()?;
            self.ended = true;
        } else {
            self.crc.update(&frame);
            self.crc.update(&self.body);
            self.records += 1;
        }
        Ok(kind)
    }

    fn check_end(&self) -> Result<(), LoadError> {
        let EndMessage { records, crc } = decode(END, &self.body)?;
        if records != self.records {
            return Err(LoadError::Records { found: self.records, expected: records });
        }
        if crc != self.crc.clone().finalize() {
            return Err(LoadError::Checksum);
        }
        Ok(())
    }
}

/// The input, with the number of bytes that may come from it.
struct Source<'a> {
    input: &'a mut dyn Read,
    limit: u64,
    read: u64,
}

impl Source<'_> {
    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), LoadError> {
        self.read = self.read.saturating_add(bytes.len() as u64);
        if self.read > self.limit {
            return Err(LoadError::TooLong { limit: self.limit });
        }
        Ok(self.input.read_exact(bytes)?)
    }

    /// Reads a body.
    fn take(&mut self, kind: u16, length: u32, body: &mut Vec<u8>) -> Result<(), LoadError> {
        let bytes = usize::try_from(length).ok().filter(|&bytes| bytes <= MAX_RECORD);
        body.clear();
        body.resize(bytes.ok_or(LoadError::RecordTooLong { kind, length })?, 0);
        self.fill(body)
    }
}

fn decode<M: Message + Default>(kind: u16, body: &[u8]) -> Result<M, LoadError> {
    M::decode(body).map_err(|source| LoadError::Malformed { kind, source })
}

#[cfg(test)]
mod tests;
