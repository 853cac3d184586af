//! Rate of a QP whose peer has sent it congestion notifications (IBA annex A17.9): DCQCN's reaction point.
//!
//! A QP without notifications pays one load of a flag for each packet.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_base::Snapshot;
use pvrdma_roce::{
    Congestion, ReactionPoint,
    wire::{Operation, Packet},
};

/// Flag of a notification, above its 16 bits of a port.
const NEWS: u32 = 1 << 16;

/// A congestion notification.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Notification {
    /// UDP source port of the notification. `None`: RoCE v1 has no ports.
    pub(crate) port: Option<u16>,
}

/// Congestion state of a QP.
#[derive(Debug, Default)]
pub struct RateLimiter {
    /// Set while `reaction` holds a value. Only changes with `reaction` locked.
    on: AtomicBool,
    /// The rate that both halves share.
    reaction: Mutex<Option<Box<ReactionPoint>>>,
    /// The last notification, if the requester has not handled it yet: [`NEWS`] and its source port. 0: none.
    news: AtomicU32,
    /// Time of the last notification sent for this QP, in nanoseconds. 0: never.
    notified: AtomicU64,
}

impl RateLimiter {
    /// Returns `true` if the rate is limited because of notifications.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Returns the rate of both halves in bytes per second. `null`: not limited.
    pub fn inspect(&self) -> Snapshot<Option<u64>> {
        self.reaction.try_lock().map(|reaction| reaction.as_ref().map(|point| point.rate())).into()
    }

    /// Returns the time at which the next packet can be sent, if that is not now.
    #[inline]
    pub fn blocked_until(&self, now: Duration) -> Option<Duration> {
        if self.is_on() { self.ask(now) } else { None }
    }

    #[cold]
    fn ask(&self, now: Duration) -> Option<Duration> {
        let mut reaction = self.reaction.lock();
        let blocked = reaction.as_mut()?.blocked_until(now);
        if blocked.is_none() && reaction.as_ref().is_some_and(|point| point.has_recovered()) {
            *reaction = None;
            self.on.store(false, Ordering::Relaxed);
        }
        blocked
    }

    /// Accounts for packets that have been sent.
    #[inline]
    pub fn sent(&self, now: Duration, bytes: u64) {
        if self.is_on()
            && let Some(point) = &mut *self.reaction.lock()
        {
            point.sent(now, bytes);
        }
    }

    /// Reduces the rate. `seed` differs between queue pairs; `port` is the UDP source port of the notification. Returns
    /// `true` if the rate was cut.
    pub fn notify(&self, config: &Congestion, now: Duration, seed: u64, port: Option<u16>) -> bool {
        let mut reaction = self.reaction.lock();
        let cut = reaction.get_or_insert_with(|| Box::new(ReactionPoint::new(config, now, seed))).notify(now);
        self.news.store(NEWS | u32::from(port.unwrap_or(0)), Ordering::Relaxed);
        self.on.store(true, Ordering::Relaxed);
        cut
    }

    /// Returns the last notification that has arrived since the previous call.
    pub(crate) fn take_notification(&self) -> Option<Notification> {
        if self.news.load(Ordering::Relaxed) == 0 {
            return None;
        }
        // A reset may have come in between.
        let [_, flag, high, low] = self.news.swap(0, Ordering::Relaxed).to_be_bytes();
        let port = Some(u16::from_be_bytes([high, low])).filter(|&port| port != 0);
        (flag != 0).then_some(Notification { port })
    }

    /// Returns `true` if a notification can be sent now, and records its time. Only the thread that
    /// handles received packets calls this, so the load and the store need not be one atomic operation.
    fn may_notify(&self, interval: Duration, now: Duration) -> bool {
        let now = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX).max(1);
        let interval = u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX);
        let last = self.notified.load(Ordering::Relaxed);
        let may = last == 0 || now >= last.saturating_add(interval);
        if may {
            self.notified.store(now, Ordering::Relaxed);
        }
        may
    }

    /// Returns `true` if a notification about this packet, which the connection has accepted and which arrived with a
    /// congestion mark, must be sent now, and records its time.
    pub fn is_notification_due(&self, packet: &Packet<'_>, config: &Congestion, now: Duration) -> bool {
        let operation = packet.header.bth.opcode.info().map(|info| info.operation);
        // Responses acknowledge packets that were sent long ago, so a mark on them would describe an old state of the
        // path.
        let old_news = matches!(operation, Some(Operation::Acknowledge | Operation::AtomicAcknowledge));
        !old_news && self.may_notify(config.cnp_interval, now)
    }

    /// Resets the congestion state, together with the QP's state.
    pub fn reset(&self) {
        let mut reaction = self.reaction.lock();
        *reaction = None;
        self.on.store(false, Ordering::Relaxed);
        self.news.store(0, Ordering::Relaxed);
        self.notified.store(0, Ordering::Relaxed);
    }
}
