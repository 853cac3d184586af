//! Requests that arrive while the device is paused.
//!
//! A peer that gets no response repeats its request a few times, and then ends the connection. An RNR NAK makes it wait
//! instead, and spends none of these retries. It does spend one of the peer's RNR retries, unless their number is 7,
//! which means no limit. Therefore a packet that [`HeldRequests`] does not name is dropped, as if it were lost.

use std::time::Duration;

use pvrdma_link::Frames;
use pvrdma_roce::wire::{MAX_FRAME, Operation, Packet};

use super::flow::Flow;
use super::sources::{Sources, Verdict};
use crate::drive::Endpoint;
use crate::path::directory::Node;
use crate::port::counters::PortCounters;
use crate::port::rules::HeldRequests;
use crate::port::{Arrival, Port};
use crate::share::token_bucket::TokenBucket;

/// Time from the beginning of a pause until requests are held off. A hand-over takes less, and after it the repeated
/// request is executed sooner without an RNR wait.
const GRACE: Duration = Duration::from_millis(50);
/// Time for which a peer is asked to wait: 40.96 ms (IBA table 45). This is also the most that a hold adds to a pause.
const TIMER: u8 = 24;
/// Maximum number of NAKs per second. With more than 400 active connections, some requests are dropped, and the peer
/// spends a retry before it is held off.
const RATE: u64 = 10_000;
/// Maximum number of NAKs at once.
const BURST: u64 = 1000;

/// Holds off the peers of a paused device.
#[derive(Debug)]
pub(super) struct Hold {
    /// Budget of NAKs.
    budget: TokenBucket,
}

impl Default for Hold {
    fn default() -> Self {
        Self { budget: TokenBucket::new(RATE, Some(BURST)) }
    }
}

impl Hold {
    /// Answers the requests that are to be held off, and drops everything else.
    #[cold]
    pub(super) fn receive<'p>(
        &mut self,
        port: &Port,
        node: &Node<Endpoint>,
        sources: &mut Sources,
        arrivals: &mut dyn Iterator<Item = Arrival<'p>>,
    ) {
        let now = node.adapter.engine.now();
        let mut available = match port.held_requests() {
            HeldRequests::Off => 0,
            _ if !node.adapter.paused.has_lasted(GRACE, now) => 0,
            _ => self.budget.available(now),
        };
        let (mut held, mut dropped, mut naks) = (0, 0, port.buffer());
        for arrival in arrivals {
            if available > 0 && hold_off(port, node, sources, &arrival, &mut naks) {
                available -= 1;
                held += 1;
            } else {
                dropped += 1;
            }
        }
        self.budget.spend(held);
        PortCounters::add(&port.counters.wire_held, held);
        PortCounters::add(&port.counters.wire_dropped_paused, dropped);
        port.send(naks);
        sources.end_batch();
    }
}

/// Adds an RNR NAK to `naks` if the frame is a request to be held off, which the device would accept without the
/// pause.
fn hold_off(
    port: &Port,
    node: &Node<Endpoint>,
    sources: &mut Sources,
    arrival: &Arrival<'_>,
    naks: &mut Frames,
) -> bool {
    let Ok(packet) = Packet::parse(arrival.frame) else { return false };
    let operation = packet.header.bth.opcode.info().map(|info| info.operation);
    if port.held_requests() != HeldRequests::All && operation != Some(Operation::Send) {
        return false;
    }
    let flow = Flow::of(&packet);
    node.adapter.gids.contains(flow.to)
        && !node.adapter.faults.is_cut(flow.to.gid)
        && sources.judge(node, flow.to.beside(flow.from), flow.station) == Verdict::Taken
        && node
            .qp(flow.qpn)
            .is_some_and(|endpoint| naks.push_with(MAX_FRAME, |room| endpoint.hold_off(&packet, TIMER, room)))
}
