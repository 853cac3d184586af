//! A device on a fake adapter that the test controls: handling of completions, refusals and events that no real adapter
//! produces on demand.

mod completions;
mod events;
pub(crate) mod huge_pages;
mod inspect;
mod memory;
mod peers;
mod protocol;
mod races;
mod requests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use parking_lot::Mutex;
use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{
    CompletionSink, Hca, QpInit, QueueError, QueuePair, RecvSource, SendSource,
    testing::{Completions, DEADLINE, End, Node, Ring, SEND},
};
use pvrdma_verbs_types::{QpCaps, QpType, Qpn, RecvWr, SendFlags, SendWr};

use crate::fake::FakeBackend;
use crate::handles::IbvCq;
use crate::hca::IbvHca;

/// Completion status, as the library's number.
const SUCCESS: i32 = 0;
/// QP state, as the library's number.
const RTS: i32 = 3;

/// Polls until a condition holds.
fn until(what: &str, so: impl Fn() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !so() {
        assert!(Instant::now() < end, "{what}");
        thread::yield_now();
    }
}

/// Creates a device with a queue pair that is connected to itself.
fn connected(backend: &FakeBackend) -> (End<IbvHca>, Node<IbvHca>) {
    let node = Node::new(backend, 1);
    let end = node.qp(QpType::Rc);
    end.connect(&end, |_| {});
    (end, node)
}

/// Returns the QPN on the host.
fn qpn(end: &End<IbvHca>) -> u32 {
    end.qp.qpn().get()
}

/// Returns a counter of a device.
fn counter(node: &Node<IbvHca>, name: &str) -> u64 {
    node.hca.counters().iter().find(|counter| counter.name == name).unwrap().value
}

/// A send queue that returns the results that the test has written, including errors.
#[derive(Default)]
struct Script(Mutex<VecDeque<Result<SendWr, QueueError>>>);

impl Script {
    fn push(&self, next: Result<SendWr, QueueError>) {
        self.0.lock().push_back(next);
    }
}

/// The adapter's end of a script.
struct Reader(Arc<Script>);

impl SendSource for Reader {
    fn pop(&mut self, _: &DmaView<'_>, wr: &mut SendWr) -> Result<bool, QueueError> {
        let next = self.0.0.lock().pop_front().transpose()?;
        Ok(next.map(|next| *wr = next).is_some())
    }

    fn retire(&mut self, _: &DmaView<'_>) {}

    fn reset(&mut self) {}
}

/// Passes receives that a test posts to an `End` on to the adapter.
struct Receives(Arc<Ring<RecvWr>>);

impl RecvSource for Receives {
    fn pop(&mut self, _: &DmaView<'_>, wr: &mut RecvWr) -> Result<bool, QueueError> {
        Ok(self.0.posted.lock().pop_front().map(|next| *wr = next).is_some())
    }

    fn posted(&mut self, _: &DmaView<'_>) -> Result<u32, QueueError> {
        Ok(u32::try_from(self.0.posted.lock().len()).unwrap())
    }

    fn reset(&mut self) {}
}

/// Returns a signaled send without data.
fn request(wr_id: u64) -> SendWr {
    SendWr { wr_id, op: SEND, flags: SendFlags::SIGNALED, sges: Vec::new() }
}

/// Creates a queue pair whose sends come from a script, optionally with a completion queue of the test for them.
fn scripted(node: &Node<IbvHca>, send_cq: Option<IbvCq>) -> (End<IbvHca>, Arc<Script>) {
    let script = Arc::<Script>::default();
    let receives = Arc::<Ring<RecvWr>>::default();
    let (scq, rcq) = (Arc::<Completions>::default(), Arc::<Completions>::default());
    let make = |sink: &Arc<Completions>| {
        let sink: Arc<dyn CompletionSink> = Arc::<Completions>::clone(sink);
        node.hca.create_cq(sink).unwrap()
    };
    let cqs = (send_cq.unwrap_or_else(|| make(&scq)), make(&rcq));
    let cookie = 0x900;
    let qp = node
        .hca
        .create_qp(QpInit {
            cookie,
            qpn: Qpn::new(cookie),
            qp_type: QpType::Rc,
            pd: &node.pd,
            send_cq: &cqs.0,
            recv_cq: &cqs.1,
            srq: None,
            send_queue: Box::new(Reader(Arc::clone(&script))),
            recv_queue: Some(Box::new(Receives(Arc::clone(&receives)))),
            caps: QpCaps { max_send_wr: 64, max_recv_wr: 64, max_send_sge: 4, max_recv_sge: 4 },
            signal_all: false,
        })
        .unwrap();
    (
        End {
            node: node.number,
            qp_type: QpType::Rc,
            qp,
            sends: Arc::default(),
            receives,
            scq,
            rcq,
            cookie,
            drive: None,
            cqs,
        },
        script,
    )
}
