//! Records: kinds, and the frame of a record.

/// Maximum length of a record's body in bytes.
pub const MAX_RECORD: usize = 64 << 10;

/// Bytes before the body of a record.
pub(crate) const FRAME: usize = 8;

/// Kind of the end record.
pub(crate) const END: u16 = 0;

/// First bytes of a stream.
pub(crate) const MAGIC: [u8; 8] = *b"PVRDMA\x01\x00";

/// A message that is the body of a record.
///
/// Each module of messages assigns kinds of its own range with the macro `records`.
pub trait Record: prost::Message + Default {
    /// Kind of the record.
    const KIND: u16;
}

/// Body of the end record.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct EndMessage {
    #[prost(uint64, tag = "1")]
    pub(crate) records: u64,
    #[prost(fixed32, tag = "2")]
    pub(crate) crc: u32,
}

/// Assigns kinds to the messages of a module: implements [`Record`], and lists the kinds with the names of the messages
/// in `RECORDS`.
macro_rules! records {
    ($($kind:literal => $message:ident),* $(,)?) => {
        $(impl $crate::Record for $message {
            const KIND: u16 = $kind;
        })*

        /// Kinds of the records of this module, with the names of their messages.
        pub const RECORDS: &[(u16, &str)] = &[$(($kind, stringify!($message))),*];
    };
}
pub(crate) use records;
