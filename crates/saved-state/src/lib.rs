//! The format in which a device is saved, for a hand-over to another process, a snapshot, or a migration.
//!
//! A saved state is a stream:
//!
//! ```text
//! stream: "PVRDMA" 0x01 0x00 | u32 length | header | record* | end record
//! record: u16 kind | u16 0 | u32 length | body        (little endian, a body has at most 64 KiB)
//! ```
//!
//! The header and each body are Protobuf messages. The end record has kind 0, the number of records, and the CRC-32 of
//! all bytes before it. [`Writer`] and [`Reader`] hold one record at a time.
//!
//! The messages are in a module for each owner. Those of the functions, [`pvrdma`] and [`vmxnet3`], are records; those
//! of adapters and transports, [`rxe`] and [`roce`], are parts of them, and [`pages`] and [`work`] are parts of those.
//! They are types of their own and contain no product type, so that a change of the product does not change the format.
//! A message is public data without invariants: the owner that restores it checks each value as it would check a
//! guest's.
//!
//! # Compatibility
//!
//! A release reads the states of the release before it, and of the release after it:
//!
//! * A new field gets a new number, and its default value (0, empty) means that the device behaves as before the field
//!   existed. Readers skip fields, and records of a kind, that they do not know.
//! * A state that an older reader would restore wrongly names a feature in [`Header::needs`], only while the feature is
//!   in use. A reader that does not know the name refuses the state and reports the name. [`FEATURES`] lists the names.
//! * The number of a removed field or kind is never used again: it moves to the list in `reserved.rs`.
//!
//! A field that has an enumeration's type is read with `try_from`: the accessor that `prost` generates returns the
//! default for an unknown number.
//!
//! A saved state contains keys and PSNs, which peers must not learn.
//!
//! # Features
//!
//! `stream` has everything above. Without it, the crate consists of the messages of the network function
//! ([`vmxnet3`]) as plain types, for a VMM that saves that function in a format of its own.
//!
//! # Example
//!
//! ```
//! use pvrdma_saved_state::{DeviceKind, Header, Reader, Writer, pvrdma};
//!
//! let header = Header { name: "vm1".to_owned(), ..Header::new(DeviceKind::Pvrdma, [2, 0, 0, 0, 0, 1]) };
//! let mut stream = Vec::new();
//! let mut writer = Writer::new(&mut stream, &header, 1 << 20)?;
//! writer.write(&pvrdma::Pd { handle: 7, owner: 1 })?;
//! writer.finish()?;
//!
//! let mut input = stream.as_slice();
//! let mut reader = Reader::new(&mut input, 1 << 20)?;
//! assert_eq!(reader.header().name, "vm1");
//! while let Some(record) = reader.next()? {
//!     assert_eq!(record.decode::<pvrdma::Pd>()?.handle, 7);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#[cfg(feature = "stream")]
mod stream;

#[cfg(feature = "stream")]
pub mod pages;
#[cfg(feature = "stream")]
pub mod pvrdma;
#[cfg(feature = "stream")]
pub mod roce;
#[cfg(feature = "stream")]
pub mod rxe;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod vmxnet3;
#[cfg(feature = "stream")]
pub mod work;

/// Encoding and decoding of messages that are no records, as parts of others.
#[cfg(feature = "stream")]
pub use prost::{DecodeError, Message};
#[cfg(feature = "stream")]
pub use stream::{
    DeviceKind, FEATURES, Header, LoadError, MAX_RECORD, Part, RawRecord, Reader, Record, SaveError, Writer,
    decoded_bytes, kind_name,
};
