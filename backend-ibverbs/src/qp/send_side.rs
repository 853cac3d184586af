//! Send side of a queue pair.

use std::collections::VecDeque;

use pvrdma_verbs::SendSource;
use pvrdma_verbs_types::{SendWr, WcStatus};

use super::address_handles::AddressHandles;
use crate::inflight::SendEntry;
use crate::sys;
use crate::verbs::SendBatch;

/// The guest's ring and working buffers.
pub(super) struct SendSide {
    pub(super) source: Box<dyn SendSource>,
    pub(super) wr: SendWr,
    /// `wr` holds a request that waits for the requests before it.
    pub(super) held: bool,
    pub(super) batch: SendBatch,
    pub(super) sges: Vec<sys::Sge>,
    /// Requests that failed without being posted, and complete once those before them have ended.
    pub(super) failed: VecDeque<(SendEntry, WcStatus)>,
    /// Cached address handles of a datagram QP.
    pub(super) ahs: AddressHandles,
}

impl SendSide {
    pub(super) fn new(source: Box<dyn SendSource>) -> Self {
        Self {
            source,
            wr: SendWr::default(),
            held: false,
            batch: SendBatch::default(),
            sges: Vec::new(),
            failed: VecDeque::new(),
            ahs: AddressHandles::default(),
        }
    }

    /// Resets the side.
    pub(super) fn reset(&mut self) {
        self.source.reset();
        self.held = false;
        self.failed.clear();
        self.ahs.clear();
    }
}
