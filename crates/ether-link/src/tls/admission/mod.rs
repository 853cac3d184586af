//! Admission of connections whose other end has not proved its identity yet: the order in which they are served, and
//! the choice of the one to close when there are too many.
//!
//! Strangers can open any number of connections. The rules must give the peer's connection a chance among those of a
//! flood, without knowing which is which:
//!
//! - A connection is *silent* at first, *speaks* once something can be read from it, and is *answered* once the link
//!   has answered its ClientHello. Each of these states has its own table: a flood without TLS takes nothing from
//!   connections that speak, and a flood that speaks takes nothing from connections that have been answered.
//! - Answering costs a key exchange and a signature, so the rate of answers is limited. The source with the fewest
//!   connections is answered first.
//! - When a table is full, a connection of the source with the most connections is closed. Among equal ones, the choice
//!   is random: if it depended on the order of arrival, a flood that is fast enough could close each connection within
//!   a round trip.
//! - A source that had a session before takes precedence over all others, with its first [`SHARE`] connections.
//!
//! This module only decides. The caller provides the clock, the random numbers and the sockets.

use std::cmp::Reverse;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use pvrdma_base::Random;

/// Maximum number of connections that have sent nothing, or not enough. Each costs a descriptor.
pub(super) const MAX_SILENT: usize = 64;
/// Highest number of connections whose ClientHello has not been read yet.
pub(super) const MAX_SPEAKING: usize = 64;
/// Maximum number of connections that were answered and have not proved their identity yet.
pub(super) const MAX_ANSWERED: usize = 128;
/// Minimum time between two answers to ClientHellos. An answer takes about 0.15 ms of processor time.
const ANSWER_INTERVAL: Duration = Duration::from_millis(2);
/// Number of connections for which a known source is preferred.
const SHARE: usize = 2;
/// Maximum number of known sources: those that had a session most recently.
const MAX_KNOWN: usize = 16;

/// Source of a connection: an IPv4 address, or an IPv6 prefix of 64 bits, because one host can use all addresses in it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Source(u128);

impl From<SocketAddr> for Source {
    fn from(address: SocketAddr) -> Self {
        match address.ip().to_canonical() {
            IpAddr::V4(address) => Self(address.to_ipv6_mapped().to_bits()),
            IpAddr::V6(address) => Self(address.to_bits() & (!0 << 64)),
        }
    }
}

/// Progress of a connection, which determines its table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Silent,
    Speaks,
    Answered,
}

/// The tables, each with the highest number of its connections.
const TABLES: [(Stage, usize); 3] =
    [(Stage::Silent, MAX_SILENT), (Stage::Speaks, MAX_SPEAKING), (Stage::Answered, MAX_ANSWERED)];

/// A connection in a table.
#[derive(Debug)]
struct Entry<T> {
    item: T,
    source: Source,
    stage: Stage,
    /// The connection has something to read, or room to write.
    ready: bool,
}

/// Connections that have not proved their identity yet, each with an item of the caller.
#[derive(Debug)]
pub(super) struct Admission<T> {
    entries: Vec<Entry<T>>,
    /// Sources that had a session, the most recent one last.
    known: Vec<Source>,
    next_answer: Instant,
    random: Random,
}

/// Rank of a connection, to compare two. The order of the fields is the order of the rules.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Worth {
    preferred: bool,
    others: Reverse<usize>,
}

impl<T> Admission<T> {
    pub(super) const fn new(now: Instant, random: Random) -> Self {
        Self { entries: Vec::new(), known: Vec::new(), next_answer: now, random }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Iterates over all connections, with the caller's item and the readiness of each.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&T, bool)> {
        self.entries.iter().map(|entry| (&entry.item, entry.ready))
    }

    pub(super) fn get_mut(&mut self, index: usize) -> Option<&mut T> {
        self.entries.get_mut(index).map(|entry| &mut entry.item)
    }

    /// Adds an accepted connection, whose first bytes may have arrived.
    pub(super) fn admit(&mut self, source: Source, item: T, speaks: bool) {
        let stage = if speaks { Stage::Speaks } else { Stage::Silent };
        self.entries.push(Entry { item, source, stage, ready: speaks });
    }

    /// Adds a connection that this end has opened. A stranger cannot cause it to be closed.
    pub(super) fn admit_own(&mut self, source: Source, item: T) {
        self.entries.push(Entry { item, source, stage: Stage::Answered, ready: true });
    }

    /// Records that a connection can be read or written.
    pub(super) fn is_ready(&mut self, index: usize) {
        if let Some(entry) = self.entries.get_mut(index) {
            entry.ready = true;
            if entry.stage == Stage::Silent {
                entry.stage = Stage::Speaks;
            }
        }
    }

    /// Moves a connection that spoke back to the silent ones, because it has not sent enough.
    pub(super) fn is_silent(&mut self, index: usize) {
        self.set_stage(index, Stage::Silent);
    }

    /// Records that the ClientHello of a connection was answered.
    pub(super) fn is_answered(&mut self, index: usize) {
        self.set_stage(index, Stage::Answered);
    }

    fn set_stage(&mut self, index: usize, stage: Stage) {
        if let Some(entry) = self.entries.get_mut(index) {
            entry.stage = stage;
        }
    }

    /// Returns the time until a connection that speaks may be answered. `None` if there is none.
    pub(super) fn wait(&self, now: Instant) -> Option<Duration> {
        let any = self.entries.iter().any(|entry| entry.stage == Stage::Speaks);
        any.then(|| self.next_answer.saturating_duration_since(now))
    }

    /// Returns the connection whose ClientHello is to be read next, if one is due. It is no longer ready.
    pub(super) fn next_speaking(&mut self, now: Instant) -> Option<usize> {
        if !self.wait(now)?.is_zero() {
            return None;
        }
        let index = self.pick(Stage::Speaks, Reverse)?;
        self.entries.get_mut(index)?.ready = false;
        Some(index)
    }

    /// Returns an answered connection that is ready. It is no longer ready.
    pub(super) fn next_answered(&mut self) -> Option<usize> {
        let index = self.entries.iter().position(|entry| entry.ready && entry.stage == Stage::Answered)?;
        self.entries.get_mut(index)?.ready = false;
        Some(index)
    }

    /// Accounts for the cost of a ClientHello, whatever its result.
    pub(super) fn charge(&mut self, now: Instant) {
        self.next_answer = now + ANSWER_INTERVAL;
    }

    /// Removes and returns a connection if a table has too many.
    pub(super) fn one_too_many(&mut self) -> Option<T> {
        let (stage, _) = TABLES.into_iter().find(|(stage, most)| self.count(*stage) > *most)?;
        let index = self.pick(stage, |worth| worth)?;
        self.remove(index)
    }

    fn count(&self, stage: Stage) -> usize {
        self.entries.iter().filter(|entry| entry.stage == stage).count()
    }

    pub(super) fn remove(&mut self, index: usize) -> Option<T> {
        (index < self.entries.len()).then(|| self.entries.swap_remove(index).item)
    }

    /// Removes and returns the first connection that matches.
    pub(super) fn remove_if(&mut self, is: impl Fn(&T) -> bool) -> Option<T> {
        let index = self.entries.iter().position(|entry| is(&entry.item))?;
        self.remove(index)
    }

    /// Records that a source has proved its identity.
    pub(super) fn proved(&mut self, source: Source) {
        self.known.retain(|known| *known != source);
        if self.known.len() >= MAX_KNOWN {
            self.known.remove(0);
        }
        self.known.push(source);
    }

    /// Returns the connection in a table with the lowest `order`. Chooses at random among equal ones.
    fn pick<O: Ord>(&mut self, stage: Stage, order: impl Fn(Worth) -> O) -> Option<usize> {
        let mut sources: Vec<Source> = self.entries.iter().map(|entry| entry.source).collect();
        sources.sort_unstable();
        let ordered = |entry: &Entry<T>| order(self.worth(entry.source, &sources));
        let table = self.entries.iter().enumerate().filter(|(_, entry)| entry.stage == stage);
        let ordered: Vec<(usize, O)> = table.map(|(index, entry)| (index, ordered(entry))).collect();
        let least = ordered.iter().map(|(_, order)| order).min()?;
        let equals: Vec<usize> = ordered.iter().filter(|(_, order)| order == least).map(|(index, _)| *index).collect();
        // If the kernel's generator fails, TLS does not work either.
        let drawn = usize::try_from(self.random.draw().unwrap_or_default()).unwrap_or_default();
        equals.get(drawn.checked_rem(equals.len())?).copied()
    }

    /// Returns the rank of a connection from this source. The `sources` of all connections are sorted.
    fn worth(&self, source: Source, sources: &[Source]) -> Worth {
        let below = sources.partition_point(|other| *other < source);
        let others = sources.partition_point(|other| *other <= source).saturating_sub(below);
        let preferred = others <= SHARE && self.known.contains(&source);
        Worth { preferred, others: Reverse(others) }
    }
}

#[cfg(test)]
mod tests;
