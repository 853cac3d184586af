//! Streams of records: their frame, header and checksum, and the kinds of all messages.

mod error;
mod header;
mod kinds;
mod reader;
mod record;
mod weight;
mod writer;

#[cfg(test)]
mod next;
#[cfg(test)]
mod reserved;

pub use error::{LoadError, SaveError};
pub use header::{DeviceKind, FEATURES, Header};
pub use kinds::kind_name;
pub use reader::{RawRecord, Reader};
pub(crate) use record::records;
pub use record::{MAX_RECORD, Record};
pub use weight::{Part, decoded_bytes};
pub use writer::Writer;
