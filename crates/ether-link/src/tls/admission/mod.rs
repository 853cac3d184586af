//! Admission of connections whose other end has not proved who it is: which one is served next, and which one is
//! closed when there are too many.
//!
//! Strangers can open any number of connections, so the rules decide between connections of one flood and the one of
//! the peer, without knowing which is which:
//!
//! - A connection is *silent*, *speaks* once something can be read from it, and is *answered* once the link has
//!   answered its ClientHello. Each of these has a table of its own: a flood without TLS takes nothing from connections
//!   that speak, and a flood that speaks takes nothing from those that were answered.
//! - Answering costs a key exchange and a signature, so answers have a rate. The source with the fewest connections is
//!   answered first.
//! - In a full table a connection of the source with the most connections gives way. Among equals one is drawn: the
//!   order of arrival would let a fast enough flood close each connection before a round trip is over.
//! - A source that had a session before comes before all others, with its first [`SHARE`] connections.
//!
//! All of it is a value; the clock, the random numbers and the sockets are the caller's.

use std::cmp::Reverse;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use pvrdma_base::Random;

/// Connections that have said nothing, or not enough. Each costs a descriptor.
pub(super) const MAX_SILENT: usize = 64;
/// Connections whose ClientHello was not read yet.
pub(super) const MAX_SPEAKING: usize = 64;
/// Connections that were answered and have not proved anything.
pub(super) const MAX_ANSWERED: usize = 128;
/// Time between two ClientHellos that are answered: a processor computes some 0.15 ms for one.
const ANSWER_INTERVAL: Duration = Duration::from_millis(2);
/// Connections for which a known source is preferred.
const SHARE: usize = 2;
/// Sources that are known: the last ones that had a session.
const MAX_KNOWN: usize = 16;

/// Where a connection comes from: an IPv4 address, or an IPv6 prefix of 64 bits, as a host has all addresses of one.
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

/// How far a connection is, which is the table that it is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Silent,
    Speaks,
    Answered,
}

/// The tables, each with the number of connections that it has at most.
const TABLES: [(Stage, usize); 3] =
    [(Stage::Silent, MAX_SILENT), (Stage::Speaks, MAX_SPEAKING), (Stage::Answered, MAX_ANSWERED)];

/// A connection in a table.
#[derive(Debug)]
struct Entry<T> {
    item: T,
    source: Source,
    stage: Stage,
    /// There is something to read, or to write.
    ready: bool,
}

/// The connections that have proved nothing yet, with what the caller keeps for each.
#[derive(Debug)]
pub(super) struct Admission<T> {
    entries: Vec<Entry<T>>,
    /// The newest one last.
    known: Vec<Source>,
    next_answer: Instant,
    random: Random,
}

/// Which of two connections is worth more. The order of the fields is that of the rules.
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

    /// All connections: what the caller keeps, and whether it is ready.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&T, bool)> {
        self.entries.iter().map(|entry| (&entry.item, entry.ready))
    }

    pub(super) fn get_mut(&mut self, index: usize) -> Option<&mut T> {
        self.entries.get_mut(index).map(|entry| &mut entry.item)
    }

    /// Takes a connection in, of which the first bytes may be there.
    pub(super) fn admit(&mut self, source: Source, item: T, speaks: bool) {
        let stage = if speaks { Stage::Speaks } else { Stage::Silent };
        self.entries.push(Entry { item, source, stage, ready: speaks });
    }

    /// Takes in a connection that this end has made: no stranger can have it closed.
    pub(super) fn admit_own(&mut self, source: Source, item: T) {
        self.entries.push(Entry { item, source, stage: Stage::Answered, ready: true });
    }

    /// Something can be read from a connection, or written to it.
    pub(super) fn is_ready(&mut self, index: usize) {
        if let Some(entry) = self.entries.get_mut(index) {
            entry.ready = true;
            if entry.stage == Stage::Silent {
                entry.stage = Stage::Speaks;
            }
        }
    }

    /// A connection that spoke has not said enough.
    pub(super) fn is_silent(&mut self, index: usize) {
        self.set_stage(index, Stage::Silent);
    }

    /// The ClientHello of a connection was answered.
    pub(super) fn is_answered(&mut self, index: usize) {
        self.set_stage(index, Stage::Answered);
    }

    fn set_stage(&mut self, index: usize, stage: Stage) {
        if let Some(entry) = self.entries.get_mut(index) {
            entry.stage = stage;
        }
    }

    /// Time until a connection that speaks may be answered. `None`: none speaks.
    pub(super) fn wait(&self, now: Instant) -> Option<Duration> {
        let any = self.entries.iter().any(|entry| entry.stage == Stage::Speaks);
        any.then(|| self.next_answer.saturating_duration_since(now))
    }

    /// The connection whose ClientHello is read next, if that is due. It is not ready any more.
    pub(super) fn next_speaking(&mut self, now: Instant) -> Option<usize> {
        if !self.wait(now)?.is_zero() {
            return None;
        }
        let index = self.pick(Stage::Speaks, Reverse)?;
        self.entries.get_mut(index)?.ready = false;
        Some(index)
    }

    /// A connection that was answered and on which something happened. It is not ready any more.
    pub(super) fn next_answered(&mut self) -> Option<usize> {
        let index = self.entries.iter().position(|entry| entry.ready && entry.stage == Stage::Answered)?;
        self.entries.get_mut(index)?.ready = false;
        Some(index)
    }

    /// A ClientHello has cost what it costs, whatever came of it.
    pub(super) fn charge(&mut self, now: Instant) {
        self.next_answer = now + ANSWER_INTERVAL;
    }

    /// A connection that gives way, taken out, if a table has too many.
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

    /// Takes out the first connection of which this is true.
    pub(super) fn remove_if(&mut self, is: impl Fn(&T) -> bool) -> Option<T> {
        let index = self.entries.iter().position(|entry| is(&entry.item))?;
        self.remove(index)
    }

    /// A source proved who it is.
    pub(super) fn proved(&mut self, source: Source) {
        self.known.retain(|known| *known != source);
        if self.known.len() >= MAX_KNOWN {
            self.known.remove(0);
        }
        self.known.push(source);
    }

    /// The connection in a table with the least `order`; one is drawn if there are several.
    fn pick<O: Ord>(&mut self, stage: Stage, order: impl Fn(Worth) -> O) -> Option<usize> {
        let mut sources: Vec<Source> = self.entries.iter().map(|entry| entry.source).collect();
        sources.sort_unstable();
        let ordered = |entry: &Entry<T>| order(self.worth(entry.source, &sources));
        let table = self.entries.iter().enumerate().filter(|(_, entry)| entry.stage == stage);
        let ordered: Vec<(usize, O)> = table.map(|(index, entry)| (index, ordered(entry))).collect();
        let least = ordered.iter().map(|(_, order)| order).min()?;
        let equals: Vec<usize> = ordered.iter().filter(|(_, order)| order == least).map(|(index, _)| *index).collect();
        // Without the kernel's generator there is no TLS either.
        let drawn = usize::try_from(self.random.draw().unwrap_or_default()).unwrap_or_default();
        equals.get(drawn.checked_rem(equals.len())?).copied()
    }

    /// The worth of a connection from here. The `sources` of all connections are sorted.
    fn worth(&self, source: Source, sources: &[Source]) -> Worth {
        let below = sources.partition_point(|other| *other < source);
        let others = sources.partition_point(|other| *other <= source).saturating_sub(below);
        let preferred = others <= SHARE && self.known.contains(&source);
        Worth { preferred, others: Reverse(others) }
    }
}

#[cfg(test)]
mod tests;
