//! Work queue elements and completions (spec §8, §9.1).
//!
//! Elements are decoded from byte arrays that were copied from guest memory once. The members of a union are separate
//! structures, and only the one for the element's opcode is decoded: the user library does not clear the fields of
//! other opcodes, which keep their values from an earlier element (spec §13 B21).

use pvrdma_packet::MacAddr;
use pvrdma_verbs_types::{Gid, Qpn, RemoteAddress, Sge, UdDestination};

use super::layout::{GuestLayout, guest_struct};

/// Bytes of a scatter/gather entry.
pub(crate) const SGE_SIZE: usize = SgeEntry::SIZE;

/// Bytes in front of the SGEs of a receive element.
pub(crate) const RQ_HEADER: usize = RecvHeader::SIZE;

/// Bytes in front of the SGEs of a send element.
pub(crate) const SQ_HEADER: usize = SendHeader::SIZE;

/// Bytes of a completion.
pub(crate) const CQE_SIZE: usize = Cqe::SIZE;

/// Maximum number of pages of a fast registration (spec §5.2).
pub(crate) const MAX_FAST_REGISTER_PAGES: u32 = 128;

/// The only page size of a fast registration, as a shift (spec §8.3).
pub(crate) const FAST_REGISTER_PAGE_SHIFT: u32 = 12;

/// Send opcodes (spec §8.4). User queue pairs number theirs differently from 7 on.
pub(crate) mod opcode {
    pub(crate) const RDMA_WRITE: u32 = 0;
    pub(crate) const RDMA_WRITE_WITH_IMM: u32 = 1;
    pub(crate) const SEND: u32 = 2;
    pub(crate) const SEND_WITH_IMM: u32 = 3;
    pub(crate) const RDMA_READ: u32 = 4;
    pub(crate) const ATOMIC_CMP_AND_SWP: u32 = 5;
    pub(crate) const ATOMIC_FETCH_AND_ADD: u32 = 6;
    pub(crate) const SEND_WITH_INV: u32 = 8;
    pub(crate) const LOCAL_INV: u32 = 10;
    pub(crate) const FAST_REG_MR: u32 = 11;
}

/// Valid send flags (spec §8.5). The bits are those of [`pvrdma_verbs_types::SendFlags`].
pub(crate) const SEND_FLAGS: u32 = 0x7;

/// Completion opcodes (spec §9.2).
pub(crate) mod wc_opcode {
    pub(crate) const SEND: u32 = 0;
    pub(crate) const RDMA_WRITE: u32 = 1;
    pub(crate) const RDMA_READ: u32 = 2;
    pub(crate) const COMP_SWAP: u32 = 3;
    pub(crate) const FETCH_ADD: u32 = 4;
    pub(crate) const LOCAL_INV: u32 = 7;
    pub(crate) const FAST_REG_MR: u32 = 8;
    pub(crate) const RECV: u32 = 128;
    pub(crate) const RECV_RDMA_WITH_IMM: u32 = 129;
}

/// Completion flags (spec §9.2). Bits 3, 4 and 5 are never set.
pub(crate) mod wc_flag {
    pub(crate) const GRH: u32 = 1 << 0;
    pub(crate) const WITH_IMM: u32 = 1 << 1;
    /// Kernel queues only: the user library gives the bit another meaning.
    pub(crate) const WITH_INVALIDATE: u32 = 1 << 2;
    /// Kernel queues only, likewise.
    pub(crate) const WITH_NETWORK_HDR_TYPE: u32 = 1 << 6;
}

guest_struct! {
    /// A scatter/gather entry (spec §8.1).
    SgeEntry, "sge", 16 {
        0 addr: u64,
        8 length: u32,
        12 lkey: u32,
    }
}

impl From<SgeEntry> for Sge {
    #[inline]
    fn from(entry: SgeEntry) -> Self {
        Self { addr: entry.addr, length: entry.length, lkey: entry.lkey }
    }
}

guest_struct! {
    /// The header of a receive element (spec §8.2). `total_len` at 12 is stale and ignored.
    RecvHeader, "rq_wqe_hdr", 16 {
        0 wr_id: u64,
        8 num_sge: u32,
    }
}

guest_struct! {
    /// The common header of send elements (spec §8.3). `total_len` at 12 is stale and ignored.
    SendHeader, "sq_wqe_hdr", 80 {
        0 wr_id: u64,
        8 num_sge: u32,
        16 opcode: u32,
        20 send_flags: u32,
    }
}

guest_struct! {
    /// The union `ex`. The same four bytes are immediate data, which is passed on unchanged, or a key, which is a
    /// number.
    ImmediateOrKey, "sq_wqe_hdr.ex", 80 {
        24 imm_data: [u8; 4],
        24 invalidate_rkey: u32,
    }
}

guest_struct! {
    /// `wr.rdma`: the target of an RDMA write or read.
    Rdma, "sq_wqe_hdr.wr.rdma", 80 {
        32 remote_addr: u64,
        40 rkey: u32,
    }
}

impl From<Rdma> for RemoteAddress {
    #[inline]
    fn from(rdma: Rdma) -> Self {
        Self { addr: rdma.remote_addr, rkey: rdma.rkey }
    }
}

guest_struct! {
    /// `wr.atomic`: target and operands. The key is at another offset than in `wr.rdma`.
    Atomic, "sq_wqe_hdr.wr.atomic", 80 {
        32 remote_addr: u64,
        40 compare_add: u64,
        /// Of compare-and-swap only.
        48 swap: u64,
        56 rkey: u32,
    }
}

impl Atomic {
    /// Target of the operation.
    #[inline]
    pub(crate) const fn remote(self) -> RemoteAddress {
        RemoteAddress { addr: self.remote_addr, rkey: self.rkey }
    }
}

guest_struct! {
    /// `wr.fast_reg`.
    FastRegister, "sq_wqe_hdr.wr.fast_reg", 80 {
        32 iova_start: u64,
        40 pl_pdir_dma: u64,
        48 page_shift: u32,
        52 page_list_len: u32,
        56 length: u32,
        60 access_flags: u32,
        64 rkey: u32,
    }
}

guest_struct! {
    /// An address vector (spec §8.3).
    AddressVector, "av", 40 {
        /// Port in bits 31:24, handle of the protection domain in bits 23:0.
        0 port_pd: u32,
        /// Service level in bits 31:28, traffic class in bits 27:20, flow label in bits 19:0.
        4 sl_tclass_flowlabel: u32,
        8 dgid: [u8; 16],
        25 gid_index: u8,
        27 hop_limit: u8,
        28 dmac: [u8; 6],
    }
}

guest_struct! {
    /// `wr.ud`: where a datagram goes.
    Datagram, "sq_wqe_hdr.wr.ud", 80 {
        32 remote_qpn: u32,
        36 remote_qkey: u32,
        40 av: AddressVector,
    }
}

impl Datagram {
    /// The port that the address vector names.
    pub(crate) const fn port(self) -> u8 {
        let [.., port] = self.av.port_pd.to_le_bytes();
        port
    }

    /// The protection domain that the address vector names.
    pub(crate) const fn pd_handle(self) -> u32 {
        self.av.port_pd & 0x00ff_ffff
    }
}

impl From<Datagram> for UdDestination {
    fn from(datagram: Datagram) -> Self {
        let Datagram { remote_qpn, remote_qkey, av } = datagram;
        let class = av.sl_tclass_flowlabel;
        let [service_level, ..] = (class >> 28).to_le_bytes();
        let [traffic_class, ..] = (class >> 20).to_le_bytes();
        Self {
            qpn: Qpn::new(remote_qpn),
            qkey: remote_qkey,
            sgid_index: av.gid_index,
            dgid: Gid(av.dgid),
            dmac: MacAddr(av.dmac),
            service_level,
            traffic_class,
            flow_label: class & 0x000f_ffff,
            hop_limit: av.hop_limit,
        }
    }
}

guest_struct! {
    /// Completion queue entry (spec §9.1). Bytes without a field are zero.
    Cqe, "cqe", 64 {
        0 wr_id: u64,
        8 qp: u64,
        16 opcode: u32,
        20 status: u32,
        24 byte_len: u32,
        28 imm_data: [u8; 4],
        32 src_qp: u32,
        36 wc_flags: u32,
        48 sl: u8,
        50 port_num: u8,
        57 network_hdr_type: u8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::layout::write_field;

    #[test]
    fn parts_of_an_address_vector() {
        let mut bytes = [0; SendHeader::SIZE];
        write_field(&mut bytes, 32, &0x1234_5678_u32);
        write_field(&mut bytes, 36, &0x8001_0000_u32);
        write_field(&mut bytes, 40, &(1 << 24 | 0x00ab_cdef_u32));
        write_field(&mut bytes, 44, &0x5ab1_2345_u32);
        write_field(&mut bytes, 48, &[7_u8; 16]);
        write_field(&mut bytes, 64, &[0x80_u8, 3, 0, 64]);
        write_field(&mut bytes, 68, &[0x52_u8, 0x54, 0, 0, 0, 9]);
        let datagram = Datagram::decode(&bytes);
        assert_eq!((datagram.port(), datagram.pd_handle()), (1, 0x00ab_cdef));
        let to = UdDestination::from(datagram);
        assert_eq!((to.qpn.get(), to.qkey), (0x34_5678, 0x8001_0000));
        assert_eq!((to.service_level, to.traffic_class, to.flow_label), (5, 0xab, 0x1_2345));
        assert_eq!((to.sgid_index, to.hop_limit, to.dgid), (3, 64, Gid([7; 16])));
        assert_eq!(to.dmac, MacAddr([0x52, 0x54, 0, 0, 0, 9]));
    }
}
