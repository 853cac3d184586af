//! The body of an RDMA Read Request (RFC 5040 4.4).

use pvrdma_packet::field::{field, put};
use pvrdma_verbs_types::RemoteAddress;

/// RDMA Read Request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct ReadRequest {
    /// STag of the memory that the requester reads into. The response names it.
    pub sink_stag: u32,
    /// Tagged offset of the first byte there.
    pub sink_offset: u64,
    /// Length in bytes.
    pub length: u32,
    /// STag of the memory that is read.
    pub source_stag: u32,
    /// Tagged offset of the first byte there.
    pub source_offset: u64,
}

impl ReadRequest {
    /// Length in bytes.
    pub const LEN: usize = 28;

    /// Decodes the body.
    pub fn from_bytes(body: &[u8; Self::LEN]) -> Self {
        Self {
            sink_stag: u32::from_be_bytes(field::<0, _, _>(body)),
            sink_offset: u64::from_be_bytes(field::<4, _, _>(body)),
            length: u32::from_be_bytes(field::<12, _, _>(body)),
            source_stag: u32::from_be_bytes(field::<16, _, _>(body)),
            source_offset: u64::from_be_bytes(field::<20, _, _>(body)),
        }
    }

    /// Encodes the body.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut body = [0; Self::LEN];
        put::<0, _, _>(&mut body, self.sink_stag.to_be_bytes());
        put::<4, _, _>(&mut body, self.sink_offset.to_be_bytes());
        put::<12, _, _>(&mut body, self.length.to_be_bytes());
        put::<16, _, _>(&mut body, self.source_stag.to_be_bytes());
        put::<20, _, _>(&mut body, self.source_offset.to_be_bytes());
        body
    }

    /// The memory that is read.
    pub(crate) const fn source(&self) -> RemoteAddress {
        RemoteAddress { addr: self.source_offset, rkey: self.source_stag }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_the_rfc_has_them() {
        let request = ReadRequest {
            sink_stag: 0x0102_0304,
            sink_offset: 0x0506_0708_090a_0b0c,
            length: 0x0d0e_0f10,
            source_stag: 0x1112_1314,
            source_offset: 0x1516_1718_191a_1b1c,
        };
        let bytes = request.to_bytes();
        assert!(bytes.iter().copied().eq(1..=28));
        assert_eq!(ReadRequest::from_bytes(&bytes), request);
    }
}
