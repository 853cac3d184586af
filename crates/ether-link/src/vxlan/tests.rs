use std::net::UdpSocket;
use std::slice;
use std::time::Duration;

use proptest::prelude::*;

use super::inner::tests::ipv4;
use super::*;
use crate::ManualClock;

const A: [u8; 6] = [2, 0, 0, 0, 0, 1];
const B: [u8; 6] = [2, 0, 0, 0, 0, 2];

fn frames(list: &[Vec<u8>]) -> Frames {
    let mut frames = Frames::default();
    list.iter().for_each(|frame| frames.push(frame));
    frames
}

fn link(config: &VxlanConfig) -> VxlanLink {
    VxlanLink::bind(config, Arc::new(ManualClock::default())).unwrap()
}

fn config(local: &str, remotes: &[SocketAddr]) -> VxlanConfig {
    let vni = Vni::new(7).unwrap();
    VxlanConfig { local: SocketAddr::new(local.parse().unwrap(), 0), remotes: remotes.to_vec(), vni, open: false }
}

/// A socket in place of a remote.
fn plain(local: &str) -> (UdpSocket, SocketAddr) {
    let socket = UdpSocket::bind((local, 0)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let address = socket.local_addr().unwrap();
    (socket, address)
}

/// Two links that are each other's only remote. Their addresses differ, their ports are free ones.
fn pair(one: &str, other: &str) -> (VxlanLink, VxlanLink) {
    let (a, b) = (plain(one).1, plain(other).1);
    let end = |local, remote| link(&VxlanConfig { local, ..config(one, &[remote]) });
    (end(a, b), end(b, a))
}

fn local_address(link: &VxlanLink) -> SocketAddr {
    UdpSocket::from(link.socket.try_clone().unwrap()).local_addr().unwrap()
}

/// Waits until `count` frames are there.
fn receive(link: &VxlanLink, count: usize) -> Vec<Vec<u8>> {
    let mut got = Frames::default();
    while got.len() < count {
        let mut fds = [rustix::event::PollFd::new(&*link.socket, rustix::event::PollFlags::IN)];
        if link.readiness().wait.is_none() {
            rustix::event::poll(&mut fds, None).unwrap();
        }
        link.receive(&mut got, 5);
    }
    got.iter().map(<[u8]>::to_vec).collect()
}

fn figure(link: &VxlanLink, name: &str) -> u64 {
    link.counters().iter().find(|counter| counter.name == name).unwrap().value
}

#[test]
fn the_bytes_on_the_wire() {
    let (socket, remote) = plain("127.0.0.2");
    let link = link(&config("127.0.0.1", &[remote]));
    let frame = ipv4(A, B, 0, [1, 4791], b"payload");
    assert_eq!(link.send(&frames(slice::from_ref(&frame)), 0), 1);
    let mut datagram = [0; 200];
    let (length, from) = socket.recv_from(&mut datagram).unwrap();
    assert_eq!(datagram[..length], [&[8, 0, 0, 0, 0, 0, 7, 0][..], &frame].concat());
    assert_ne!(from.port(), local_address(&link).port(), "the source port says which flow it is");
    // The same flow has the same port, and not all others do.
    let mut ports = HashSet::new();
    for flow in 0..64 {
        link.send(&frames(&[ipv4(A, B, 0, [flow, 4791], b"")]), 0);
        ports.insert(socket.recv_from(&mut datagram).unwrap().1.port());
    }
    assert!(ports.len() > 4, "{ports:?}");
    link.send(&frames(&[frame]), 0);
    assert_eq!(socket.recv_from(&mut datagram).unwrap().1, from);
    // The other way, from any port of the remote's address.
    let (other_port, _) = plain("127.0.0.2");
    other_port.send_to(&[&[8, 1, 1, 1, 0, 0, 7, 1][..], &[0; 20]].concat(), local_address(&link)).unwrap();
    assert_eq!(receive(&link, 1), [[0; 20]]);
}

#[test]
fn trains_arrive_as_the_frames_that_they_were() {
    for (one, other) in [("127.0.0.1", "127.0.0.2"), ("::1", "::1")] {
        let trains = |trains: bool| {
            // With one address the ports alone tell the two sockets apart, which is enough for two.
            let (a, b) = pair(one, other);
            if !trains {
                a.output.no_trains();
            }
            let mut sent = Vec::new();
            // Longer than one train, a shorter one at its end, other flows and classes between, one longer than the
            // next.
            for round in 0..4_u8 {
                sent.extend((0..40).map(|n| ipv4(A, B, 0, [5, 4791], &[n; 1000])));
                sent.push(ipv4(A, B, 0, [5, 4791], &[round; 10]));
                sent.extend((0..3_u8).map(|n| ipv4(A, B, 0x6a, [n.into(), 4791], &[n; 300])));
                sent.push(ipv4(A, B, 0x6a, [5, 4791], &[0; 4000]));
                sent.push(ipv4(A, B, 0, [5, 4791], &[0; 4001]));
                assert_eq!(a.send(&frames(&sent), sent.len() - 46), 46);
            }
            let mut got = receive(&b, sent.len());
            // Flows may overtake each other.
            sent.sort();
            got.sort();
            assert!(got == sent);
            assert_eq!((b.readiness().wait, a.lost()), (None, 0));
            figure(&a, "vxlan_trains_sent")
        };
        assert_eq!(trains(false), 0);
        let trains = trains(true);
        assert!((4..=20).contains(&trains), "{trains} trains of four times 41 frames");
    }
}

#[test]
fn a_train_that_is_too_long_for_the_way_goes_in_single_datagrams() {
    let (a, b) = pair("127.0.0.1", "127.0.0.2");
    // Two of these are longer than a UDP payload, and one is longer than the loopback's MTU allows for a segment.
    let sent: Vec<_> = (0..3).map(|n| ipv4(A, B, 0, [5, 4791], &vec![n; 65_400])).collect();
    let too_long = ipv4(A, B, 0, [5, 4791], &[0; 65_500]);
    assert_eq!(a.send(&frames(&[&sent[..], &[too_long]].concat()), 0), 4);
    assert_eq!(receive(&b, 3), sent);
    assert_eq!(a.lost(), 1, "longer than any datagram");
}

#[test]
fn only_remotes_are_listened_to() {
    let (remote, remote_address) = plain("127.0.0.2");
    let (stranger, _) = plain("127.0.0.3");
    let link = link(&config("127.0.0.1", &[remote_address]));
    let to = local_address(&link);
    let datagram = |header: [u8; 8], frame: &[u8]| [&header[..], frame].concat();
    let right = [8, 0, 0, 0, 0, 0, 7, 0];
    let frame = ipv4(A, B, 0, [1, 2], b"x");
    stranger.send_to(&datagram(right, &frame), to).unwrap();
    for wrong in [
        datagram([0, 0, 0, 0, 0, 0, 7, 0], &frame),
        datagram([8, 0, 0, 0, 0, 0, 8, 0], &frame),
        datagram(right, &frame[..13]),
        datagram(right, &ipv4(A, [3, 0, 0, 0, 0, 2], 0, [1, 2], b"a group is no sender")),
        vec![],
        vec![8; 7],
    ] {
        remote.send_to(&wrong, to).unwrap();
    }
    remote.send_to(&datagram(right, &frame), to).unwrap();
    assert_eq!(receive(&link, 1), [frame]);
    assert_eq!(figure(&link, "vxlan_dropped_sender"), 1);
    assert_eq!(figure(&link, "vxlan_dropped_vni"), 1);
    assert_eq!(figure(&link, "vxlan_dropped_malformed"), 5);
}

#[test]
fn stations_are_found_where_they_spoke() {
    let [(first, first_address), (second, second_address)] = ["127.0.0.2", "127.0.0.3"].map(plain);
    let clock = Arc::new(ManualClock::default());
    let config = config("127.0.0.1", &[first_address, second_address]);
    let link = VxlanLink::bind(&config, Arc::clone(&clock) as Arc<dyn Clock>).unwrap();
    let to_a = ipv4(A, B, 0, [1, 2], b"x");
    let from_a = ipv4(B, A, 0, [1, 2], b"y");
    let mut buffer = [0; 200];
    let mut takes = |socket: &UdpSocket| socket.recv_from(&mut buffer).unwrap().0;
    assert_eq!(link.send(&frames(slice::from_ref(&to_a)), 0), 1);
    assert_eq!((takes(&first), takes(&second)), (to_a.len() + 8, to_a.len() + 8), "unknown: to all");
    second.send_to(&[&[8, 0, 0, 0, 0, 0, 7, 0][..], &from_a].concat(), local_address(&link)).unwrap();
    receive(&link, 1);
    assert_eq!(figure(&link, "vxlan_stations"), 1);
    let mut everybody = to_a.clone();
    everybody[..6].fill(0xff);
    everybody.push(0);
    link.send(&frames(&[to_a.clone(), everybody]), 0);
    assert_eq!(takes(&first), to_a.len() + 9, "the first gets only what is for all");
    assert_eq!((takes(&second), takes(&second)), (to_a.len() + 8, to_a.len() + 9));
    clock.advance(AGE);
    link.send(&frames(slice::from_ref(&to_a)), 0);
    assert_eq!((takes(&first), takes(&second)), (to_a.len() + 8, to_a.len() + 8), "forgotten");
}

#[test]
fn an_open_end_answers_whom_it_heard() {
    let (spoke, spoke_address) = plain("127.0.0.2");
    let hub = link(&VxlanConfig { open: true, ..config("127.0.0.1", &[]) });
    let to_a = frames(&[ipv4(A, B, 0, [1, 2], b"x")]);
    assert_eq!(hub.send(&to_a, 0), 1, "there is nobody to send it to");
    let from_a = ipv4(B, A, 0, [1, 2], b"y");
    spoke.send_to(&[&[8, 0, 0, 0, 0, 0, 7, 0][..], &from_a].concat(), local_address(&hub)).unwrap();
    assert_eq!(receive(&hub, 1), [from_a]);
    // Learned remotes are at our own port.
    let mut expected = spoke_address;
    expected.set_port(local_address(&hub).port());
    let inner = Inner::of(to_a.get(0).unwrap()).unwrap();
    assert_eq!(hub.table.lock().target(&inner, Duration::ZERO), Target::One(expected));
}

#[test]
fn the_traffic_class_is_carried_outside() {
    for (one, other) in [("127.0.0.1", "127.0.0.2"), ("::1", "::1")] {
        let (a, b) = pair(one, other);
        for count in [1, 2] {
            let sent: Vec<_> = (0..count).map(|n| ipv4(A, B, 0x6a, [1, 4791], &vec![1; 40 + n])).collect();
            a.send(&frames(&sent), 0);
            for _ in 0..count {
                let mut fds = [rustix::event::PollFd::new(&*b.socket, rustix::event::PollFlags::IN)];
                if b.readiness().wait.is_none() {
                    rustix::event::poll(&mut fds, None).unwrap();
                }
                assert_eq!(b.input.lock().next(&b.socket).unwrap().class, 0x6a);
            }
        }
    }
}

#[test]
fn what_does_not_go_together_is_refused() {
    let remote = |text: &str| text.parse::<SocketAddr>().unwrap();
    let many: Vec<_> = (0..=255).map(|n| SocketAddr::from(([10, 0, 0, n], 1))).collect();
    for (remotes, word) in [
        (vec![], "needs a remote"),
        (vec![remote("[::1]:4789")], "IPv6"),
        (vec![remote("10.0.0.1:1"), remote("10.0.0.1:2")], "two remotes"),
        (vec![remote("0.0.0.0:4789")], "one host"),
        (vec![remote("239.0.0.1:4789")], "one host"),
        (vec![remote("10.0.0.1:0")], "one host"),
        (many[1..].to_vec(), "255 remotes"),
    ] {
        let error = config("127.0.0.1", &remotes).check().unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
    let taken = link(&config("127.0.0.1", &[remote("127.0.0.2:4789")]));
    let config = VxlanConfig { local: local_address(&taken), ..config("127.0.0.1", &[remote("127.0.0.2:4789")]) };
    let error = VxlanLink::bind(&config, Arc::new(ManualClock::default())).unwrap_err();
    assert!(error.to_string().contains(&config.local.to_string()), "{error}");
}

#[test]
fn sockets_that_were_handed_over_are_those_of_a_tunnel() {
    let (socket, remote) = plain("127.0.0.2");
    let config = config("127.0.0.1", &[remote]);
    let clock = || Arc::new(ManualClock::default());
    let end = VxlanLink::from_sockets(&config, sockets(&config).unwrap(), clock()).unwrap();
    let frame = ipv4(A, B, 0, [1, 4791], b"payload");
    assert_eq!(end.send(&frames(slice::from_ref(&frame)), 0), 1);
    assert_eq!(socket.recv(&mut [0; 200]).unwrap(), frame.len() + 8);
    for count in [0, 1, 16] {
        let few = sockets(&config).unwrap().into_iter().take(count).collect();
        assert!(VxlanLink::from_sockets(&config, few, clock()).is_err());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_frames_arrive_once_and_in_the_order_of_their_flow(
        list in prop::collection::vec((0..3_u16, prop::sample::select(vec![0_u8, 0x6a]), 0..600_usize), 1..80),
    ) {
        let (a, b) = pair("127.0.0.1", "127.0.0.2");
        let sent: Vec<_> = (0_u32..).zip(&list)
            .map(|(n, &(port, class, length))| {
                ipv4(A, B, class, [port, 4791], &[&n.to_be_bytes()[..], &vec![0; length]].concat())
            })
            .collect();
        prop_assert_eq!(a.send(&frames(&sent), 0), sent.len());
        let got = receive(&b, sent.len());
        for port in 0..3_u16 {
            let flow = |frame: &&Vec<u8>| frame[34..36] == port.to_be_bytes();
            prop_assert!(got.iter().filter(flow).eq(sent.iter().filter(flow)));
        }
        prop_assert_eq!(a.lost(), 0);
    }
}
