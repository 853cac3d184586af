//! Forwarding from the network function to the uplink.

use std::sync::Arc;

use pvrdma_base::EndOnPanic;
use pvrdma_link::LinkReader;
use pvrdma_packet::Ethernet;

use super::rules::Violation;
use super::stations::AddressUse;
use super::tx_queue::TxQueue;
use super::{Port, RECEIVE};
use crate::addresses::Claimed;

impl Port {
    /// Lets a thread that has frames of the network function forward them itself.
    pub(super) fn read_nic_at_once(self: &Arc<Self>) {
        if let Some(nic) = &self.nic {
            let me = Arc::downgrade(self);
            nic.link.set_reader(me);
        }
    }

    /// Forwards frames of the network function, unless another thread does so now. Returns `true` if there may be more.
    pub(super) fn read_nic(&self, nic: &TxQueue) -> bool {
        let Some(_order) = self.reading_nic.try_lock() else { return false };
        let mut frames = self.buffer();
        nic.link.receive(&mut frames, RECEIVE);
        let found = !frames.is_empty();
        self.drop_if_down(&mut frames);
        if !frames.iter_with_offloads(0).all(|frame| self.policy.passes_as_it_is(frame)) {
            let mut passed = self.buffer();
            for (frame, offload) in frames.iter_with_offloads(0) {
                let may = |used, vlan, station| match used {
                    AddressUse::Claim(gid) => {
                        self.addresses.announce(self.mac, (gid, vlan), station) == Ok(Claimed::Granted)
                    }
                    AddressUse::Probe(gid) => self.addresses.may_probe(self.mac, gid),
                };
                let judged = self.policy.outgoing((frame, offload), &mut passed, may);
                if judged == Err(Violation::Forged) {
                    self.tell_forged(frame);
                }
                self.count_violation(judged);
            }
            std::mem::swap(&mut frames, &mut passed);
            passed.clear();
            self.send(passed);
        }
        self.pass(&self.uplink, &frames, &self.counters.passed_out);
        frames.clear();
        self.send(frames);
        found
    }

    /// Logs that the network function sends from an Ethernet address other than the device's.
    #[cold]
    fn tell_forged(&self, frame: &[u8]) {
        let Ok((ethernet, ..)) = Ethernet::parse(frame) else { return };
        let (mac, source) = (self.mac, ethernet.source);
        self.log.warn(
            module_path!(),
            "port",
            format_args!(
                "{mac}: the network function sends from {source}, whose frames are dropped; see forged-transmits=mac"
            ),
        );
    }
}

/// Direct forwarding on the thread that serves the guest's doorbell: the frames leave before another thread could wake
/// up.
impl LinkReader for Port {
    fn read(&self) {
        let _guard = EndOnPanic::new("a port");
        let Some(nic) = &self.nic else { return };
        let began = self.now();
        self.read_nic(nic);
        self.share.add_port_time(self.now().saturating_sub(began));
    }
}
