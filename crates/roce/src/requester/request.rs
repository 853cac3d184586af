//! Posted requests.

use pvrdma_verbs::{RequesterOps, SendOp, SendWr, WcStatus};

use super::send_state::Seq;

/// Progress of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// The request was not checked yet.
    Posted,
    /// The request may be sent; a local one is done.
    Started,
    /// The request completes with this status when its turn comes.
    Failed(WcStatus),
}

/// A posted request.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) wr: SendWr,
    pub(super) first: Seq,
    /// Number of PSNs; 0 for a local request.
    pub(super) count: u32,
    /// Bytes of the message.
    pub(super) length: u32,
    pub(super) stage: Stage,
}

impl Request {
    /// Starts the request: it is checked, and executed if it is local. `page_lists` counts the fast registrations not
    /// started.
    pub(super) fn begin(&mut self, ops: &mut impl RequesterOps, page_lists: &mut usize) {
        *page_lists = page_lists.saturating_sub(usize::from(matches!(self.wr.op, SendOp::FastRegister(_))));
        self.stage = match ops.begin(&mut self.wr) {
            Ok(()) => Stage::Started,
            Err(status) => Stage::Failed(status),
        };
    }

    /// PSN after the last one of the request.
    pub(super) const fn end(&self) -> Seq {
        self.first + self.count as Seq
    }

    /// Returns `true` if the response carries data (a READ or an atomic), so that an executed request is not yet done.
    pub(super) const fn wants_data(&self) -> bool {
        self.wr.op.has_result()
    }

    /// Returns `true` if its memory belongs to the region with this key, ignoring the key byte that consumers choose.
    pub(super) fn uses(&self, key: u32) -> bool {
        self.wr.sges.iter().any(|sge| sge.length > 0 && (sge.lkey ^ key) >> 8 == 0)
    }

    pub(super) fn contains(&self, seq: Seq) -> bool {
        (self.first..self.end()).contains(&seq)
    }

    /// Byte count of its completion: the number of bytes that arrived in local memory.
    pub(super) const fn byte_len(&self) -> u32 {
        if self.wants_data() { self.length } else { 0 }
    }
}
