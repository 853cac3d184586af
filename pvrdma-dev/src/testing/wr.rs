//! Work requests, encoded as the drivers do (spec §8).

use pvrdma_verbs_types::{Gid, Sge};

/// Send opcodes (spec §8.4).
#[expect(missing_docs, reason = "the names of the specification")]
pub mod opcode {
    pub const RDMA_WRITE: u32 = 0;
    pub const RDMA_WRITE_WITH_IMM: u32 = 1;
    pub const SEND: u32 = 2;
    pub const SEND_WITH_IMM: u32 = 3;
    pub const RDMA_READ: u32 = 4;
    pub const ATOMIC_CMP_AND_SWP: u32 = 5;
    pub const ATOMIC_FETCH_AND_ADD: u32 = 6;
    pub const SEND_WITH_INV: u32 = 8;
    pub const LOCAL_INV: u32 = 10;
    pub const FAST_REG_MR: u32 = 11;
}

/// Send flags (spec §8.5).
#[expect(missing_docs, reason = "the names of the specification")]
pub mod send_flag {
    pub const FENCE: u32 = 1;
    pub const SIGNALED: u32 = 2;
    pub const SOLICITED: u32 = 4;
    pub const INLINE: u32 = 8;
}

/// Destination of datagrams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "the names of the specification")]
pub struct AddressHandle {
    pub pd_handle: u32,
    pub port: u8,
    pub dgid: Gid,
    pub sgid_index: u8,
    pub dmac: [u8; 6],
}

impl AddressHandle {
    /// Returns the destination at a GID, from GID index 0, with an address vector of this protection domain.
    pub const fn new(pd_handle: u32, dgid: Gid) -> Self {
        Self { pd_handle, port: 1, dgid, sgid_index: 0, dmac: [0x52, 0x54, 0, 0, 0, 0xfe] }
    }
}

/// A send request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SendWr {
    /// Identifier chosen by the consumer.
    pub wr_id: u64,
    /// Opcode in the element.
    pub opcode: u32,
    /// Flags in the element.
    pub flags: u32,
    /// Value of `num_sge` if it differs from the number of SGEs.
    pub num_sge: Option<u32>,
    /// Local memory.
    pub sges: Vec<Sge>,
    /// `ex`: immediate data or key; stale if not set.
    pub ex: Option<[u8; 4]>,
    /// Bytes from 32 on; those not set are stale.
    pub body: Vec<u8>,
}

impl SendWr {
    /// A signaled request without body.
    pub fn new(wr_id: u64, opcode: u32, sges: &[Sge]) -> Self {
        Self {
            wr_id,
            opcode,
            flags: send_flag::SIGNALED,
            num_sge: None,
            sges: sges.to_vec(),
            ex: None,
            body: Vec::new(),
        }
    }

    fn with_rdma(mut self, addr: u64, rkey: u32) -> Self {
        self.body.extend(addr.to_le_bytes());
        self.body.extend(rkey.to_le_bytes());
        self
    }

    /// SEND.
    pub fn send(wr_id: u64, sges: &[Sge]) -> Self {
        Self::new(wr_id, opcode::SEND, sges)
    }

    /// RDMA_WRITE.
    pub fn write(wr_id: u64, sges: &[Sge], addr: u64, rkey: u32) -> Self {
        Self::new(wr_id, opcode::RDMA_WRITE, sges).with_rdma(addr, rkey)
    }

    /// RDMA_READ.
    pub fn read(wr_id: u64, sges: &[Sge], addr: u64, rkey: u32) -> Self {
        Self::new(wr_id, opcode::RDMA_READ, sges).with_rdma(addr, rkey)
    }

    fn atomic(wr_id: u64, opcode: u32, sge: Sge, addr: u64, rkey: u32, operands: [Option<u64>; 2]) -> Self {
        let mut request = Self::new(wr_id, opcode, &[sge]);
        request.body.extend(addr.to_le_bytes());
        for operand in operands {
            // Fields that the operation does not use are stale.
            request.body.extend(operand.unwrap_or(0xeeee_eeee_eeee_eeee).to_le_bytes());
        }
        request.body.extend(rkey.to_le_bytes());
        request
    }

    /// ATOMIC_CMP_AND_SWP.
    pub fn compare_swap(wr_id: u64, sge: Sge, addr: u64, rkey: u32, compare: u64, swap: u64) -> Self {
        Self::atomic(wr_id, opcode::ATOMIC_CMP_AND_SWP, sge, addr, rkey, [Some(compare), Some(swap)])
    }

    /// ATOMIC_FETCH_AND_ADD.
    pub fn fetch_add(wr_id: u64, sge: Sge, addr: u64, rkey: u32, add: u64) -> Self {
        Self::atomic(wr_id, opcode::ATOMIC_FETCH_AND_ADD, sge, addr, rkey, [Some(add), None])
    }

    /// SEND on a datagram QP.
    pub fn datagram(wr_id: u64, sges: &[Sge], to: &AddressHandle, qpn: u32, qkey: u32) -> Self {
        let mut request = Self::new(wr_id, opcode::SEND, sges);
        let body = &mut request.body;
        body.extend(qpn.to_le_bytes());
        body.extend(qkey.to_le_bytes());
        body.extend((to.pd_handle | u32::from(to.port) << 24).to_le_bytes());
        body.extend(0_u32.to_le_bytes());
        body.extend(to.dgid.0);
        body.extend([0x80, to.sgid_index, 0, 64]);
        body.extend(to.dmac);
        body.extend([0; 6]);
        request
    }

    /// LOCAL_INV.
    pub fn local_invalidate(wr_id: u64, key: u32) -> Self {
        let mut request = Self::new(wr_id, opcode::LOCAL_INV, &[]);
        request.ex = Some(key.to_le_bytes());
        request
    }

    /// FAST_REG_MR.
    pub fn fast_register(
        wr_id: u64,
        key: u32,
        iova: u64,
        directory: u64,
        pages: u32,
        length: u32,
        access: u32,
    ) -> Self {
        let mut request = Self::new(wr_id, opcode::FAST_REG_MR, &[]);
        request.body.extend(iova.to_le_bytes());
        request.body.extend(directory.to_le_bytes());
        for word in [12, pages, length, access, key, 0] {
            request.body.extend(word.to_le_bytes());
        }
        request
    }

    /// Turns SEND or RDMA_WRITE into its kind with immediate data.
    #[must_use]
    pub fn immediate(mut self, data: [u8; 4]) -> Self {
        assert!(self.opcode == opcode::SEND || self.opcode == opcode::RDMA_WRITE);
        self.opcode += 1;
        self.ex = Some(data);
        self
    }

    /// Turns SEND into SEND_WITH_INV.
    #[must_use]
    pub fn invalidate(mut self, key: u32) -> Self {
        assert_eq!(self.opcode, opcode::SEND);
        self.opcode = opcode::SEND_WITH_INV;
        self.ex = Some(key.to_le_bytes());
        self
    }

    /// Removes the completion on success.
    #[must_use]
    pub fn unsignaled(mut self) -> Self {
        self.flags &= !send_flag::SIGNALED;
        self
    }

    /// Adds flags.
    #[must_use]
    pub fn flags(mut self, flags: u32) -> Self {
        self.flags |= flags;
        self
    }

    /// Encodes the element. The kernel zeroes the header before it fills it; the user library leaves the values of an
    /// earlier element (spec §13 B21).
    pub fn encode(&self, user: bool) -> Vec<u8> {
        let mut out = vec![if user { 0xee } else { 0 }; 80];
        out[..8].copy_from_slice(&self.wr_id.to_le_bytes());
        out[8..12].copy_from_slice(&self.num_sge.unwrap_or(self.sges.len() as u32).to_le_bytes());
        out[16..20].copy_from_slice(&self.opcode.to_le_bytes());
        out[20..24].copy_from_slice(&self.flags.to_le_bytes());
        if let Some(ex) = self.ex {
            out[24..28].copy_from_slice(&ex);
        }
        out[32..32 + self.body.len()].copy_from_slice(&self.body);
        put_sges(&mut out, &self.sges);
        out
    }
}

/// A receive request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RecvWr {
    /// Identifier chosen by the consumer.
    pub wr_id: u64,
    /// Value of `num_sge` if it differs from the number of SGEs.
    pub num_sge: Option<u32>,
    /// Local memory for the message.
    pub sges: Vec<Sge>,
}

impl RecvWr {
    /// Creates a receive.
    pub fn new(wr_id: u64, sges: &[Sge]) -> Self {
        Self { wr_id, num_sge: None, sges: sges.to_vec() }
    }

    /// Encodes the element, with a stale `total_len`.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = self.wr_id.to_le_bytes().to_vec();
        out.extend(self.num_sge.unwrap_or(self.sges.len() as u32).to_le_bytes());
        out.extend([0xee; 4]);
        put_sges(&mut out, &self.sges);
        out
    }
}

fn put_sges(out: &mut Vec<u8>, sges: &[Sge]) {
    for sge in sges {
        out.extend(sge.addr.to_le_bytes());
        out.extend(sge.length.to_le_bytes());
        out.extend(sge.lkey.to_le_bytes());
    }
}
