//! Formats of MPA, DDP and RDMAP, as bytes and as values, without I/O or state.
//!
//! | file | format | specification |
//! | --- | --- | --- |
//! | `startup_frame.rs` | request and reply of the MPA startup | RFC 5044 7.1, RFC 6581 6 |
//! | `fpdu.rs` | length, pad and CRC around a DDP segment | RFC 5044 4 |
//! | `segment.rs` | headers of DDP and RDMAP | RFC 5041 4, RFC 5040 4 |
//! | `read_request.rs` | body of an RDMA Read Request | RFC 5040 4.4 |
//! | `terminate.rs` | body of a Terminate | RFC 5040 4.8 |
//! | `cause.rs` | error codes | RFC 5040 4.8, RFC 5041 8.2, RFC 5044 8, RFC 6581 9 |
//!
//! All fields except the CRC are big-endian. Markers are not supported; the startup refuses a peer that requests them.

mod cause;
pub mod fpdu;
mod read_request;
mod segment;
mod startup_frame;
mod terminate;

pub use cause::Cause;
pub use read_request::ReadRequest;
pub use segment::{Opcode, Placement, RawHeader, SegmentHeader};
pub use startup_frame::{
    Enhanced, FrameError, FrameKind, MAX_PRIVATE_DATA, MAX_STARTUP_FRAME, NOT_NEGOTIATED, StartupFrame,
};
pub use terminate::{RefusedSegment, Terminate};
