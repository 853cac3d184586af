//! Receive filter.

use crate::abi::shared::{FilterConfig, RxMode, VLAN_TABLE_LEN};
use crate::offload::headers;
use crate::saved_state::error::{RestoreError, exact, require};

/// Mask of the VLAN ID in a tag.
const VLAN_ID: u16 = 0xfff;

/// Receive filter of a guest: mode, multicast addresses and VLANs.
#[derive(Clone, Debug)]
pub(crate) struct RxFilter {
    mode: RxMode,
    /// Multicast addresses, sorted.
    multicast: Vec<[u8; 6]>,
    /// One bit for each VLAN ID.
    vlans: Box<[u8; VLAN_TABLE_LEN]>,
}

impl RxFilter {
    /// Creates a filter with a copy of the multicast table.
    pub(crate) fn new(config: FilterConfig, table: &[u8]) -> Self {
        let FilterConfig { mode, vlans, .. } = config;
        Self { mode, multicast: addresses(table), vlans }
    }

    /// Returns the bits of the mode, the VLAN table, and the multicast table.
    pub(crate) fn save(&self) -> (u32, Vec<u8>, Vec<u8>) {
        let Self { mode, multicast, vlans } = self;
        (mode.bits(), vlans.to_vec(), multicast.concat())
    }

    /// Restores a filter from the values of [`Self::save`].
    ///
    /// # Errors
    /// A mode is unknown, or a table has a length that no driver can set.
    pub(crate) fn restore(mode: u32, vlans: &[u8], multicast: &[u8]) -> Result<Self, RestoreError> {
        require("receive mode", mode, mode <= RxMode::ALL)?;
        let len = multicast.len();
        require("length of the multicast table", len as u64, len.is_multiple_of(6) && u16::try_from(len).is_ok())?;
        let vlans = Box::new(exact("VLAN table", vlans)?);
        Ok(Self { mode: RxMode::parse(mode), multicast: addresses(multicast), vlans })
    }

    /// Replaces the mode.
    pub(crate) const fn set_mode(&mut self, mode: RxMode) {
        self.mode = mode;
    }

    /// Replaces the multicast table.
    pub(crate) fn set_multicast(&mut self, table: &[u8]) {
        self.multicast = addresses(table);
    }

    /// Replaces the VLAN table.
    pub(crate) fn set_vlans(&mut self, vlans: Box<[u8; VLAN_TABLE_LEN]>) {
        self.vlans = vlans;
    }

    /// Returns `true` if the filter of a guest with this MAC address accepts the frame.
    pub(crate) fn accepts(&self, frame: &[u8], mac: [u8; 6]) -> bool {
        let destination: [u8; 6] = frame.first_chunk().copied().unwrap_or_default();
        self.mode.promiscuous || (self.wants(destination, mac) && self.wants_tag(headers::tag(frame)))
    }

    fn wants(&self, destination: [u8; 6], mac: [u8; 6]) -> bool {
        if destination == [0xff; 6] {
            self.mode.broadcast
        } else if is_multicast(destination) {
            self.mode.all_multicast || (self.mode.multicast && self.multicast.binary_search(&destination).is_ok())
        } else {
            self.mode.unicast && destination == mac
        }
    }

    /// Returns `true` if the frame's VLAN is accepted. Untagged and priority-tagged frames belong to no VLAN and always
    /// pass.
    fn wants_tag(&self, tag: Option<u16>) -> bool {
        match tag.map(|tag| tag & VLAN_ID) {
            None | Some(0) => true,
            Some(id) => self.vlans.get(usize::from(id / 8)).is_some_and(|byte| byte >> (id % 8) & 1 == 1),
        }
    }
}

/// Returns `true` for a group address, broadcast included.
pub(crate) const fn is_multicast(address: [u8; 6]) -> bool {
    address[0] & 1 == 1
}

fn addresses(table: &[u8]) -> Vec<[u8; 6]> {
    let mut addresses = table.as_chunks::<6>().0.to_vec();
    addresses.sort_unstable();
    addresses
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const GROUP: [u8; 6] = [1, 0, 0x5e, 0, 0, 1];

    fn frame(destination: [u8; 6], tag: Option<u16>) -> Vec<u8> {
        let mut frame = destination.to_vec();
        frame.extend([2, 0, 0, 0, 0, 9]);
        if let Some(tag) = tag {
            frame.extend([0x81, 0]);
            frame.extend(tag.to_be_bytes());
        }
        frame.extend([0x88, 0xb5]);
        frame.resize(60, 0);
        frame
    }

    fn filter(mode: u32) -> RxFilter {
        let mut vlans = Box::new([0; VLAN_TABLE_LEN]);
        vlans[100 / 8] |= 1 << (100 % 8);
        let config = FilterConfig { mode: RxMode::parse(mode), table_len: 0, table: 0, vlans };
        RxFilter::new(config, &[[1, 0, 0x5e, 0, 0, 9], GROUP].concat())
    }

    #[test]
    fn each_mode_lets_its_own_pass() {
        let to = |mode, destination| filter(mode).accepts(&frame(destination, None), MAC);
        for mode in 0..32_u32 {
            let promiscuous = mode & 16 != 0;
            assert_eq!(to(mode, MAC), mode & 1 != 0 || promiscuous);
            assert_eq!(to(mode, [2, 0, 0, 0, 0, 2]), promiscuous);
            assert_eq!(to(mode, [0xff; 6]), mode & 4 != 0 || promiscuous);
            assert_eq!(to(mode, GROUP), mode & (2 | 8) != 0 || promiscuous);
            assert_eq!(to(mode, [1, 0, 0x5e, 0, 0, 2]), mode & 8 != 0 || promiscuous);
        }
    }

    /// Trap 14: untagged frames and VLAN 0 always pass, and the VLAN table of a promiscuous driver is all zero.
    #[test]
    fn untagged_and_priority_frames_are_in_no_vlan() {
        let tagged = |mode, tag| filter(mode).accepts(&frame(MAC, tag), MAC);
        assert!(tagged(1, None) && tagged(1, Some(0)) && tagged(1, Some(0xe000)));
        assert!(tagged(1, Some(100)) && tagged(1, Some(0xe000 | 100)) && !tagged(1, Some(101)));
        assert!(tagged(16, Some(101)));
    }
}
