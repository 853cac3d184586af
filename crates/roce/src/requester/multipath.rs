//! Selection of one of several equal-cost paths for a connection.
//!
//! Switches select among equal-cost paths by a hash of addresses and ports, so a connection stays on one path whatever
//! happens there. Between two endpoints that have agreed on it ([`super::selective`]), a connection takes another path
//! by changing its UDP source port, as TCP does in Linux ("PLB", Qureshi et al., SIGCOMM 2022, and after timeouts). The
//! bits in which the port differs from the connection's own are its *entropy*. There are two reasons to change it.
//!
//! * **Congestion.** Several round trips were congested: a packet was marked, the window was cut, or the queueing delay
//!   was close to its maximum. The connection *moves* to another path. If a few paths in a row are congested, others
//!   collide on each of them, and the connection *sprays*: each packet takes another path ("REPS", Bonato et al.,
//!   2024). After a while without congestion, it returns to one path. Packets that were sent on other paths count as
//!   late and not as lost for longer than packets of one path.
//! * **Silence.** The second probe in a row, and each ACK timeout, starts a *search*: each packet takes another path,
//!   until a response arrives. A connection that has just moved and gets no response returns to its previous path
//!   first.
//!
//! Responses take the path whose entropy the last request had, so the requester selects the path of both directions:
//! only the requester has timers and observes the congestion of READ responses. A response also tells which request got
//! through.

use std::time::Duration;

use pvrdma_verbs_types::SendOp;

use super::Requester;
use super::path_choice::{Decision, Mode, PROBES, Round};
use super::request::Stage;
use crate::path::entropy_of;
use crate::wire::{Ecn, Operation, Packet};

impl Requester {
    /// Handles a congestion notification about packets of this connection. It takes the path of the marked packet, so
    /// its UDP source port, `port`, identifies that path.
    pub fn handle_notification(&mut self, port: Option<u16>) {
        self.multipath.marked = true;
        if let Some((port, own)) = port.zip(self.multipath.peer_port) {
            self.leave_path(entropy_of(port, own));
        }
    }

    /// Stops to use a congested path, if packets are spread.
    fn leave_path(&mut self, entropy: u16) {
        if self.multipath.mode == Mode::Spraying {
            self.multipath.leave(entropy);
        }
    }

    /// Returns `true` if the connection may take other paths than its own.
    fn may_rehash(&self) -> bool {
        self.multipath.enabled && self.has_agreed() && self.path.source_port().is_some()
    }

    /// Selects the path with this entropy for the following packets.
    pub(super) fn set_entropy(&mut self, entropy: u16) {
        self.path.turn(self.multipath.entropy ^ entropy);
        self.multipath.entropy = entropy;
    }

    /// Examines the path of a response.
    #[inline]
    pub(super) fn on_response_path(&mut self, packet: &Packet<'_>) {
        if !self.multipath.enabled || !self.has_agreed() {
            return;
        }
        let network = &packet.header.network;
        let is_data = packet.header.bth.opcode.info().is_some_and(|info| info.operation == Operation::ReadResponse);
        let marked = network.ecn() == Ecn::Congested && is_data;
        self.multipath.marked |= marked;
        let Some(port) = network.source_port() else { return };
        let entropy = entropy_of(port, *self.multipath.peer_port.get_or_insert(port));
        self.multipath.peer_follows |= entropy != 0;
        if entropy == self.multipath.entropy {
            self.multipath.fallback = None;
        }
        if marked {
            self.leave_path(entropy);
        }
        if self.multipath.mode == Mode::Searching {
            self.multipath.mode = Mode::Single;
            self.multipath.copies = 0;
            // The response got through, and so did the request that it answers.
            if self.multipath.peer_follows {
                self.set_entropy(entropy);
            }
        }
    }

    /// Handles progress of `snd.una`: a round trip may be over.
    #[inline]
    pub(super) fn watch_path(&mut self, now: Duration) {
        if self.multipath.enabled && self.snd.una >= self.multipath.until {
            self.end_round_trip(now);
        }
    }

    fn end_round_trip(&mut self, now: Duration) {
        let (una, max) = (self.snd.una, self.snd.max);
        self.multipath.until = max.max(una + 1);
        let cuts = self.recovery.cuts();
        let cut = std::mem::replace(&mut self.multipath.cuts, cuts) != cuts;
        let marked = std::mem::take(&mut self.multipath.marked);
        let round = if cut {
            Round::Cut
        } else if marked || self.recovery.is_late() {
            Round::Congested
        } else {
            Round::Calm
        };
        match self.multipath.end_round_trip(round) {
            Decision::Spray if self.has_reads() => self.multipath.hold(),
            Decision::Spray if self.may_rehash() => {
                self.stats.rehashed += 1;
                self.multipath.spray();
                self.recovery.tolerate_until(Duration::MAX);
            }
            Decision::Move if self.may_rehash() => {
                self.stats.rehashed += 1;
                let entropy = self.multipath.change_path();
                self.set_entropy(entropy);
                self.end_spraying(now);
            }
            Decision::Settle => self.end_spraying(now),
            Decision::Stay if self.multipath.mode == Mode::Spraying && self.has_reads() => self.end_spraying(now),
            Decision::Stay | Decision::Move | Decision::Spray => {}
        }
    }

    /// Returns `true` if a READ was started. The responder sends the responses of a READ on one path, so spreading its
    /// requests would only reorder them.
    fn has_reads(&self) -> bool {
        let mut started = self.requests.iter().take_while(|request| request.stage == Stage::Started);
        started.any(|request| matches!(request.wr.op, SendOp::Read { .. }))
    }

    /// Returns to a single path. Packets in transit may still overtake others.
    fn end_spraying(&mut self, now: Duration) {
        self.multipath.mode = Mode::Single;
        self.recovery.tolerate_until(now.saturating_add(self.rto().unwrap_or_default().saturating_mul(2)));
    }

    /// Starts or continues a search, as `probes` consecutive probes got no response.
    pub(super) fn search_path(&mut self, now: Duration, probes: u32) {
        if let Some(before) = self.multipath.fallback.take() {
            self.stats.rehashed += 1;
            self.multipath.begin_again();
            self.set_entropy(before);
        } else if probes >= PROBES && self.may_rehash() {
            if self.multipath.mode == Mode::Spraying {
                self.multipath.hold();
                self.end_spraying(now);
            }
            self.stats.rehashed += 1;
            self.multipath.search();
        }
    }

    /// Selects the path of the packet at `snd.nxt`, which is `lost` if it was lost on another one.
    pub(super) fn select_path(&mut self, lost: bool) {
        let entropy = match self.multipath.mode {
            Mode::Single => return,
            Mode::Spraying => self.multipath.spread(self.snd.nxt, lost),
            Mode::Searching => self.multipath.other_entropy(),
        };
        self.set_entropy(entropy);
    }

    /// Returns `true` if one more copy of the oldest packet is to be sent.
    pub(super) const fn take_copy(&mut self) -> bool {
        let left = self.multipath.copies.checked_sub(1);
        if let Some(left) = left {
            self.multipath.copies = left;
        }
        left.is_some()
    }
}
