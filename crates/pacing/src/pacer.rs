//! Control loops around the requester of a connection.

use std::time::Duration;

use pvrdma_link::Frames;
use pvrdma_roce::{Requester, wire::MAX_FRAME};
use pvrdma_verbs_types::RequesterOps;

use crate::peer_window::{Runner, WindowShare};
use crate::rate_limiter::RateLimiter;

/// Part of a requester in the control loops of its device.
#[derive(Debug)]
pub struct Pacer<R: Runner> {
    share: WindowShare<R>,
    /// Time until which the rate of the connection, or a quiet period for another one, delays it.
    paced: Option<Duration>,
}

/// Reason why a control loop has ended a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stop {
    /// A quiet period for another connection to the peer.
    Quiet,
    /// The window to the peer, which all connections to it share.
    PeerWindow,
    /// The rate of the connection.
    Rate,
}

/// Result of [`Pacer::build`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Built {
    /// There is a packet in the batch.
    pub any: bool,
    /// Reason for the end of the batch, if it was a control loop.
    pub stop: Option<Stop>,
}

impl<R: Runner> Pacer<R> {
    /// Starts with this share of the window to the peer.
    pub const fn new(share: WindowShare<R>) -> Self {
        Self { share, paced: None }
    }

    /// Time until which the rate of the connection, or a quiet period, delays it.
    pub const fn paced(&self) -> Option<Duration> {
        self.paced
    }

    /// Returns the PSNs of this connection that count in the window to the peer.
    pub fn counted(&self) -> u64 {
        self.share.counted()
    }

    /// Handles a passed deadline of the requester. Returns `true` if a quiet period begins.
    pub fn handle_timeout(&self, now: Duration, transport: &mut Requester, ops: &mut impl RequesterOps) -> bool {
        let before = transport.stats().timeouts;
        transport.handle_timeout(now, ops);
        let starved = transport.is_starved() && transport.stats().timeouts > before;
        starved && self.share.ask_for_quiet(now, transport.rtt())
    }

    /// Begins a turn: checks the window on behalf of other connections, if this one has to.
    #[inline]
    pub fn begin(&mut self, now: Duration, transport: &Requester) {
        self.paced = None;
        self.share.watch(now, || transport.rto());
    }

    /// Builds a batch of up to `most` packets. `goes_on` gets the bytes of the last packet, at first 0, and returns
    /// `false` to end the batch.
    #[inline]
    pub fn build(
        &mut self,
        now: Duration,
        (transport, rate): (&mut Requester, &RateLimiter),
        ops: &mut impl RequesterOps,
        (frames, most): (&mut Frames, usize),
        mut goes_on: impl FnMut(u64) -> bool,
    ) -> Built {
        let mut built = Built { any: false, stop: None };
        if rate.is_on() {
            transport.request_ack();
            if let Some(notification) = rate.take_notification() {
                transport.handle_notification(notification.port);
            }
        }
        // A starved connection to the same peer makes this one pause, if it has packets to send.
        self.paced = self.share.quiet_until(now, transport.is_starved()).filter(|_| !transport.is_empty());
        if self.paced.is_some() {
            built.stop = Some(Stop::Quiet);
            return built;
        }
        let mut bytes = 0;
        while goes_on(bytes) && frames.len() < most {
            if !(transport.next_is_retransmission() || self.share.may_send(now, || transport.rto())) {
                built.stop = Some(Stop::PeerWindow);
                break;
            }
            self.paced = rate.blocked_until(now);
            if self.paced.is_some() {
                built.stop = Some(Stop::Rate);
                break;
            }
            if self.share.ends_turn() {
                transport.request_ack();
            }
            let before = frames.bytes();
            if !frames.push_with(MAX_FRAME, |room| transport.poll_transmit(now, ops, room)) {
                break;
            }
            self.share.sent(transport.in_flight());
            bytes = frames.bytes().saturating_sub(before) as u64;
            rate.sent(now, bytes);
            built.any = true;
        }
        built
    }

    /// Accounts for responses that the requester has processed.
    #[inline]
    pub fn acked(&mut self, transport: &Requester) {
        self.share.acked(transport.in_flight());
    }

    /// Ends the turn, because there is nothing more to send for now.
    #[inline]
    pub fn pause(&mut self, in_flight: u64) {
        self.share.pause(in_flight);
    }

    /// Returns the time at which the connection must run again, besides the deadline of the requester.
    #[inline]
    pub fn deadline(&self) -> Option<Duration> {
        self.paced.into_iter().chain(self.share.deadline()).min()
    }
}
