//! The send queue of a stream.

use std::collections::VecDeque;

use pvrdma_verbs_types::{RequesterOps, SendFlags, SendOp, SendWr, Sge, WcStatus};

/// Finished requests that are kept to reuse their buffers.
const MAX_SPARE: usize = 8;

/// Progress of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// Not started.
    Posted,
    /// Started; this number of bytes of the message was built.
    Building(u32),
    /// All of it was built, up to this position of the stream.
    Built(u64),
    /// A READ that waits for its response.
    Reading,
    /// Nothing is left to do.
    Done,
    /// Fails as soon as all earlier requests are done.
    Failed(WcStatus),
}

/// A posted request.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) wr: SendWr,
    pub(super) length: u32,
    pub(super) stage: Stage,
}

impl Request {
    /// Returns `true` if its local memory belongs to the region with this key, ignoring the key byte that consumers
    /// choose.
    fn uses(&self, key: u32) -> bool {
        self.wr.sges.iter().any(|sge| sge.length > 0 && (sge.lkey ^ key) >> 8 == 0)
    }

    /// Byte count of its completion: the number of bytes that arrived in local memory.
    const fn byte_len(&self) -> u32 {
        if self.wr.op.has_result() { self.length } else { 0 }
    }
}

/// A READ that was sent and not answered completely.
#[derive(Clone, Copy, Debug)]
pub(super) struct OpenRead {
    /// The invented STag.
    pub(super) sink: u32,
    pub(super) length: u32,
    /// Bytes that have arrived.
    pub(super) placed: u32,
    /// Number of the request. `None`: the ready-to-receive message.
    pub(super) request: Option<u64>,
}

/// Requests in posting order. Those in front of `next` have been built, or executed if they are local.
#[derive(Debug, Default)]
pub(super) struct Requests {
    queue: VecDeque<Request>,
    /// Number of the first request; numbers are never reused.
    first: u64,
    next: usize,
    /// Fast registrations that were not started.
    page_lists: usize,
    spare: Vec<SendWr>,
}

impl Requests {
    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(super) const fn page_lists(&self) -> usize {
        self.page_lists
    }

    pub(super) const fn bytes_of_request(sges: usize) -> usize {
        size_of::<Request>().saturating_add(sges.next_power_of_two().saturating_mul(size_of::<Sge>()))
    }

    pub(super) fn shrink_to(&mut self, requests: usize) {
        self.queue.shrink_to(requests);
        self.spare = Vec::new();
    }

    pub(super) fn spare(&mut self) -> SendWr {
        self.spare.pop().unwrap_or_default()
    }

    pub(super) fn front_stage(&self) -> Option<Stage> {
        self.queue.front().map(|request| request.stage)
    }

    pub(super) fn push(&mut self, wr: SendWr, length: u32, stage: Stage) {
        self.page_lists += usize::from(matches!(wr.op, SendOp::FastRegister(_)));
        self.queue.push_back(Request { wr, length, stage });
    }

    /// The request to be built next, with its number.
    pub(super) fn next(&mut self) -> Option<(u64, &mut Request)> {
        let number = self.first.wrapping_add(self.next as u64);
        self.queue.get_mut(self.next).map(|request| (number, request))
    }

    /// Goes on to the next request.
    pub(super) fn advance(&mut self) {
        self.next = self.next.saturating_add(1).min(self.queue.len());
    }

    /// Returns the request with this number, if it is not done.
    pub(super) fn get_mut(&mut self, number: u64) -> Option<&mut Request> {
        let index = usize::try_from(number.checked_sub(self.first)?).ok()?;
        self.queue.get_mut(index)
    }

    /// Returns the number of the first request that was started, is not done, and satisfies `wanted`.
    pub(super) fn find_started(&self, wanted: impl Fn(&Request) -> bool) -> Option<u64> {
        let is_started = |stage| matches!(stage, Stage::Building(_) | Stage::Built(_) | Stage::Reading);
        let index = self.queue.iter().position(|request| is_started(request.stage) && wanted(request))?;
        Some(self.first.wrapping_add(index as u64))
    }

    /// Returns `true` if the next request that was not started may start now.
    pub(super) fn next_may_start(&self) -> bool {
        let Some(request) = self.queue.get(self.next) else { return false };
        let mut reading = self.queue.iter().take(self.next).filter(|earlier| earlier.stage == Stage::Reading);
        match &request.wr.op {
            // The data of earlier READs must arrive before their memory is invalidated or registered differently. The
            // memory of other requests was read when they were built.
            SendOp::LocalInvalidate(invalidate) if reading.clone().any(|earlier| earlier.uses(invalidate.key)) => false,
            SendOp::FastRegister(register) if reading.clone().any(|earlier| earlier.uses(register.key)) => false,
            _ => !request.wr.flags.contains(SendFlags::FENCE) || reading.next().is_none(),
        }
    }

    /// Starts the next request.
    pub(super) fn start_next(&mut self, ops: &mut impl RequesterOps) {
        let Some(request) = self.queue.get_mut(self.next) else { return };
        self.page_lists -= usize::from(matches!(request.wr.op, SendOp::FastRegister(_)));
        request.stage = match ops.begin(&mut request.wr) {
            Err(status) => Stage::Failed(status),
            Ok(()) if request.wr.op.is_local() => Stage::Done,
            Ok(()) => Stage::Building(0),
        };
    }

    /// Completes the requests that are done, in order. Stops at a failed one and returns its status.
    pub(super) fn complete_done(&mut self, taken: u64, ops: &mut impl RequesterOps) -> Result<(), WcStatus> {
        while let Some(front) = self.queue.front() {
            match front.stage {
                Stage::Failed(status) => return Err(status),
                Stage::Done => {}
                Stage::Built(end) if end <= taken => {}
                Stage::Posted | Stage::Building(_) | Stage::Built(_) | Stage::Reading => return Ok(()),
            }
            let Some(request) = self.queue.pop_front() else { return Ok(()) };
            self.first = self.first.wrapping_add(1);
            self.next = self.next.saturating_sub(1);
            ops.finish(&request.wr, WcStatus::Success, request.byte_len());
            if self.spare.len() < MAX_SPARE {
                self.spare.push(request.wr);
            }
        }
        Ok(())
    }

    /// Completes all requests: the one with the number `blamed` with `status`, and all others as flushed.
    pub(super) fn end_all(&mut self, blamed: Option<u64>, status: WcStatus, ops: &mut impl RequesterOps) {
        for request in self.queue.drain(..) {
            let status = if Some(self.first) == blamed { status } else { WcStatus::Flushed };
            self.first = self.first.wrapping_add(1);
            ops.finish(&request.wr, status, 0);
        }
        (self.next, self.page_lists) = (0, 0);
    }

    /// Number of the first request that is not done.
    pub(super) const fn first(&self) -> u64 {
        self.first
    }
}
