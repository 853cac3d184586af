//! Posted requests.

use pvrdma_saved_state::roce as saved;
use pvrdma_verbs::RequesterOps;
use pvrdma_verbs_types::{MAX_MESSAGE, Mtu, SendOp, SendWr, Sge, WcStatus};

use super::send_state::Seq;
use crate::path::packets;
use crate::saved::{RestoreError, ensure, failure, invalid, restore_send, save_send};

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
    /// Creates a request that was just posted and begins at the PSN `first`. `mtu` is the path MTU.
    pub(super) fn new(wr: SendWr, first: Seq, mtu: Mtu) -> Self {
        let length = match wr.op {
            SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => Some(8),
            _ => u32::try_from(Sge::total_length(&wr.sges)).ok().filter(|&length| length <= MAX_MESSAGE),
        };
        let (count, stage) = match (&wr.op, length) {
            (op, _) if op.is_local() => (0, Stage::Posted),
            (_, None) => (0, Stage::Failed(WcStatus::LocalLength)),
            (SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }, _) => (1, Stage::Posted),
            (_, Some(length)) => (packets(length, mtu), Stage::Posted),
        };
        Self { wr, first, count, length: length.unwrap_or(0), stage }
    }

    /// Saves the request. Its PSNs follow from those of the requests before it.
    pub(super) fn save(&self) -> saved::Request {
        let Self { wr, first: _, count: _, length: _, stage } = self;
        let (stage, status) = match *stage {
            Stage::Posted => (saved::Stage::Posted, 0),
            Stage::Started => (saved::Stage::Started, 0),
            Stage::Failed(status) => (saved::Stage::Failed, status as u32),
        };
        saved::Request { work: Some(save_send(wr)), stage: stage.into(), status }
    }

    /// Restores a request that begins at the PSN `first`.
    pub(super) fn restore(request: saved::Request, first: Seq, mtu: Mtu) -> Result<Self, RestoreError> {
        let saved::Request { work, stage, status } = request;
        let work = work.ok_or(RestoreError::Missing { field: "work request" })?;
        let new = Self::new(restore_send(work)?, first, mtu);
        let stage = match saved::Stage::try_from(stage) {
            Ok(saved::Stage::Posted) => Stage::Posted,
            Ok(saved::Stage::Started) => Stage::Started,
            Ok(saved::Stage::Failed) => Stage::Failed(failure(status)?),
            Err(_) => return Err(invalid("stage of a request", stage.cast_unsigned())),
        };
        let too_long = matches!(new.stage, Stage::Failed(_));
        ensure(!too_long || matches!(stage, Stage::Failed(_)), "a request that is too long has not failed")?;
        Ok(Self { stage, ..new })
    }

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
