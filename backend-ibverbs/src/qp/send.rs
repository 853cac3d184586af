//! Send queue: moves requests from the guest's ring to the host's queue.

use std::sync::atomic::Ordering;

use pvrdma_guest_memory::DmaView;
use pvrdma_verbs_types::{Completion, QpState, SendFlags, WcStatus};

use super::queue_pair::{FLUSH_BUDGET, Qp};
use super::send_side::SendSide;
use super::translate::Step;
use crate::counters::bump;
use crate::inflight::{SendEntry, WrId};
use crate::mr::Bind;
use crate::sys::{SEND_FENCE, SEND_SIGNALED, SEND_SOLICITED};
use crate::verbs::HostQp;

/// Maximum number of requests posted to the host at once.
const BATCH: usize = 32;

/// State of the guest's ring after a batch was taken from it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ring {
    /// The ring may hold more.
    More,
    /// The ring is empty.
    Empty,
    /// The ring cannot be read.
    Broken,
}

impl Qp {
    /// Posts sends, or flushes them.
    pub(crate) fn run_send(&self) {
        // The side is locked first: a thread that ends the QP takes the host's object and then waits for this thread to
        // release its side.
        let mut guard = self.send.lock();
        let Some(side) = guard.as_mut() else { return };
        let Some(host) = self.host() else { return };
        loop {
            // The flag is set before the ring is read: a completion from here on causes another look at the ring.
            self.send_waits.store(true, Ordering::SeqCst);
            match self.state() {
                QpState::Rts if self.is_unconnected() => return,
                QpState::Rts => {
                    if !self.post_some(&host, side) {
                        return;
                    }
                }
                QpState::Error | QpState::Sqe => return self.flush_sends(side),
                QpState::Reset | QpState::Init | QpState::Rtr | QpState::Sqd => return,
            }
        }
    }

    /// Posts one batch. Returns `true` if the caller should try again.
    fn post_some(&self, host: &HostQp, side: &mut SendSide) -> bool {
        let mut binds = Vec::new();
        let view = self.adapter.memory.view();
        let ring = self.fill(&view, side, &mut binds);
        // A batch that binds a window holds the region that it binds to, which must not outlive its memory. The view
        // keeps the memory in the map until the batch is posted and cleared.
        let _view = (!binds.is_empty()).then_some(view);
        // When the guest adds requests, a doorbell follows, so none of them waits for completions.
        if ring == Ring::Empty && side.failed.is_empty() {
            self.send_waits.store(false, Ordering::SeqCst);
        }
        let count = side.batch.len();
        if count == 0 {
            // The first failure is reported once all requests before it have ended.
            let failed = !side.failed.is_empty() && self.send_inflight.lock().is_empty() && self.fail_local(side);
            return failed || ring == Ring::Broken;
        }
        let (taken, result) = host.post_send(&mut side.batch);
        side.batch.clear();
        self.adapter.counters.sends_posted.add(taken as u64);
        match result {
            Ok(()) => {
                binds.iter().for_each(Bind::posted);
                ring != Ring::Empty
            }
            Err(error) => {
                let log = &self.adapter.log;
                log.warn(module_path!(), format_args!("the host refuses a request of QP {}: {error}", self.qpn));
                let mut inflight = self.send_inflight.lock();
                for _ in taken..count {
                    if let Some(entry) = inflight.pop_newest() {
                        side.failed.push_front((entry, WcStatus::Flushed));
                    }
                }
                if let Some((_, status)) = side.failed.front_mut() {
                    *status = WcStatus::LocalQpOperation;
                }
                true
            }
        }
    }

    /// Moves requests from the ring to the batch, and notes them as in flight. `binds` receives their effects on
    /// regions.
    fn fill(&self, view: &DmaView<'_>, side: &mut SendSide, binds: &mut Vec<Bind>) -> Ring {
        side.batch.clear();
        while side.batch.len() < BATCH && side.failed.is_empty() && binds.is_empty() {
            if self.send_inflight.lock().len() >= self.depth {
                break;
            }
            if !std::mem::take(&mut side.held) {
                match side.source.pop(view, &mut side.wr) {
                    Ok(true) => side.source.retire(view),
                    Ok(false) => return Ring::Empty,
                    Err(error) => {
                        self.broken_ring(view, &error);
                        return Ring::Broken;
                    }
                }
            }
            match self.translate(view, side) {
                Step::Post(op, entry) => {
                    let flags = host_flags(side.wr.flags);
                    // A bind ends the batch, which is posted at once: the next request may need the new key, and the
                    // host's library looks at the key when that request is posted.
                    binds.extend(entry.bind.clone());
                    let mut inflight = self.send_inflight.lock();
                    let id = WrId { recv: false, epoch: inflight.epoch, number: inflight.next() };
                    inflight.push(entry);
                    side.batch.push(id.encode(), flags, op, &side.sges);
                }
                Step::Fail(entry, status) => side.failed.push_back((entry, status)),
                Step::Hold => {
                    side.held = true;
                    break;
                }
            }
        }
        Ring::More
    }

    /// Completes the oldest request with its own error, and ends the queue.
    fn fail_local(&self, side: &mut SendSide) -> bool {
        let Some((entry, status)) = side.failed.pop_front() else { return false };
        bump(&self.adapter.counters.local_errors);
        if self.qp_type.is_datagram() {
            // This has no effect if the QP was reset or ended in the meantime.
            self.step(QpState::Rts, QpState::Sqe);
        } else {
            self.set_error();
            self.stop_host();
        }
        let view = self.adapter.memory.view();
        self.publish_send(&view, &entry, status);
        true
    }

    fn publish_send(&self, view: &DmaView<'_>, entry: &SendEntry, status: WcStatus) {
        if let Some(bind) = &entry.bind {
            bind.ended(status == WcStatus::Success);
        }
        let _flight = self.send_inflight.lock();
        if self.is_muted() || status == WcStatus::Success && !entry.signaled {
            return;
        }
        let completion = Completion {
            byte_len: if status == WcStatus::Success { entry.byte_len } else { 0 },
            ..Completion::new(self.cookie, entry.wr_id, entry.opcode, status)
        };
        self.send_cq.publish(&self.adapter, view, &completion);
    }

    /// Flushes requests in order: the host flushes its own, then those follow that failed locally, then those in the
    /// guest's ring.
    fn flush_sends(&self, side: &mut SendSide) {
        if !self.send_inflight.lock().is_empty() {
            return;
        }
        let view = self.adapter.memory.view();
        for (entry, _) in std::mem::take(&mut side.failed) {
            self.publish_send(&view, &entry, WcStatus::Flushed);
        }
        for _ in 0..FLUSH_BUDGET {
            if !std::mem::take(&mut side.held) {
                match side.source.pop(&view, &mut side.wr) {
                    Ok(true) => side.source.retire(&view),
                    Ok(false) | Err(_) => break,
                }
            }
            let entry = self.entry(&side.wr, 0);
            self.publish_send(&view, &entry, WcStatus::Flushed);
        }
    }
}

/// Signals every request on the host: each completion also reports that all requests before it have ended.
fn host_flags(flags: SendFlags) -> u32 {
    let bit = |flag, bit| if flags.contains(flag) { bit } else { 0 };
    SEND_SIGNALED | bit(SendFlags::FENCE, SEND_FENCE) | bit(SendFlags::SOLICITED, SEND_SOLICITED)
}
