//! Congestion window shared by all connections of a device to one peer.
//!
//! Each requester has its own window, but with a thousand requesters those would allow a gigabyte in flight before the
//! first of them learns that most of it was lost. All connections to a peer therefore share a second window. While it
//! has room, it has no effect. When it is full, connections take turns of a few packets: protection domains in the
//! order of their first waiter, and the connections of each domain in turn. A domain without packets in flight gets a
//! turn immediately, because one turn per domain is reserved.
//!
//! All connections also check for a [quiet](pvrdma_roce::Quiet) period, in which they pause for a starved one.
//!
//! A connection to a peer that does not respond would never release its part of the window. So while connections wait,
//! PSNs that were already in flight a few round trips ago no longer count: either they are lost, or the peer is.

mod member;
mod quiet;

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use member::{Member, PROBE};
use parking_lot::{Mutex, MutexGuard};
use pvrdma_handover::{Level, Turn};
use pvrdma_verbs_types::Gid;
use quiet::SharedQuiet;

/// Maximum number of PSNs in flight to a peer, approximately: 4 MiB at the largest path MTU.
const MOST: i64 = 1024;
/// PSNs in a turn. The last packet requests an ACK, so that the turn's part of the window is released.
const QUANTUM: u64 = 64;
/// Maximum number of domains that use their reserved turn at the same time.
const RESERVED: usize = 16;
/// Multiple of the RTO after which a PSN no longer counts.
const STALE_RTOS: u32 = 2;
/// Lower bound of the time after which unacked PSNs no longer count. Also its value until a round trip has been
/// measured.
const STALE_MIN: Duration = Duration::from_millis(1);
const STALE_MAX: Duration = Duration::from_millis(100);
const STALE_UNKNOWN: Duration = Duration::from_millis(2);

/// The unit that runs a connection.
pub trait Runner {
    /// Lets the connection run soon, because it can continue.
    fn schedule(self: &Arc<Self>);
}

/// Windows of a device, by peer. `R` runs the connections.
#[derive(Debug)]
pub struct PeerWindows<R>(Mutex<HashMap<Gid, Weak<PeerWindow<R>>>>);

impl<R> Default for PeerWindows<R> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<R> PeerWindows<R> {
    /// Returns the window to a peer.
    fn window(&self, peer: Gid) -> Arc<PeerWindow<R>> {
        let mut windows = self.0.lock();
        if let Some(window) = windows.get(&peer).and_then(Weak::upgrade) {
            return window;
        }
        windows.retain(|_, window| window.strong_count() > 0);
        let window = Arc::default();
        windows.insert(peer, Arc::downgrade(&window));
        window
    }
}

/// The window to one peer.
#[derive(Debug)]
struct PeerWindow<R> {
    /// PSNs that count. May be slightly off while a connection and [`Queue::forgive`] account for the same PSNs.
    in_flight: Level,
    queue: Mutex<Queue<R>>,
    quiet: SharedQuiet,
}

impl<R> Default for PeerWindow<R> {
    fn default() -> Self {
        Self { in_flight: Level::default(), queue: Mutex::default(), quiet: SharedQuiet::default() }
    }
}

/// State that is needed when the window is full.
#[derive(Debug)]
struct Queue<R> {
    /// Protection domains with waiting connections, in the order of their turns.
    turns: VecDeque<u64>,
    /// Waiting connections, by domain.
    waiters: HashMap<u64, VecDeque<Arc<Member<R>>>>,
    /// Connection that has the reserved turn of each domain.
    reserved: HashMap<u64, Weak<Member<R>>>,
    /// State of all connections at the time `looked`.
    members: Vec<Snapshot<R>>,
    looked: Duration,
    /// Time at which one of the waiting connections checks again.
    watched_until: Duration,
}

impl<R> Default for Queue<R> {
    fn default() -> Self {
        Self {
            turns: VecDeque::new(),
            waiters: HashMap::new(),
            reserved: HashMap::new(),
            members: Vec::new(),
            looked: Duration::ZERO,
            watched_until: Duration::ZERO,
        }
    }
}

/// State of a connection at one moment.
#[derive(Debug)]
struct Snapshot<R> {
    member: Weak<Member<R>>,
    in_flight: u64,
    acked: u64,
}

impl<R> Queue<R> {
    /// Gives a connection the reserved turn of its domain. Returns `false` if another one has it.
    fn reserve(&mut self, member: &Arc<Member<R>>) -> bool {
        let is_taken = |holder: &Weak<Member<R>>| holder.upgrade().is_some_and(|holder| holder.is_sending());
        if self.reserved.get(&member.domain).is_some_and(is_taken) {
            return false;
        }
        if self.reserved.len() >= RESERVED {
            self.reserved.retain(|_, holder| is_taken(holder));
        }
        let may = self.reserved.len() < RESERVED;
        if may {
            self.reserved.insert(member.domain, Arc::downgrade(member));
        }
        may
    }

    fn push(&mut self, member: &Arc<Member<R>>) {
        let waiters = self.waiters.entry(member.domain).or_default();
        if waiters.is_empty() {
            self.turns.push_back(member.domain);
        }
        waiters.push_back(Arc::clone(member));
    }

    /// Removes a connection from the queue before its turn.
    fn withdraw(&mut self, member: &Arc<Member<R>>) {
        let Some(waiters) = self.waiters.get_mut(&member.domain) else { return };
        waiters.retain(|waiter| !Arc::ptr_eq(waiter, member));
        if waiters.is_empty() {
            self.waiters.remove(&member.domain);
            self.turns.retain(|&domain| domain != member.domain);
        }
    }

    fn pop(&mut self) -> Option<Arc<Member<R>>> {
        let domain = self.turns.pop_front()?;
        let waiters = self.waiters.get_mut(&domain)?;
        let member = waiters.pop_front();
        if waiters.is_empty() {
            self.waiters.remove(&domain);
        } else {
            self.turns.push_back(domain);
        }
        member
    }

    /// Removes from the window the PSNs that were already in flight at the last call and still are.
    fn forgive(&mut self, now: Duration, in_flight: &Level) {
        self.looked = now;
        self.members.retain_mut(|seen| {
            let Some(member) = seen.member.upgrade() else { return false };
            let (new, acked) = (member.in_flight.load(Ordering::Relaxed), member.acked.load(Ordering::Relaxed));
            let stale = seen.in_flight.saturating_sub(acked.saturating_sub(seen.acked)).min(new);
            let already = member.forgiven.load(Ordering::Relaxed);
            let more = stale.saturating_sub(PROBE).saturating_sub(already);
            if more > 0 {
                member.forgiven.store(already.saturating_add(more), Ordering::Relaxed);
                in_flight.change(-signed(more));
            }
            (seen.in_flight, seen.acked) = (new, acked);
            true
        });
    }
}

impl<R: Runner> PeerWindow<R> {
    fn is_full(&self) -> bool {
        self.in_flight.get() >= MOST
    }

    /// Wakes connections at the front of the queue, as far as there is room.
    fn admit(&self) {
        if !self.in_flight.is_awaited() {
            return;
        }
        let admitted = self.admit_from(&mut self.queue.lock());
        for member in admitted {
            member.runner.schedule();
        }
    }

    /// Grants turns, as far as there is room. Returns the connections that the caller wakes after it has unlocked the
    /// queue.
    fn admit_from(&self, queue: &mut Queue<R>) -> Vec<Arc<Member<R>>> {
        let mut admitted = Vec::new();
        let mut room = MOST.saturating_sub(self.in_flight.get());
        while room > 0
            && let Some(member) = queue.pop()
        {
            self.grant(&member);
            admitted.push(member);
            room = room.saturating_sub(signed(QUANTUM));
        }
        self.left(queue);
        admitted
    }

    /// Grants a turn to a connection that was removed from the queue.
    fn grant(&self, member: &Member<R>) {
        self.in_flight.change(signed(QUANTUM));
        member.turn.grant();
    }

    /// Updates the flag for waiters after connections may have left the queue.
    fn left(&self, queue: &Queue<R>) {
        if queue.turns.is_empty() {
            self.in_flight.nobody_waits();
        }
    }

    /// Queues a connection, unless it can have the reserved turn.
    fn wait(&self, member: &Arc<Member<R>>, now: Duration, stale: Duration) -> Waited {
        let mut queue = self.queue.lock();
        // The turn was granted between the caller's check and the lock.
        if member.turn.is_granted() {
            return Waited::Granted;
        }
        if !member.turn.is_queued() {
            if member.in_flight.load(Ordering::Relaxed) == 0 && queue.reserve(member) {
                return Waited::Reserved;
            }
            member.turn.queue();
            queue.push(member);
            self.in_flight.wait();
        }
        Waited::Queued(self.look(queue, now, stale))
    }

    /// Lets a waiting connection without packets in flight continue, if it can have the reserved turn.
    fn reserve(&self, member: &Arc<Member<R>>) {
        let mut queue = self.queue.lock();
        if !member.turn.is_queued() || !queue.reserve(member) {
            return;
        }
        queue.withdraw(member);
        self.left(&queue);
        self.grant(member);
        drop(queue);
        member.runner.schedule();
    }

    /// Removes a connection that no longer waits. It is not granted a turn after this.
    fn withdraw(&self, member: &Arc<Member<R>>) {
        let mut queue = self.queue.lock();
        if member.turn.is_queued() {
            queue.withdraw(member);
            self.left(&queue);
            member.turn.withdraw();
        }
    }

    /// Forgives stale PSNs and admits connections. Returns the time of the next check if the caller must do it.
    fn look(&self, mut queue: MutexGuard<'_, Queue<R>>, now: Duration, stale: Duration) -> Option<Duration> {
        if now.saturating_sub(queue.looked) >= stale {
            queue.forgive(now, &self.in_flight);
        }
        // A thread that made room just now may have missed that this connection waits. This check comes after the
        // connection was recorded as waiting, so it sees that room.
        let admitted = self.admit_from(&mut queue);
        let watch = !queue.turns.is_empty() && queue.watched_until <= now;
        let until = now.saturating_add(stale);
        if watch {
            queue.watched_until = until;
        }
        drop(queue);
        for member in admitted {
            member.runner.schedule();
        }
        watch.then_some(until)
    }
}

/// Result of waiting while the window is full.
enum Waited {
    /// The connection has the reserved turn.
    Reserved,
    /// The connection was granted a turn, and no longer waits.
    Granted,
    /// The connection waits. With a time, it must check the window again then, on behalf of all waiters.
    Queued(Option<Duration>),
}

/// Share of one connection in a window.
#[derive(Debug)]
pub struct WindowShare<R: Runner> {
    window: Arc<PeerWindow<R>>,
    member: Arc<Member<R>>,
    /// PSNs in flight.
    in_flight: u64,
    /// PSNs of the turn that are used.
    used: u64,
    /// Time at which this connection checks the window on behalf of all waiters.
    watch: Option<Duration>,
}

impl<R: Runner> WindowShare<R> {
    /// Creates a share in the window to `peer` for the connection that `runner` runs, in a protection domain.
    pub fn new(windows: &PeerWindows<R>, peer: Gid, runner: &Arc<R>, domain: u64) -> Self {
        let window = windows.window(peer);
        let member = Arc::new(Member {
            runner: Arc::clone(runner),
            domain,
            turn: Turn::new(),
            in_flight: AtomicU64::new(0),
            acked: AtomicU64::new(0),
            forgiven: AtomicU64::new(0),
        });
        let seen = Snapshot { member: Arc::downgrade(&member), in_flight: 0, acked: 0 };
        let members = &mut window.queue.lock().members;
        if members.len() == members.capacity() {
            members.retain(|seen| seen.member.strong_count() > 0);
        }
        members.push(seen);
        Self { window: Arc::clone(&window), member, in_flight: 0, used: 0, watch: None }
    }

    /// Returns the PSNs of this connection that count.
    pub fn counted(&self) -> u64 {
        self.in_flight.saturating_sub(self.member.forgiven.load(Ordering::Relaxed))
    }

    /// Handles one more ACK timeout of a starved connection. Returns `true` if a quiet period begins.
    pub fn ask_for_quiet(&self, now: Duration, rtt: Option<Duration>) -> bool {
        self.window.quiet.ask(now, rtt)
    }

    /// Returns the time until which the connection pauses for a starved one.
    #[inline]
    pub fn quiet_until(&self, now: Duration, starved: bool) -> Option<Duration> {
        self.window.quiet.wait(now, starved)
    }

    /// Returns the time at which the connection must run again, as a waiter or on behalf of others.
    pub const fn deadline(&self) -> Option<Duration> {
        self.watch
    }

    /// Returns `true` if another packet can be sent. Otherwise the connection is run again when its turn comes. `rto`
    /// returns the time after which an ACK of the peer is late, if that is known.
    #[inline]
    pub fn may_send(&mut self, now: Duration, rto: impl FnOnce() -> Option<Duration>) -> bool {
        if self.used > 0 {
            return true;
        }
        let window = &self.window;
        if self.begin_turn() || !(self.member.turn.is_queued() || window.is_full() || window.in_flight.is_awaited()) {
            return true;
        }
        self.wait(now, rto())
    }

    #[cold]
    fn wait(&mut self, now: Duration, rto: Option<Duration>) -> bool {
        match self.window.wait(&self.member, now, stale_after(rto)) {
            Waited::Reserved => return true,
            Waited::Granted => return self.begin_turn(),
            Waited::Queued(Some(watch)) => self.watch = Some(watch),
            Waited::Queued(None) => {}
        }
        false
    }

    /// Checks the window, if this connection has to.
    #[inline]
    pub fn watch(&mut self, now: Duration, rto: impl FnOnce() -> Option<Duration>) {
        if self.watch.is_some_and(|watch| watch <= now) {
            self.watch = self.window.look(self.window.queue.lock(), now, stale_after(rto()));
        }
    }

    /// Returns `true` if the next packet is the last of a turn.
    pub const fn ends_turn(&self) -> bool {
        self.used + 1 >= QUANTUM
    }

    /// Accounts for a packet of a turn that was sent, after which `in_flight` PSNs are unacked.
    pub fn sent(&mut self, in_flight: u64) {
        let new = in_flight.saturating_sub(self.in_flight);
        self.used = if self.used + new >= QUANTUM { 0 } else { self.used + new };
        self.count(in_flight);
    }

    /// Accounts for an acknowledgement, after which `in_flight` PSNs are left.
    pub fn acked(&mut self, in_flight: u64) {
        self.count(in_flight);
        self.window.admit();
        if in_flight == 0 && self.member.turn.is_queued() {
            self.window.reserve(&self.member);
        }
    }

    /// Ends the turn, because there is nothing more to send for now.
    pub fn pause(&mut self, in_flight: u64) {
        self.used = 0;
        self.begin_turn();
        self.acked(in_flight);
    }

    fn begin_turn(&self) -> bool {
        let granted = self.member.turn.begin();
        if granted {
            self.window.in_flight.change(-signed(QUANTUM));
        }
        granted
    }

    fn count(&mut self, in_flight: u64) {
        let (before, member) = (std::mem::replace(&mut self.in_flight, in_flight), &self.member);
        member.in_flight.store(in_flight, Ordering::Relaxed);
        let mut change = signed(in_flight).saturating_sub(signed(before));
        let acked = before.saturating_sub(in_flight);
        if acked > 0 {
            member.acked.store(member.acked.load(Ordering::Relaxed).saturating_add(acked), Ordering::Relaxed);
        }
        if member.forgiven.load(Ordering::Relaxed) > 0 {
            change = change.saturating_add(self.settle(acked));
        }
        if change != 0 {
            self.window.in_flight.change(change);
        }
    }

    /// Settles forgiven PSNs that have been acknowledged: the oldest PSNs are forgiven first and acknowledged first.
    /// Returns the number that had already been removed from the window.
    #[cold]
    fn settle(&self, acked: u64) -> i64 {
        let _queue = self.window.queue.lock();
        let forgiven = self.member.forgiven.load(Ordering::Relaxed);
        let left = forgiven.saturating_sub(acked).min(self.in_flight);
        self.member.forgiven.store(left, Ordering::Relaxed);
        signed(forgiven.saturating_sub(left))
    }
}

impl<R: Runner> Drop for WindowShare<R> {
    fn drop(&mut self) {
        self.window.withdraw(&self.member);
        self.pause(0);
        // Another thread may have forgiven PSNs between the pause and the lock in `settle`.
        let forgiven = self.settle(0);
        if forgiven > 0 {
            self.window.in_flight.change(forgiven);
        }
        if self.watch.is_some() {
            // Another waiting connection has to check the window from now on.
            let mut queue = self.window.queue.lock();
            queue.watched_until = Duration::ZERO;
            let next = queue.turns.front().and_then(|domain| queue.waiters.get(domain)?.front()).map(Arc::clone);
            drop(queue);
            if let Some(next) = next {
                next.runner.schedule();
            }
        }
    }
}

/// Returns the time without an ACK after which a PSN no longer counts.
fn stale_after(rto: Option<Duration>) -> Duration {
    rto.map_or(STALE_UNKNOWN, |rto| rto.saturating_mul(STALE_RTOS).clamp(STALE_MIN, STALE_MAX))
}

/// Converts a number of PSNs, which is always small.
fn signed(psns: u64) -> i64 {
    i64::try_from(psns).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
