//! Selection of the destinations of frames, and of accepted senders.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use pvrdma_packet::MacAddr;

use super::inner::{Inner, Station};
use super::table::{AGE, Learned, MAX_REMOTES, Table};

/// Another end of the tunnel.
#[derive(Clone, Copy, Debug)]
struct Remote {
    address: SocketAddr,
    /// Time at which a learned remote was last heard. `None` for configured ones, which do not age.
    heard: Option<Duration>,
}

/// Destination of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Target {
    /// One remote.
    One(SocketAddr),
    /// Every configured remote.
    All,
}

/// Remotes, and the addresses learned behind them.
#[derive(Debug)]
pub(super) struct Remotes {
    remotes: Vec<Remote>,
    configured: usize,
    by_address: HashMap<IpAddr, usize>,
    table: Table,
    /// `true` if senders that are not configured may become remotes.
    open: bool,
    /// UDP port of learned remotes.
    port: u16,
}

impl Remotes {
    /// Creates the table of configured remotes: at most [`MAX_REMOTES`], each with a distinct IP address.
    pub(super) fn new(remotes: &[SocketAddr], open: bool, port: u16) -> Self {
        let by_address = remotes.iter().enumerate().map(|(index, remote)| (remote.ip(), index)).collect();
        let remotes: Vec<_> = remotes.iter().map(|&address| Remote { address, heard: None }).collect();
        Self { configured: remotes.len(), remotes, by_address, table: Table::default(), open, port }
    }

    /// Iterates over the configured remotes.
    pub(super) fn configured(&self) -> impl Iterator<Item = SocketAddr> {
        self.remotes.iter().take(self.configured).map(|remote| remote.address)
    }

    /// Returns the number of known addresses.
    pub(super) fn stations(&self) -> usize {
        self.table.len()
    }

    /// Returns `true` if there is only one possible destination.
    fn is_cable(&self) -> bool {
        self.configured == 1 && !self.open
    }

    /// Returns `true` if frames from `from` are accepted, as far as there is room for its sender.
    pub(super) fn accepts(&self, from: SocketAddr) -> bool {
        self.open || self.by_address.contains_key(&from.ip())
    }

    /// Returns the index of the remote that sends from `from`. `None` if its datagrams are not accepted.
    pub(super) fn sender(&mut self, from: SocketAddr, now: Duration) -> Option<usize> {
        // The port is not compared, because the end of a tunnel chooses it per flow.
        if let Some(&index) = self.by_address.get(&from.ip()) {
            if let Some(heard) = self.remotes.get_mut(index).and_then(|remote| remote.heard.as_mut()) {
                *heard = now;
            }
            return Some(index);
        }
        if !self.open {
            return None;
        }
        let mut address = from;
        address.set_port(self.port);
        let remote = Remote { address, heard: Some(now) };
        let index = if self.remotes.len() < MAX_REMOTES {
            self.remotes.push(remote);
            self.remotes.len() - 1
        } else {
            let index = self.silent(now)?;
            let old = self.remotes.get_mut(index)?;
            self.by_address.remove(&old.address.ip());
            *old = remote;
            self.table.forget(index);
            index
        };
        self.by_address.insert(from.ip(), index);
        Some(index)
    }

    /// Returns a learned remote that has been silent for at least [`AGE`].
    fn silent(&self, now: Duration) -> Option<usize> {
        let silent = |remote: &Remote| remote.heard.is_some_and(|heard| now.saturating_sub(heard) >= AGE);
        self.remotes.iter().position(silent)
    }

    /// Learns the source addresses of a frame behind a remote.
    pub(super) fn learn(&mut self, inner: &Inner, remote: usize, now: Duration) -> Learned {
        if self.is_cable() {
            return Learned::Known;
        }
        let learned = self.table.learn(Station::Mac(inner.source), remote, now);
        let Some((source, _)) = inner.gids else { return learned };
        match (learned, self.table.learn(Station::Gid(source), remote, now)) {
            (Learned::Known, other) => other,
            _ => learned,
        }
    }

    /// Returns the destination of a frame: the remote with its MAC address, otherwise the one with its GID, otherwise
    /// all.
    pub(super) fn target(&self, inner: &Inner, now: Duration) -> Target {
        if self.is_cable() || is_group(inner.destination) {
            return Target::All;
        }
        let by_mac = self.table.find(&Station::Mac(inner.destination), now);
        let by_gid = || self.table.find(&Station::Gid(inner.gids?.1), now);
        let remote = by_mac.or_else(by_gid).and_then(|index| self.remotes.get(index));
        remote.map_or(Target::All, |remote| Target::One(remote.address))
    }
}

/// Returns `true` if an address is that of a group: multicast or broadcast.
pub(super) const fn is_group(mac: MacAddr) -> bool {
    let [first, ..] = mac.0;
    first & 1 != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(5);

    fn address(number: u16, port: u16) -> SocketAddr {
        let [high, low] = number.to_be_bytes();
        SocketAddr::from(([10, 9, high, low], port))
    }

    fn inner(to: u8, from: u8, gids: Option<(u8, u8)>) -> Inner {
        let mac = |last| MacAddr([2, 0, 0, 0, 0, last]);
        let gids = gids.map(|(from, to)| ([from; 16], [to; 16]));
        Inner { destination: mac(to), source: mac(from), gids, class: 0, flow: 0 }
    }

    #[test]
    fn frames_leave_to_the_last_source_of_their_receiver() {
        let mut remotes = Remotes::new(&[address(1, 4789), address(2, 9999)], false, 4789);
        assert_eq!(remotes.target(&inner(7, 1, None), NOW), Target::All);
        let remote = remotes.sender(address(2, 50_000), NOW).unwrap();
        assert_eq!(remotes.learn(&inner(1, 7, Some((77, 1))), remote, NOW), Learned::New);
        assert_eq!(remotes.target(&inner(7, 1, None), NOW), Target::One(address(2, 9999)));
        // If no remote has the MAC address, the GID finds the remote.
        assert_eq!(remotes.target(&inner(8, 1, Some((1, 77))), NOW), Target::One(address(2, 9999)));
        assert_eq!(remotes.target(&inner(8, 1, Some((1, 78))), NOW), Target::All);
        let mut everybody = inner(7, 1, Some((1, 77)));
        everybody.destination = MacAddr([0xff; 6]);
        assert_eq!(remotes.target(&everybody, NOW), Target::All);
        assert_eq!(remotes.target(&inner(7, 1, None), NOW + AGE), Target::All);
        assert_eq!(remotes.sender(address(3, 4789), NOW), None, "not configured");
    }

    #[test]
    fn one_remote_is_a_cable() {
        let mut remotes = Remotes::new(&[address(1, 4789)], false, 4789);
        assert_eq!(remotes.learn(&inner(1, 7, None), 0, NOW), Learned::Known);
        assert_eq!((remotes.stations(), remotes.target(&inner(7, 1, None), NOW)), (0, Target::All));
    }

    #[test]
    fn learned_remotes_are_bounded_and_age() {
        let mut remotes = Remotes::new(&[address(0, 4789)], true, 4790);
        for number in 1..=1000 {
            let remote = remotes.sender(address(number, 60_000), NOW);
            assert_eq!(remote.is_some(), usize::from(number) < MAX_REMOTES, "{number}");
            if let (Some(remote), Ok(source)) = (remote, u8::try_from(number)) {
                remotes.learn(&inner(100, source, None), remote, NOW);
            }
        }
        assert_eq!(remotes.target(&inner(9, 1, None), NOW), Target::One(address(9, 4790)));
        assert_eq!(remotes.configured().collect::<Vec<_>>(), [address(0, 4789)], "learned ones get no floods");
        // Later, 9 still sends and 1 is silent.
        let later = NOW + AGE;
        assert_eq!(remotes.sender(address(9, 60_001), later), Some(9));
        assert_eq!(remotes.sender(address(900, 1), later), Some(1));
        assert_eq!(remotes.sender(address(1, 1), later), Some(2), "the next silent remote is replaced");
        assert!(remotes.by_address.len() == MAX_REMOTES && remotes.remotes.len() == MAX_REMOTES);
        assert_eq!(remotes.target(&inner(2, 9, None), later), Target::All, "addresses are forgotten with their remote");
    }
}
