//! Work queue elements and completions (spec §8, §9.1).
//!
//! Elements are parsed from byte arrays that were copied out of guest memory once. Accessors take what one opcode means
//! and nothing else: the library leaves the fields of other opcodes as an earlier element had them (spec §13 B21).

use pvrdma_verbs::{Gid, MacAddr, Qpn, RemoteAddress, Sge, UdDestination};

/// Bytes of a scatter/gather entry, `pvrdma_sge` (spec §8.1).
pub(crate) const SGE_SIZE: usize = 16;

/// Bytes in front of the SGEs of a receive element, `pvrdma_rq_wqe_hdr` (spec §8.2).
pub(crate) const RQ_HEADER: usize = 16;

/// Bytes in front of the SGEs of a send element, `pvrdma_sq_wqe_hdr` (spec §8.3).
pub(crate) const SQ_HEADER: usize = 80;

/// Bytes of a completion, `pvrdma_cqe` (spec §9.1).
pub(crate) const CQE_SIZE: usize = 64;

/// Most pages of a fast registration (spec §5.2).
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

/// Send flags that mean something (spec §8.5). The bits are those of [`pvrdma_verbs::SendFlags`].
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
    /// Kernel queues only: the library takes it for something else.
    pub(crate) const WITH_INVALIDATE: u32 = 1 << 2;
    /// Kernel queues only, likewise.
    pub(crate) const WITH_NETWORK_HDR_TYPE: u32 = 1 << 6;
}

/// Offsets in a completion (spec §9.1). What is not named is zero.
pub(crate) mod cqe {
    pub(crate) const WR_ID: usize = 0;
    pub(crate) const QP: usize = 8;
    pub(crate) const OPCODE: usize = 16;
    pub(crate) const STATUS: usize = 20;
    pub(crate) const BYTE_LEN: usize = 24;
    pub(crate) const IMM_DATA: usize = 28;
    pub(crate) const SRC_QP: usize = 32;
    pub(crate) const WC_FLAGS: usize = 36;
    pub(crate) const SL: usize = 48;
    pub(crate) const PORT_NUM: usize = 50;
    pub(crate) const NETWORK_HDR_TYPE: usize = 57;
}

/// Copies `N` bytes at offset `AT`; that they are inside is checked when this is compiled.
#[inline]
fn take<const AT: usize, const N: usize, const L: usize>(bytes: &[u8; L]) -> [u8; N] {
    const { assert!(AT + N <= L) };
    let mut out = [0; N];
    out.copy_from_slice(&bytes[AT..AT + N]);
    out
}

/// Sets bytes from offset `AT` on, likewise.
#[inline]
pub(crate) fn put<const AT: usize, const N: usize, const L: usize>(bytes: &mut [u8; L], value: [u8; N]) {
    const { assert!(AT + N <= L) };
    bytes[AT..AT + N].copy_from_slice(&value);
}

#[inline]
fn u32_at<const AT: usize, const L: usize>(bytes: &[u8; L]) -> u32 {
    u32::from_le_bytes(take::<AT, 4, L>(bytes))
}

#[inline]
fn u64_at<const AT: usize, const L: usize>(bytes: &[u8; L]) -> u64 {
    u64::from_le_bytes(take::<AT, 8, L>(bytes))
}

/// Parses a scatter/gather entry.
#[inline]
pub(crate) fn sge(bytes: &[u8; SGE_SIZE]) -> Sge {
    Sge { addr: u64_at::<0, _>(bytes), length: u32_at::<8, _>(bytes), lkey: u32_at::<12, _>(bytes) }
}

/// The header of a receive element. `total_len` at 12 is stale and ignored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecvHeader<'a>(pub(crate) &'a [u8; RQ_HEADER]);

impl RecvHeader<'_> {
    pub(crate) fn wr_id(self) -> u64 {
        u64_at::<0, _>(self.0)
    }

    pub(crate) fn num_sge(self) -> u32 {
        u32_at::<8, _>(self.0)
    }
}

/// The header of a send element. `total_len` at 12 is stale and ignored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SendHeader<'a>(pub(crate) &'a [u8; SQ_HEADER]);

/// `wr.fast_reg`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FastRegisterFields {
    pub(crate) iova_start: u64,
    pub(crate) pl_pdir_dma: u64,
    pub(crate) page_shift: u32,
    pub(crate) page_list_len: u32,
    pub(crate) length: u32,
    pub(crate) access_flags: u32,
    pub(crate) rkey: u32,
}

/// `wr.ud`: what the address vector says besides the destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Datagram {
    /// Bits 31:24 of `av.port_pd`.
    pub(crate) port: u8,
    /// Bits 23:0 of `av.port_pd`.
    pub(crate) pd_handle: u32,
    pub(crate) to: UdDestination,
}

impl SendHeader<'_> {
    pub(crate) fn wr_id(self) -> u64 {
        u64_at::<0, _>(self.0)
    }

    pub(crate) fn num_sge(self) -> u32 {
        u32_at::<8, _>(self.0)
    }

    pub(crate) fn opcode(self) -> u32 {
        u32_at::<16, _>(self.0)
    }

    pub(crate) fn send_flags(self) -> u32 {
        u32_at::<20, _>(self.0)
    }

    /// `ex.imm_data`: bytes to pass on unchanged.
    pub(crate) fn imm_data(self) -> [u8; 4] {
        take::<24, 4, _>(self.0)
    }

    /// `ex.invalidate_rkey`, a number.
    pub(crate) fn invalidate_rkey(self) -> u32 {
        u32_at::<24, _>(self.0)
    }

    /// `wr.rdma`.
    pub(crate) fn rdma(self) -> RemoteAddress {
        RemoteAddress { addr: u64_at::<32, _>(self.0), rkey: u32_at::<40, _>(self.0) }
    }

    /// Where `wr.atomic` goes; its key is not where that of `wr.rdma` is.
    pub(crate) fn atomic(self) -> RemoteAddress {
        RemoteAddress { addr: u64_at::<32, _>(self.0), rkey: u32_at::<56, _>(self.0) }
    }

    /// `wr.atomic.compare_add`.
    pub(crate) fn compare_add(self) -> u64 {
        u64_at::<40, _>(self.0)
    }

    /// `wr.atomic.swap`, of compare-and-swap only.
    pub(crate) fn swap(self) -> u64 {
        u64_at::<48, _>(self.0)
    }

    pub(crate) fn fast_register(self) -> FastRegisterFields {
        FastRegisterFields {
            iova_start: u64_at::<32, _>(self.0),
            pl_pdir_dma: u64_at::<40, _>(self.0),
            page_shift: u32_at::<48, _>(self.0),
            page_list_len: u32_at::<52, _>(self.0),
            length: u32_at::<56, _>(self.0),
            access_flags: u32_at::<60, _>(self.0),
            rkey: u32_at::<64, _>(self.0),
        }
    }

    /// `wr.ud` with its address vector at 40.
    pub(crate) fn datagram(self) -> Datagram {
        let [pd0, pd1, pd2, port] = take::<40, 4, _>(self.0);
        let class = u32_at::<44, _>(self.0);
        let [service_level, ..] = (class >> 28).to_le_bytes();
        let [traffic_class, ..] = (class >> 20).to_le_bytes();
        let [gid_index] = take::<65, 1, _>(self.0);
        let [hop_limit] = take::<67, 1, _>(self.0);
        Datagram {
            port,
            pd_handle: u32::from_le_bytes([pd0, pd1, pd2, 0]),
            to: UdDestination {
                qpn: Qpn::new(u32_at::<32, _>(self.0)),
                qkey: u32_at::<36, _>(self.0),
                sgid_index: gid_index,
                dgid: Gid(take::<48, 16, _>(self.0)),
                dmac: MacAddr(take::<68, 6, _>(self.0)),
                service_level,
                traffic_class,
                flow_label: class & 0x000f_ffff,
                hop_limit,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every accessor reads the bytes that the layout gives it: each byte of the header holds its own offset.
    #[test]
    fn send_header_offsets() {
        let bytes: [u8; SQ_HEADER] = std::array::from_fn(|i| u8::try_from(i).unwrap());
        let header = SendHeader(&bytes);
        let word = |at: u8| u32::from_le_bytes([at, at + 1, at + 2, at + 3]);
        let long = |at: u8| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        assert_eq!(header.wr_id(), long(0));
        assert_eq!((header.num_sge(), header.opcode(), header.send_flags()), (word(8), word(16), word(20)));
        assert_eq!((header.imm_data(), header.invalidate_rkey()), ([24, 25, 26, 27], word(24)));
        assert_eq!(header.rdma(), RemoteAddress { addr: long(32), rkey: word(40) });
        assert_eq!(header.atomic(), RemoteAddress { addr: long(32), rkey: word(56) });
        assert_eq!((header.compare_add(), header.swap()), (long(40), long(48)));
        let fast = header.fast_register();
        assert_eq!((fast.iova_start, fast.pl_pdir_dma), (long(32), long(40)));
        assert_eq!((fast.page_shift, fast.page_list_len, fast.length), (word(48), word(52), word(56)));
        assert_eq!((fast.access_flags, fast.rkey), (word(60), word(64)));
    }

    #[test]
    fn datagram_fields() {
        let mut bytes = [0; SQ_HEADER];
        put::<32, _, _>(&mut bytes, 0x1234_5678_u32.to_le_bytes());
        put::<36, _, _>(&mut bytes, 0x8001_0000_u32.to_le_bytes());
        put::<40, _, _>(&mut bytes, (1 << 24 | 0x00ab_cdef_u32).to_le_bytes());
        put::<44, _, _>(&mut bytes, 0x5ab1_2345_u32.to_le_bytes());
        put::<48, _, _>(&mut bytes, [7; 16]);
        put::<64, _, _>(&mut bytes, [0x80, 3, 0, 64]);
        put::<68, _, _>(&mut bytes, [0x52, 0x54, 0, 0, 0, 9]);
        let datagram = SendHeader(&bytes).datagram();
        assert_eq!((datagram.port, datagram.pd_handle), (1, 0x00ab_cdef));
        let to = datagram.to;
        assert_eq!((to.qpn.get(), to.qkey), (0x34_5678, 0x8001_0000));
        assert_eq!((to.service_level, to.traffic_class, to.flow_label), (5, 0xab, 0x1_2345));
        assert_eq!((to.sgid_index, to.hop_limit, to.dgid), (3, 64, Gid([7; 16])));
        assert_eq!(to.dmac, MacAddr([0x52, 0x54, 0, 0, 0, 9]));
    }
}
