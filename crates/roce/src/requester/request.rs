//! Posted requests.

use pvrdma_verbs::{SendOp, SendWr, WcStatus};

use super::send_state::Seq;
use crate::ops::RequesterOps;

/// How far a request has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// Nothing was checked yet.
    Posted,
    /// It may be sent; a local one is done.
    Started,
    /// It completes with this status when its turn comes.
    Failed(WcStatus),
}

/// A posted request.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) wr: SendWr,
    pub(super) first: Seq,
    /// PSNs it takes; none if it never leaves this side.
    pub(super) count: u32,
    /// Bytes of the message.
    pub(super) length: u32,
    pub(super) stage: Stage,
}

impl Request {
    /// Has it checked, or done if it is local. `page_lists` are those that wait for that.
    pub(super) fn begin(&mut self, ops: &mut impl RequesterOps, page_lists: &mut usize) {
        *page_lists = page_lists.saturating_sub(usize::from(matches!(self.wr.op, SendOp::FastRegister(_))));
        self.stage = match ops.begin(&mut self.wr) {
            Ok(()) => Stage::Started,
            Err(status) => Stage::Failed(status),
        };
    }

    /// The PSN after its last.
    pub(super) const fn end(&self) -> Seq {
        self.first + self.count as Seq
    }

    /// Returns `true` if the response carries data, so that being executed is not being done: a READ or an atomic.
    pub(super) const fn wants_data(&self) -> bool {
        self.wr.op.has_result()
    }

    /// Returns `true` if its memory is that of the region with this key, whatever the byte that consumers choose.
    pub(super) fn uses(&self, key: u32) -> bool {
        self.wr.sges.iter().any(|sge| sge.length > 0 && (sge.lkey ^ key) >> 8 == 0)
    }

    pub(super) fn contains(&self, seq: Seq) -> bool {
        (self.first..self.end()).contains(&seq)
    }

    /// The byte count of its completion: what arrived in local memory.
    pub(super) const fn byte_len(&self) -> u32 {
        if self.wants_data() { self.length } else { 0 }
    }
}
