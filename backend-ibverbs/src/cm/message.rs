//! Messages of an `ib_umad` file: `struct ib_user_mad_hdr` and a management datagram.

use pvrdma_ib_cm::{MAD_LEN, is_connection_manager};
use pvrdma_verbs_types::{Gid, Qpn, UdDestination};

use crate::datagram::Datagram;
use crate::gid::{Bound, HostGid};

/// Size of the header, in bytes.
const HEADER: usize = 64;
/// Size of the read buffer, in bytes: datagrams of other fabrics are longer.
pub(super) const LONGEST: usize = HEADER + 2048;

/// A received datagram.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Received {
    /// Index of the destination in the host's GID table.
    pub(super) gid_index: u8,
    pub(super) from: Gid,
    pub(super) to: UdDestination,
    pub(super) mad: Vec<u8>,
}

impl Received {
    /// Decodes a message. Returns `None` if it is not one of the connection manager, or has no addresses.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (header, mad) = bytes.split_first_chunk::<HEADER>()?;
        let status = u32::from_ne_bytes(field(header, 4));
        let from_qpn = u32::from_be_bytes(field(header, 20));
        let [.., service_level, _path_bits, grh_present, gid_index, hop_limit, traffic_class] = field::<8>(header, 28);
        if status != 0 || from_qpn != Qpn::GSI.get() || grh_present == 0 || !is_connection_manager(mad) {
            return None;
        }
        let to = UdDestination {
            qpn: Qpn::GSI,
            hop_limit,
            traffic_class,
            flow_label: u32::from_be_bytes(field(header, 52)),
            service_level,
            ..UdDestination::default()
        };
        Some(Self { gid_index, from: Gid(field(header, 36)), to, mad: mad.to_vec() })
    }
}

/// A datagram to be sent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Outgoing {
    /// Own address of the guest.
    pub(super) source: HostGid,
    to: UdDestination,
    mad: Vec<u8>,
}

impl Outgoing {
    /// Creates a message. Returns `None` if a guest may not send the datagram out of this process: it is not one of the
    /// connection manager, or its source is not the guest's own address.
    pub(crate) fn new(source: &Bound, datagram: &Datagram) -> Option<Self> {
        let Datagram { to, payload, immediate, .. } = datagram;
        let right = to.qpn == Qpn::GSI && immediate.is_none() && is_connection_manager(payload) && source.is_own();
        right.then(|| Self { source: source.host, to: *to, mad: payload.clone() })
    }

    /// Encodes the message for an agent. The kernel neither waits for a response nor retransmits, because guests do.
    pub(super) fn encode(&self, agent: u32) -> Vec<u8> {
        let Self { source, to, mad } = self;
        let mut out = Vec::with_capacity(HEADER + MAD_LEN);
        // Agent, status, timeout, retries, and the length, which the kernel knows.
        for word in [agent, 0, 0, 0, 0] {
            out.extend_from_slice(&word.to_ne_bytes());
        }
        out.extend_from_slice(&Qpn::GSI.get().to_be_bytes());
        out.extend_from_slice(&GSI_QKEY.to_be_bytes());
        // No LID and no path bits; a network header.
        out.extend_from_slice(&[0, 0, to.service_level, 0, 1, source.index, to.hop_limit, to.traffic_class]);
        out.extend_from_slice(&to.dgid.0);
        out.extend_from_slice(&(to.flow_label & 0x000f_ffff).to_be_bytes());
        // Use the default partition.
        out.resize(HEADER, 0);
        out.extend_from_slice(mad);
        out
    }

    /// Returns the destination.
    pub(super) const fn peer(&self) -> Gid {
        self.to.dgid
    }
}

const GSI_QKEY: u32 = 0x8001_0000;

fn field<const N: usize>(header: &[u8; HEADER], at: usize) -> [u8; N] {
    header.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvrdma_verbs::testing::gid;
    use pvrdma_verbs_types::GidType;

    fn mad() -> Vec<u8> {
        let mut mad: Vec<u8> = (0..=255).collect();
        mad[..4].copy_from_slice(&[1, 7, 2, 3]);
        mad
    }

    fn bound(host: u8) -> Bound {
        let host = HostGid { index: 5, gid: gid(host), kind: GidType::RoceV2 };
        Bound { gid: gid(1), kind: GidType::RoceV2, host }
    }

    fn datagram() -> Datagram {
        let to = UdDestination {
            dgid: gid(9),
            qpn: Qpn::GSI,
            hop_limit: 64,
            traffic_class: 8,
            flow_label: 0xff01_2345,
            service_level: 3,
            ..UdDestination::default()
        };
        Datagram { from: gid(1), to, kind: GidType::RoceV2, immediate: None, solicited: false, payload: mad() }
    }

    #[test]
    fn what_is_written_can_be_read() {
        let bytes = Outgoing::new(&bound(1), &datagram()).unwrap().encode(4);
        assert_eq!(bytes.len(), 320);
        assert_eq!((&bytes[..4], &bytes[20..24]), (&4_u32.to_ne_bytes()[..], &[0, 0, 0, 1][..]));
        let received = Received::decode(&bytes).unwrap();
        assert_eq!((received.gid_index, received.from, received.mad), (5, gid(9), mad()));
        let to = received.to;
        assert_eq!((to.hop_limit, to.traffic_class, to.service_level, to.flow_label), (64, 8, 3, 0x1_2345));
    }

    #[test]
    fn only_the_connection_manager_passes_and_only_from_ones_own_address() {
        assert_eq!(Outgoing::new(&bound(7), &datagram()), None);
        for change in [
            |datagram: &mut Datagram| datagram.to.qpn = Qpn::new(2),
            |datagram: &mut Datagram| datagram.immediate = Some([0; 4]),
            |datagram: &mut Datagram| datagram.payload[1] = 3,
            |datagram: &mut Datagram| datagram.payload[3] = 0x83,
            |datagram: &mut Datagram| datagram.payload.truncate(255),
            |datagram: &mut Datagram| datagram.payload.push(0),
            |datagram: &mut Datagram| datagram.payload.clear(),
        ] {
            let mut datagram = datagram();
            change(&mut datagram);
            assert_eq!(Outgoing::new(&bound(1), &datagram), None);
        }
    }

    #[test]
    fn malformed_datagrams_are_not_received() {
        let good = Outgoing::new(&bound(1), &datagram()).unwrap().encode(0);
        for length in 0..good.len() {
            assert_eq!(Received::decode(&good[..length]), None, "{length}");
        }
        // Status, sender's QPN, network header, base version, class, class version, method.
        for (at, value) in [(4, 110), (23, 2), (32, 0), (64, 2), (65, 3), (66, 1), (67, 0x83)] {
            let mut bytes = good.clone();
            bytes[at] = value;
            assert_eq!(Received::decode(&bytes), None, "{at}");
        }
    }

    /// Whatever a peer sends, a guest receives the management datagram unchanged or not at all.
    #[test]
    fn whatever_arrives_is_taken_whole_or_not_at_all() {
        let good = Outgoing::new(&bound(1), &datagram()).unwrap().encode(0);
        for at in 0..good.len() {
            for value in [0, 1, 0x80, 0xff] {
                let mut bytes = good.clone();
                bytes[at] = value;
                if let Some(received) = Received::decode(&bytes) {
                    assert_eq!(received.mad, bytes[HEADER..]);
                    assert_eq!((received.to.qpn, received.gid_index), (Qpn::GSI, bytes[33]));
                }
            }
        }
        for length in [HEADER, HEADER + MAD_LEN - 1, HEADER + MAD_LEN + 1, LONGEST, LONGEST + 1] {
            let mut bytes = good.clone();
            bytes.resize(length, 0);
            assert_eq!(Received::decode(&bytes), None, "{length}");
        }
    }
}
