//! Addresses that hosts beyond the uplink have used.

use std::collections::HashMap;
use std::time::Duration;

use super::address::Address;

/// Time that an address is remembered after the last packet from it.
pub(super) const REMEMBERED: Duration = Duration::from_secs(4 * 60 * 60);
/// Maximum number of addresses that are remembered.
pub(super) const MAX_REMOTE: usize = 4096;
/// Minimum time between two searches of a full table for addresses to forget.
const PURGE: Duration = Duration::from_secs(1);

/// Addresses of hosts beyond the uplink, with the time of the last packet from each.
#[derive(Debug, Default)]
pub(super) struct RemoteHosts {
    last: HashMap<Address, Duration>,
    /// Time of the last search for addresses to forget.
    purged: Option<Duration>,
}

impl RemoteHosts {
    /// Returns the time of the last packet from an address, if it is remembered.
    pub(super) fn last(&self, address: Address, now: Duration) -> Option<Duration> {
        self.last.get(&address).copied().filter(|last| now.saturating_sub(*last) < REMEMBERED)
    }

    /// Records a packet from an address. When the table is full, known addresses stay and new ones are not remembered:
    /// a flood of forged senders must not make the table forget the hosts that matter.
    pub(super) fn seen(&mut self, address: Address, now: Duration) {
        if self.last.len() >= MAX_REMOTE && !self.last.contains_key(&address) {
            if self.purged.is_some_and(|purged| now.saturating_sub(purged) < PURGE) {
                return;
            }
            self.purged = Some(now);
            self.last.retain(|_, last| now.saturating_sub(*last) < REMEMBERED);
            if self.last.len() >= MAX_REMOTE {
                return;
            }
        }
        self.last.insert(address, now);
    }

    /// Forgets an address.
    pub(super) fn forget(&mut self, address: Address) {
        self.last.remove(&address);
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.last.len()
    }
}
