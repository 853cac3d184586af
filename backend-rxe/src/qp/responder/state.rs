//! State of a responder.

use pvrdma_verbs::RecvSource;
use pvrdma_verbs_types::{Completion, QpAttrs, RecvWr};
use serde::Serialize;

use crate::gid::BoundGid;
use crate::qp::contact::Connection;
use crate::qp::epoch::Epoch;

/// State of a responder at one moment, without its part for the wire.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct ResponderInspect {
    /// The receive ring can no longer be read.
    broken: bool,
    /// A receive was taken and has not ended.
    receive_in_use: bool,
    /// The first request has arrived.
    established: bool,
    /// The guest was notified that no receive of an SRQ is left.
    last_wqe_raised: bool,
}

/// The responder half of a QP.
pub(crate) struct Responder {
    /// `None` with an SRQ.
    pub(in crate::qp) source: Option<Box<dyn RecvSource>>,
    pub(in crate::qp) broken: bool,
    /// The receive in use, if `in_use` is set.
    pub(in crate::qp) recv: RecvWr,
    pub(in crate::qp) in_use: bool,
    /// Receives that have ended and whose completions are not published yet. Empty while the responder is not locked.
    pub(in crate::qp) pending: Vec<Completion>,
    /// Number of receives of the batch that were published.
    pub(in crate::qp) receives_published: usize,
    /// A receive of the batch could not be published.
    pub(in crate::qp) lost: bool,
    /// Changes when a partial message is discarded.
    pub(crate) epoch: Epoch,
    pub(crate) attrs: QpAttrs,
    /// The first request in RTR has arrived.
    pub(in crate::qp) established: bool,
    /// Identity of the connection whose requests it accepts.
    pub(crate) connection: Connection,
    /// The peer was in the process that the device has left, and the device has not run since.
    pub(crate) left_peer: bool,
    /// The last-WQE event was raised.
    pub(in crate::qp) last_wqe_raised: bool,
    /// The GID of this QP's address vector, with the directory's generation at the lookup.
    pub(in crate::qp) own_gid: Option<(u64, Option<BoundGid>)>,
}

impl Responder {
    pub(crate) fn new(source: Option<Box<dyn RecvSource>>) -> Self {
        Self {
            source,
            broken: false,
            recv: RecvWr::default(),
            in_use: false,
            pending: Vec::new(),
            receives_published: 0,
            lost: false,
            epoch: Epoch::begin(),
            attrs: QpAttrs::default(),
            established: false,
            connection: Connection::default(),
            left_peer: false,
            last_wqe_raised: false,
            own_gid: None,
        }
    }

    /// Returns the state of the responder for inspection.
    pub(crate) const fn inspect(&self) -> ResponderInspect {
        let Self { broken, in_use, established, last_wqe_raised, .. } = *self;
        ResponderInspect { broken, receive_in_use: in_use, established, last_wqe_raised }
    }

    /// Resets the responder and its ring, as the guest does with a QP in RESET.
    pub(in crate::qp) fn reset(&mut self) {
        *self = Self::new(self.source.take());
        if let Some(source) = &mut self.source {
            source.reset();
        }
    }

    /// Releases the ring for good.
    pub(in crate::qp) fn end(&mut self) {
        *self = Self::new(None);
    }

    pub(in crate::qp) const fn set_attrs(&mut self, attrs: QpAttrs) {
        self.attrs = attrs;
        self.own_gid = None;
    }

    /// Discards the message that has arrived in part.
    pub(in crate::qp) fn forget_message(&mut self) {
        self.epoch = Epoch::begin();
    }
}
