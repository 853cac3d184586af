//! Selection of one of several equal-cost paths for a connection.
//!
//! Switches select among equal-cost paths by a hash of addresses and ports, so a connection stays on one path whatever
//! happens there. Between two endpoints that have agreed on it ([`super::selective`]), a connection moves to another
//! path by changing its UDP source port, as TCP does in Linux ("PLB", Qureshi et al., SIGCOMM 2022, and after
//! timeouts). The bits in which the port differs from the connection's own are its *entropy*. There are two reasons to
//! move.
//!
//! * **Congestion.** Several round trips in a row were congested: a packet was marked, the window was cut, or the
//!   queueing delay was close to its maximum. A connection that has moved and meets congestion again waits twice as
//!   long before its next move, because other paths are probably no better. After a while without congestion, this is
//!   forgotten. Right after a move, packets of the old path count as late and not as lost.
//! * **Silence.** The second probe in a row, and each ACK timeout, starts a *search*: each packet takes another path,
//!   until a response arrives. A connection that has just moved and gets no response returns to its previous path
//!   first.
//!
//! Responses take the path whose entropy the last request had, so the requester selects the path of both directions:
//! only the requester has timers and observes the congestion of READ responses. A response also tells which request got
//! through.

use std::time::Duration;

use super::Requester;
use super::path_choice::{COPIES, PROBES};
use crate::path::ENTROPY;
use crate::wire::{Ecn, Operation, Packet};

impl Requester {
    /// Handles a congestion notification about packets of this connection.
    pub const fn handle_notification(&mut self) {
        self.multipath.marked = true;
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
        let header = &packet.header;
        if header.network.ecn() == Ecn::Congested
            && header.bth.opcode.info().is_some_and(|info| info.operation == Operation::ReadResponse)
        {
            self.multipath.marked = true;
        }
        let Some(port) = header.network.source_port() else { return };
        let entropy = (port ^ *self.multipath.peer_port.get_or_insert(port)) & ENTROPY;
        self.multipath.peer_follows |= entropy != 0;
        if entropy == self.multipath.entropy {
            self.multipath.fallback = None;
        }
        if self.multipath.searching {
            self.multipath.searching = false;
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
        let congested = marked || cut || self.recovery.is_late();
        if self.multipath.end_round_trip(congested, una == max) && self.may_rehash() {
            self.multipath.on_move();
            self.multipath.fallback = Some(self.multipath.entropy);
            self.rehash();
            let tolerant = now.saturating_add(self.rto().unwrap_or_default().saturating_mul(2));
            self.scoreboard.on_rehash(tolerant, max);
            self.responses.on_rehash(tolerant);
        }
    }

    /// Starts or continues a search, as `probes` consecutive probes got no response.
    pub(super) fn search_path(&mut self, probes: u32) {
        if let Some(before) = self.multipath.fallback.take() {
            self.stats.rehashed += 1;
            self.set_entropy(before);
        } else if probes >= PROBES && self.may_rehash() {
            self.multipath.searching = true;
            self.multipath.copies = COPIES;
            self.rehash();
        }
    }

    fn rehash(&mut self) {
        self.stats.rehashed += 1;
        self.multipath.mixed = true;
        self.take_other_path();
    }

    /// Selects another path for the next packet.
    pub(super) fn take_other_path(&mut self) {
        let entropy = self.multipath.other_entropy();
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
