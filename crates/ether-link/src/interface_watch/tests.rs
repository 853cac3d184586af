//! Valid and invalid responses of the kernel; interfaces of a namespace (as root).

use netlink_packet_core::{DoneMessage, ErrorMessage};
use netlink_packet_route::link::{LinkFlags, LinkHeader};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::*;
use crate::namespace::Namespace;

fn datagram(sequence: u32, payload: NetlinkPayload<RouteNetlinkMessage>) -> Vec<u8> {
    let mut header = NetlinkHeader::default();
    header.sequence_number = sequence;
    let mut message = NetlinkMessage::new(header, payload);
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

fn new_link(flags: LinkFlags, attributes: Vec<LinkAttribute>) -> Vec<u8> {
    let mut message = LinkMessage::default();
    message.header = LinkHeader { index: 7, flags, ..LinkHeader::default() };
    message.attributes = attributes;
    datagram(5, NetlinkPayload::from(RouteNetlinkMessage::NewLink(message)))
}

fn error(errno: i32) -> Vec<u8> {
    let mut error = ErrorMessage::default();
    error.code = std::num::NonZeroI32::new(errno.wrapping_neg());
    datagram(5, NetlinkPayload::Error(error))
}

fn named(mtu: u32) -> Vec<LinkAttribute> {
    vec![LinkAttribute::IfName("wire".to_owned()), LinkAttribute::Mtu(mtu)]
}

#[test]
fn flags_and_mtu_are_understood() {
    let (up, lower) = (LinkFlags::Up, LinkFlags::LowerUp);
    for (flags, state) in [
        (LinkFlags::empty(), InterfaceState::Down { mtu: 1500 }),
        // An interface that was set down may keep its carrier.
        (lower, InterfaceState::Down { mtu: 1500 }),
        (up | LinkFlags::Running, InterfaceState::NoCarrier { mtu: 1500 }),
        (up | lower, InterfaceState::Up { mtu: 1500 }),
    ] {
        assert_eq!(parse(&new_link(flags, named(1500)), 5).unwrap(), Some(state), "{flags:?}");
    }
    assert_eq!(parse(&error(libc::ENODEV), 5).unwrap(), Some(InterfaceState::Absent));
    assert_eq!(parse(&error(libc::EPERM), 5).unwrap_err().raw_os_error(), Some(libc::EPERM));
}

/// Attributes that a later kernel may add, in unknown formats.
#[test]
fn unknown_attributes_are_ignored() {
    let strange =
        |kind: u16, bytes: usize| LinkAttribute::Other(netlink_packet_core::DefaultNla::new(kind, vec![0xff; bytes]));
    let attributes = [vec![strange(18, 3), strange(0x3fff, 7)], named(9000), vec![strange(4, 1)]].concat();
    let state = parse(&new_link(LinkFlags::Up | LinkFlags::LowerUp, attributes), 5).unwrap();
    assert_eq!(state, Some(InterfaceState::Up { mtu: 9000 }));
}

#[test]
fn responses_to_others_are_none() {
    assert_eq!(parse(&new_link(LinkFlags::Up, named(1500)), 4).unwrap(), None);
    assert_eq!(parse(&error(libc::ENODEV), 6).unwrap(), None);
}

/// Attack: datagrams that are truncated, altered, or of another kind. Each is either rejected or parsed.
#[test]
fn whatever_arrives_is_parsed_or_refused() {
    let whole = new_link(LinkFlags::Up, named(1500));
    for length in 0..whole.len() {
        assert!(parse(&whole[..length], 5).is_err(), "{length}");
    }
    for at in 0..whole.len() {
        for value in [0, 1, 3, 4, 0x7f, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] = value;
            let _ = parse(&bytes, 5);
        }
    }
    // The length field is shorter than the message.
    for length in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[..4].copy_from_slice(&u32::try_from(length).unwrap().to_ne_bytes());
        assert!(parse(&bytes, 5).is_err(), "{length}");
    }
    let without_mtu = new_link(LinkFlags::Up, vec![LinkAttribute::IfName("wire".to_owned())]);
    let done = datagram(5, NetlinkPayload::Done(DoneMessage::default()));
    for bytes in [without_mtu, done, error(0), error(i32::MIN), vec![], vec![0; 16], vec![0xff; 64]] {
        assert!(parse(&bytes, 5).is_err(), "{bytes:?}");
    }
}

impl Namespace {
    /// Sockets stay in the namespace in which they were created.
    fn watch(&self, name: &str) -> InterfaceWatch {
        self.enter(|| InterfaceWatch::open(name.parse().unwrap()).unwrap())
    }
}

/// Waits for a hint, and queries the state.
fn next(watch: &mut InterfaceWatch) -> InterfaceState {
    let mut poll = [PollFd::new(&watch.hints, PollFlags::IN)];
    let patience = Timespec { tv_sec: 20, tv_nsec: 0 };
    assert_ne!(rustix::event::poll(&mut poll, Some(&patience)).unwrap(), 0, "no hint");
    watch.look().unwrap()
}

/// Queries until the interface has the expected state: earlier hints may refer to other changes.
#[track_caller]
fn expect(watch: &mut InterfaceWatch, state: InterfaceState) {
    while next(watch) != state {}
}

#[test]
fn states_of_an_interface_are_reported() {
    let Some(host) = Namespace::new("watch") else { return };
    let (mut watch, mut other) = (host.watch("wire"), host.watch("second"));
    assert_eq!((watch.look().unwrap(), other.look().unwrap()), (InterfaceState::Absent, InterfaceState::Absent));
    host.ip("link add wire mtu 1500 type veth peer name far");
    expect(&mut watch, InterfaceState::Down { mtu: 1500 });
    host.ip("link set wire up");
    expect(&mut watch, InterfaceState::NoCarrier { mtu: 1500 });
    host.ip("link set far up");
    expect(&mut watch, InterfaceState::Up { mtu: 1500 });
    host.ip("link set wire mtu 4500");
    expect(&mut watch, InterfaceState::Up { mtu: 4500 });
    host.ip("link set far down");
    expect(&mut watch, InterfaceState::NoCarrier { mtu: 4500 });
    host.ip("link delete wire");
    expect(&mut watch, InterfaceState::Absent);
    host.ip("link add wire mtu 9000 type veth peer name far");
    expect(&mut watch, InterfaceState::Down { mtu: 9000 });
    // The name belongs to another interface, or is an alternative name: the kernel resolves it.
    host.ip("link set wire name first");
    expect(&mut watch, InterfaceState::Absent);
    host.ip("link property add dev first altname second");
    expect(&mut other, InterfaceState::Down { mtu: 9000 });
}

/// Attack: more changes than the hint buffer can hold, of this interface and of others. The last state is seen.
#[test]
fn hints_that_are_lost_are_not_missed() {
    let Some(host) = Namespace::new("hints") else { return };
    host.ip("link add wire mtu 1500 type veth peer name far");
    let mut watch = host.watch("wire");
    assert_eq!(watch.look().unwrap(), InterfaceState::Down { mtu: 1500 });
    for round in 0..40 {
        host.ip(&format!("link set far mtu {}", 1400 + round));
        host.ip(&format!("link set wire mtu {}", 1300 + round));
    }
    let lost = || {
        let mut poll = [PollFd::new(&watch.hints, PollFlags::IN)];
        rustix::event::poll(&mut poll, Some(&Timespec::default())).unwrap();
        poll[0].revents().contains(PollFlags::ERR)
    };
    assert!(lost(), "no message was lost, so the test has no effect");
    assert_eq!(next(&mut watch), InterfaceState::Down { mtu: 1339 });
    host.ip("link set wire mtu 1500");
    expect(&mut watch, InterfaceState::Down { mtu: 1500 });
}
