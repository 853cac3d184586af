//! Send queues (spec §8.3 to §8.7).

use pvrdma_guest_memory::DmaView;
use pvrdma_pages::PageList;
use pvrdma_verbs::{QueueError, RingPosition, SavedRing, SendSource};
use pvrdma_verbs_types::{Access, FastRegister, Invalidate, QpType, SendData, SendFlags, SendOp, SendWr};

use super::gather::{HEAD, gather};
use crate::abi::layout::GuestLayout;
use crate::abi::wqe::{
    self as abi, Atomic, Datagram, FAST_REGISTER_PAGE_SHIFT, ImmediateOrKey, MAX_FAST_REGISTER_PAGES, Rdma, SEND_FLAGS,
    SQ_HEADER, SendHeader, opcode,
};
use crate::page_dir::read_page_directory;
use crate::ring::{ConsumerRing, Progress, RingShape, RingShapeError, RingWords, StateWords, send_stride};

/// Layout and properties of a send queue.
#[derive(Debug)]
pub(crate) struct SendRingParams {
    /// All pages of the QP; page 0 holds the ring state.
    pub(crate) pages: PageList,
    /// Index of the first page of the send elements.
    pub(crate) first_page: u32,
    /// Number of pages of the send elements.
    pub(crate) page_count: u32,
    /// Number of elements, a power of two.
    pub(crate) entries: u32,
    /// SGEs per element, as given in the create command.
    pub(crate) max_sge: u32,
    /// Transport service: it determines the supported operations.
    pub(crate) qp_type: QpType,
    /// `true` if the QP belongs to a process: only opcodes 0 to 6 are valid (spec §8.4).
    pub(crate) user: bool,
    /// Protection domain of the QP, which address vectors must name.
    pub(crate) pd_handle: u32,
}

/// Consumer of a send queue.
#[derive(Debug)]
pub(crate) struct SendRing {
    ring: ConsumerRing,
    max_sge: u32,
    decode: Decode,
}

impl SendRing {
    pub(crate) fn new(params: SendRingParams) -> Result<Self, RingShapeError> {
        let SendRingParams { pages, first_page, page_count, entries, max_sge, qp_type, user, pd_handle } = params;
        let stride = send_stride(max_sge).ok_or(RingShapeError::Elements(max_sge))?;
        let shape = RingShape { pages, first_page, page_count, entries, stride, words: StateWords::Tx };
        Ok(Self { ring: ConsumerRing::new(shape)?, max_sge, decode: Decode { qp_type, user, pd_handle } })
    }

    /// Returns the location of the indices of its ring.
    pub(crate) const fn words(&self) -> RingWords {
        self.ring.words()
    }

    /// Moves a new ring to a saved position.
    ///
    /// # Errors
    /// The position is not one of such a ring.
    pub(crate) fn at(self, position: RingPosition) -> Result<Self, RingShapeError> {
        Ok(Self { ring: self.ring.at(position)?, ..self })
    }

    /// Returns the progress of the ring, for the watcher.
    pub(crate) fn watch(&mut self) -> Progress {
        self.ring.watch()
    }
}

impl SendSource for SendRing {
    fn pop(&mut self, view: &DmaView<'_>, work: &mut SendWr) -> Result<bool, QueueError> {
        let Some(element) = self.ring.peek(view)? else { return Ok(false) };
        let mut head = [0; HEAD];
        element.copy_to(&mut head);
        self.ring.take();
        let Some((wqe, sges)) = head.split_first_chunk::<SQ_HEADER>() else { return Ok(false) };
        let SendHeader { wr_id, num_sge: count, opcode, send_flags } = SendHeader::decode(wqe);
        work.wr_id = wr_id;
        // Bits above the third are private to the user library (spec §8.5). There is no inline layout.
        work.flags = SendFlags::from_bits_truncate((send_flags & SEND_FLAGS).to_le_bytes()[0]);
        work.sges.clear();
        if count > self.max_sge {
            work.op = SendOp::Malformed;
        } else {
            gather(&element, sges, HEAD, count, &mut work.sges);
            work.op = self.decode.operation(view, opcode, wqe);
        }
        Ok(true)
    }

    fn retire(&mut self, view: &DmaView<'_>) {
        self.ring.retire(view);
    }

    fn reset(&mut self) {
        self.ring.reset();
    }

    fn save(&self) -> Option<SavedRing> {
        Some(self.ring.save())
    }
}

/// Properties that determine the meaning of an opcode.
#[derive(Clone, Copy, Debug)]
struct Decode {
    qp_type: QpType,
    user: bool,
    pd_handle: u32,
}

impl Decode {
    #[inline]
    fn operation(self, view: &DmaView<'_>, number: u32, wqe: &[u8; SQ_HEADER]) -> SendOp {
        let remote = || Rdma::decode(wqe).into();
        let immediate = || ImmediateOrKey::decode(wqe).imm_data;
        let key = || ImmediateOrKey::decode(wqe).invalidate_rkey;
        match self.qp_type {
            QpType::Rc => match number {
                opcode::RDMA_WRITE => SendOp::Write { remote: remote(), immediate: None },
                opcode::RDMA_WRITE_WITH_IMM => SendOp::Write { remote: remote(), immediate: Some(immediate()) },
                opcode::SEND => SendOp::Send { data: SendData::None, to: None },
                opcode::SEND_WITH_IMM => SendOp::Send { data: SendData::Immediate(immediate()), to: None },
                opcode::RDMA_READ => SendOp::Read { remote: remote() },
                opcode::ATOMIC_CMP_AND_SWP => {
                    let atomic = Atomic::decode(wqe);
                    SendOp::CompareSwap { remote: atomic.remote(), compare: atomic.compare_add, swap: atomic.swap }
                }
                opcode::ATOMIC_FETCH_AND_ADD => {
                    let atomic = Atomic::decode(wqe);
                    SendOp::FetchAdd { remote: atomic.remote(), add: atomic.compare_add }
                }
                // From 7 on, the opcodes of the user library differ from those of the kernel, and the page directory of
                // a registration would be an address that the process chooses (spec §8.4).
                _ if self.user => SendOp::Unsupported { opcode: number },
                opcode::SEND_WITH_INV => SendOp::Send { data: SendData::Invalidate(key()), to: None },
                opcode::LOCAL_INV => SendOp::LocalInvalidate(Invalidate { key: key() }),
                opcode::FAST_REG_MR => {
                    SendOp::FastRegister(Box::new(fast_register(view, abi::FastRegister::decode(wqe))))
                }
                _ => SendOp::Unsupported { opcode: number },
            },
            QpType::Ud | QpType::Gsi => match number {
                opcode::SEND => self.datagram(wqe, SendData::None),
                opcode::SEND_WITH_IMM if self.qp_type == QpType::Ud => {
                    self.datagram(wqe, SendData::Immediate(immediate()))
                }
                _ => SendOp::Unsupported { opcode: number },
            },
        }
    }

    /// Decodes a datagram's destination. A process may use only address vectors of the QP's own protection domain (spec
    /// §8.3).
    fn datagram(self, wqe: &[u8; SQ_HEADER], data: SendData) -> SendOp {
        let datagram = Datagram::decode(wqe);
        if datagram.pd_handle() != self.pd_handle || datagram.port() != 1 {
            return SendOp::Malformed;
        }
        SendOp::Send { data, to: Some(datagram.into()) }
    }
}

/// Decodes a fast registration. It copies the page list now, because the driver overwrites it when it posts the next
/// registration of the region (spec §5.4).
fn fast_register(view: &DmaView<'_>, fields: abi::FastRegister) -> FastRegister {
    let abi::FastRegister { iova_start, pl_pdir_dma, page_shift, page_list_len, length, access_flags, rkey } = fields;
    let length = u64::from(length);
    let pages = (page_shift == FAST_REGISTER_PAGE_SHIFT && page_list_len <= MAX_FAST_REGISTER_PAGES)
        .then(|| read_page_directory(view, pl_pdir_dma, page_list_len).ok())
        .flatten()
        .filter(|pages| (iova_start & 0xfff) + length <= pages.bytes());
    FastRegister { key: rkey, iova: iova_start, length, access: Access::from_bits_truncate(access_flags), pages }
}

#[cfg(test)]
mod tests;
