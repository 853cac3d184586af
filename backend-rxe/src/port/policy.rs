//! Filter of a port: applies the rules of a device to the frames of its network function.

use pvrdma_link::{Frames, Offload};
use pvrdma_packet::{EtherType, Ethernet, MacAddr, Vlan};
use pvrdma_roce::{EgressMarking, IcrcRule};

use super::control::is_control;
use super::outgoing::{Claim, claim, vlans};
use super::rules::{PacketRules, PortRules, Violation, VlanMode};
use super::source_guard;
use super::stations::{AddressUse, Station};

/// Offset of the tag, or of the ethertype in an untagged frame.
const TAG_AT: usize = Ethernet::TYPE_AT;

/// Returns `true` if a frame begins with a tag. A frame that is too short for a tag has none.
fn has_tag(frame: &[u8]) -> bool {
    Ethernet::first_type(frame).is_some_and(EtherType::is_tag)
}

/// Filter of a port: the rules of its device on its network.
#[derive(Clone, Debug)]
pub(super) struct Policy {
    pub(super) mac: MacAddr,
    pub(super) vlan: VlanMode,
    pub(super) rules: PortRules,
}

impl Policy {
    /// Returns the rules for RDMA packets.
    pub(super) fn packet_rules(&self) -> PacketRules {
        let marks = EgressMarking { priority_tags: self.rules.priority_tags, ecn: self.rules.congestion.is_some() };
        let icrc = if self.rules.omit_icrc { IcrcRule::UnlessAgreed } else { IcrcRule::Always };
        PacketRules { marks, icrc }
    }

    /// Returns `true` if a frame passes from the network function to the network unchanged.
    pub(super) fn passes_as_it_is(&self, (frame, offload): (&[u8], Offload)) -> bool {
        let bridge = self.rules.forged.allow_mac();
        let whole = frame.len() >= Ethernet::UNTAGGED_LEN;
        let own = whole && (bridge || frame.get(6..TAG_AT) == Some(&self.mac.0)) && !is_control(frame, bridge);
        let plain = match self.vlan {
            VlanMode::Trunk => true,
            VlanMode::Untagged => !has_tag(frame),
            VlanMode::Access(_) => false,
        };
        let guarded = || source_guard::check(&self.rules, self.mac, frame).is_ok();
        own && plain && self.claims_nothing(claim(frame)) && guarded() && offload.fits(frame)
    }

    fn claims_nothing(&self, claim: Claim) -> bool {
        claim == Claim::None || claim == Claim::Roce && self.rules.forged.allow_roce()
    }

    /// Checks a frame of the network function and appends it in the form in which the network gets it. `may` decides if
    /// the device can use an address in a VLAN, from this Ethernet address.
    ///
    /// The inspected bytes are the bytes that leave: an [`Offload`] changes no field that the rules depend on.
    pub(super) fn outgoing(
        &self,
        (frame, offload): (&[u8], Offload),
        out: &mut Frames,
        may: impl Fn(AddressUse, Option<u16>, MacAddr) -> bool,
    ) -> Result<(), Violation> {
        // A frame without a complete header has no source address either.
        let (ethernet, kind, _) = Ethernet::parse(frame).map_err(|_| Violation::Forged)?;
        if !self.rules.forged.allow_mac() && ethernet.source != self.mac {
            return Err(Violation::Forged);
        }
        // A tag behind a priority tag puts a frame into its VLAN as well.
        if self.vlan != VlanMode::Trunk && (ethernet.vlan_id().is_some() || kind.is_tag()) {
            return Err(Violation::Vlan);
        }
        if is_control(frame, self.rules.forged.allow_mac()) {
            return Err(Violation::Control);
        }
        match claim(frame) {
            Claim::Station(station) => {
                self.check_station(&station, frame, |used, vlan| may(used, vlan, ethernet.source))?;
            }
            Claim::Control => return Err(Violation::Control),
            Claim::Unclear => return Err(Violation::Address),
            // Such a frame may be neighbour discovery, or from a server, so it is dropped even where RoCE is allowed.
            Claim::Hidden => return Err(Violation::Roce),
            claim if self.claims_nothing(claim) => {}
            _ => return Err(Violation::Roce),
        }
        source_guard::check(&self.rules, self.mac, frame)?;
        // Links compute offsets from the headers that they find. Frames without those headers are refused here, because
        // a link would drop them without counting them for the device.
        if !offload.fits(frame) {
            return Err(Violation::Offload);
        }
        let Some(vid) = self.vlan.access() else {
            out.push_with_offload(frame, offload);
            return Ok(());
        };
        let priority = ethernet.vlan.unwrap_or_default();
        let [high, low] = Vlan { vid, ..priority }.tci();
        let [type_high, type_low] = EtherType::VLAN.0.to_be_bytes();
        let rest = if ethernet.vlan.is_some() { TAG_AT + Ethernet::TAG_LEN } else { TAG_AT };
        push_parts(out, [frame.get(..TAG_AT), Some(&[type_high, type_low, high, low]), frame.get(rest..)]);
        out.leave(offload);
        Ok(())
    }

    /// Checks a message of a host about itself. `may` decides if the device can use an address in a VLAN.
    fn check_station(
        &self,
        station: &Station,
        frame: &[u8],
        may: impl Fn(AddressUse, Option<u16>) -> bool,
    ) -> Result<(), Violation> {
        if station.is_router && self.rules.ra_guard {
            return Err(Violation::Server);
        }
        let is_own = station.hardware.is_none_or(|hardware| hardware == self.mac);
        // Some hosts and switches look behind the outer tag, or remove it, so the address must be the device's in each
        // VLAN.
        let may_in_all = |used| match (self.vlan.access(), vlans(frame).next()) {
            (None, Some(_)) => vlans(frame).all(|vlan| may(used, Some(vlan))),
            (vlan, _) => may(used, vlan),
        };
        match (is_own || self.rules.forged.allow_mac()) && station.uses().all(may_in_all) {
            true => Ok(()),
            false => Err(Violation::Address),
        }
    }

    /// Returns `true` if a frame passes from the network to the network function unchanged.
    pub(super) fn enters_as_it_is(&self, frame: &[u8]) -> bool {
        self.vlan == VlanMode::Trunk || self.vlan == VlanMode::Untagged && !has_tag(frame)
    }

    /// Checks a frame of the network and appends it in the form in which the network function gets it.
    pub(super) fn incoming(&self, (frame, offload): (&[u8], Offload), out: &mut Frames) -> Result<(), Violation> {
        if self.enters_as_it_is(frame) {
            out.push_with_offload(frame, offload);
            return Ok(());
        }
        let (ethernet, kind, _) = Ethernet::parse(frame).map_err(|_| Violation::Vlan)?;
        if ethernet.vlan_id() != self.vlan.access() || kind.is_tag() {
            return Err(Violation::Vlan);
        }
        match self.vlan.access() {
            None => out.push_with_offload(frame, offload),
            Some(_) => {
                push_parts(out, [frame.get(..TAG_AT), frame.get(TAG_AT + Ethernet::TAG_LEN..), None]);
                out.leave(offload);
            }
        }
        Ok(())
    }
}

/// Appends a frame that consists of several parts.
fn push_parts(out: &mut Frames, parts: [Option<&[u8]>; 3]) {
    let parts = parts.map(Option::unwrap_or_default);
    let length = parts.iter().map(|part| part.len()).sum();
    out.push_with(length, |mut room| {
        for part in parts {
            let (to, rest) = room.split_at_mut_checked(part.len())?;
            to.copy_from_slice(part);
            room = rest;
        }
        Some(length)
    });
}

#[cfg(test)]
mod tests {
    use super::super::rules::ForgedTransmits;
    use super::*;

    const MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);

    fn frame(source: MacAddr, tag: &[u8]) -> Vec<u8> {
        [&[0xff; 6], &source.0[..], tag, &[0x88, 0xb5], b"body"].concat()
    }

    fn policy(vlan: VlanMode, forged: ForgedTransmits) -> Policy {
        Policy { mac: MAC, vlan, rules: PortRules { forged, ..PortRules::default() } }
    }

    fn passes(policy: &Policy, frame: &[u8]) -> bool {
        policy.passes_as_it_is((frame, Offload::NONE))
    }

    fn out(policy: &Policy, frame: &[u8]) -> Result<Vec<u8>, Violation> {
        let mut frames = Frames::default();
        let passed = policy.outgoing((frame, Offload::NONE), &mut frames, |_, _, _| true);
        assert_eq!(frames.len(), usize::from(passed.is_ok()));
        passed.map(|()| frames.get(0).unwrap().to_vec())
    }

    #[test]
    fn only_the_own_address_unless_allowed() {
        let policy = policy(VlanMode::Untagged, ForgedTransmits::Off);
        let (own, other) = (frame(MAC, &[]), frame(MacAddr([9; 6]), &[]));
        assert!(passes(&policy, &own) && !passes(&policy, &other));
        assert_eq!(out(&policy, &own).unwrap(), own);
        assert_eq!(out(&policy, &other), Err(Violation::Forged));
        assert!((0..14).all(|len| out(&policy, &own[..len]) == Err(Violation::Forged)));
        assert!((0..14).all(|len| !passes(&policy, &own[..len])));
        let policy = Policy { rules: PortRules { forged: ForgedTransmits::Mac, ..policy.rules }, ..policy };
        assert!(passes(&policy, &other));
        assert_eq!(out(&policy, &other).unwrap(), other);
    }

    #[test]
    fn only_a_trunk_passes_tags() {
        let (tagged, priority) = (frame(MAC, &[0x81, 0, 0, 42]), frame(MAC, &[0x81, 0, 0x60, 0]));
        for (vlan, passes) in [(VlanMode::Trunk, true), (VlanMode::Untagged, false)] {
            let policy = policy(vlan, ForgedTransmits::Off);
            assert_eq!(policy.passes_as_it_is((&tagged, Offload::NONE)), passes);
            let expected = |frame: &[u8]| if passes { Ok(frame.to_vec()) } else { Err(Violation::Vlan) };
            let mut frames = Frames::default();
            for tags in [
                &[0x81, 0, 0, 42][..],
                &[0x88, 0xa8, 0, 42],
                &[0x91, 0, 0, 42],
                &[0x92, 0, 0, 42],
                &[0x93, 0, 0, 42],
                &[0x81, 0, 0x60, 0, 0x81, 0, 0, 42],
            ] {
                let frame = frame(MAC, tags);
                assert_eq!(out(&policy, &frame), expected(&frame));
                assert_eq!(policy.incoming((&frame, Offload::NONE), &mut frames).is_ok(), passes);
            }
            frames.clear();
            assert_eq!(
                (out(&policy, &priority), policy.incoming((&priority, Offload::NONE), &mut frames)),
                (Ok(priority.clone()), Ok(()))
            );
            assert_eq!(frames.iter().collect::<Vec<_>>(), [priority.as_slice()]);
        }
    }

    /// Builds a UDP datagram without its checksum.
    fn open_udp(tag: &[u8]) -> Vec<u8> {
        let ip = [0x45, 0, 0, 32, 0, 1, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        [&[0xff; 6], &MAC.0[..], tag, &[8, 0], &ip, &[0xc0, 0, 0, 53, 0, 12, 0, 0], b"data"].concat()
    }

    /// The port itself checks that a frame has the headers that its offload needs.
    #[test]
    fn offloads_that_do_not_fit_their_frame_are_dropped() {
        let udp = open_udp(&[]);
        let offload = Offload::checksum(&udp, 34, 40).unwrap();
        for (vlan, tag) in
            [(VlanMode::Untagged, &[][..]), (VlanMode::Trunk, &[]), (VlanMode::Access(42), &[0x81, 0, 0, 42])]
        {
            let policy = policy(vlan, ForgedTransmits::All);
            let mut frames = Frames::default();
            assert_eq!(policy.outgoing((&udp, offload), &mut frames, |_, _, _| true), Ok(()));
            assert_eq!((frames.get(0), frames.offload(0)), (Some(&open_udp(tag)[..]), offload));
            assert_eq!(policy.passes_as_it_is((&udp, offload)), tag.is_empty());
            // The offload refers to the header, at its new offset.
            let shift = u16::try_from(tag.len()).unwrap();
            let place = frames.offload(0).missing_checksum(frames.get(0).unwrap());
            assert_eq!(place, Some((34 + shift, 40 + shift)));
            let mut fragment = udp.clone();
            fragment[20] = 0x20;
            for other in [frame(MAC, &[]), frame(MAC, &[0x81, 0, 0, 0]), fragment] {
                assert!(policy.outgoing((&other, Offload::NONE), &mut frames, |_, _, _| true).is_ok());
                let refused = policy.outgoing((&other, offload), &mut frames, |_, _, _| true);
                assert_eq!((refused, policy.passes_as_it_is((&other, offload))), (Err(Violation::Offload), false));
            }
        }
    }

    #[test]
    fn an_access_port_tags_and_untags() {
        let policy = policy(VlanMode::Access(42), ForgedTransmits::Off);
        let (plain, tagged) = (frame(MAC, &[]), frame(MAC, &[0x81, 0, 0, 42]));
        assert!(!passes(&policy, &plain));
        assert_eq!(out(&policy, &plain).unwrap(), tagged);
        // A priority tag keeps its priority.
        assert_eq!(out(&policy, &frame(MAC, &[0x81, 0, 0x60, 0])).unwrap(), frame(MAC, &[0x81, 0, 0x60, 42]));
        assert_eq!(out(&policy, &tagged), Err(Violation::Vlan));
        let mut frames = Frames::default();
        assert_eq!(policy.incoming((&tagged, Offload::NONE), &mut frames), Ok(()));
        for wrong in [plain.as_slice(), &frame(MAC, &[0x81, 0, 0, 43]), &frame(MAC, &[0x81, 0, 0x60, 0]), &plain[..9]] {
            assert_eq!(policy.incoming((wrong, Offload::NONE), &mut frames), Err(Violation::Vlan));
        }
        assert_eq!(frames.iter().collect::<Vec<_>>(), [plain]);
    }
}
