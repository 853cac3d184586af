//! Announcements of a device at its uplink.

use std::collections::BTreeSet;
use std::sync::Weak;

use pvrdma_link::Frames;

use super::Port;
use super::announcer::Announce;
use crate::addresses::probe;

impl Port {
    /// Announces the device at the uplink, now and at growing intervals after that.
    pub(crate) fn announce(&self) {
        self.send_announcement();
        self.announcer.start();
    }
}

impl Announce for Port {
    /// Sends a frame for the MAC address, which the network function has too, in each VLAN of the device, and one for
    /// each bound address. A paused device sends none, because it may run on another host meanwhile.
    fn send_announcement(&self) {
        let function = self.function.lock().as_ref().and_then(Weak::upgrade);
        let Some(addresses) = function.map_or_else(|| Some(BTreeSet::new()), |function| function.addresses()) else {
            return;
        };
        let vlans: BTreeSet<_> = addresses.iter().map(|&(_, vlan)| vlan).chain([self.vlan()]).collect();
        let mut frames = Frames::default();
        vlans.into_iter().for_each(|vlan| frames.push(&probe::reverse_request(self.mac, vlan)));
        addresses.into_iter().for_each(|address| frames.push(&probe::announcement(self.mac, address)));
        self.send_urgent(&frames);
    }
}
