use std::collections::HashSet;
use std::net::UdpSocket;
use std::slice;
use std::time::Duration;

use proptest::prelude::*;
use pvrdma_link::ManualClock;

use super::inner::tests::ipv4;
use super::*;

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

/// A socket that acts as a remote.
fn plain(local: &str) -> (UdpSocket, SocketAddr) {
    let socket = UdpSocket::bind((local, 0)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let address = socket.local_addr().unwrap();
    (socket, address)
}

/// Returns two links that are each other's only remote. Their addresses differ, their ports are free ones.
fn pair(one: &str, other: &str) -> (VxlanLink, VxlanLink) {
    let (a, b) = (plain(one).1, plain(other).1);
    let end = |local, remote| link(&VxlanConfig { local, ..config(one, &[remote]) });
    (end(a, b), end(b, a))
}

fn local_address(link: &VxlanLink) -> SocketAddr {
    UdpSocket::from(link.socket.try_clone().unwrap()).local_addr().unwrap()
}

/// Waits until `count` frames have been received.
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
    // The same flow has the same port, and not all other flows do.
    let mut ports = HashSet::new();
    for flow in 0..64 {
        link.send(&frames(&[ipv4(A, B, 0, [flow, 4791], b"")]), 0);
        ports.insert(socket.recv_from(&mut datagram).unwrap().1.port());
    }
    assert!(ports.len() > 4, "{ports:?}");
    link.send(&frames(&[frame]), 0);
    assert_eq!(socket.recv_from(&mut datagram).unwrap().1, from);
    // In the other direction, from any port of the remote's address.
    let (other_port, _) = plain("127.0.0.2");
    other_port.send_to(&[&[8, 1, 1, 1, 0, 0, 7, 1][..], &[0; 20]].concat(), local_address(&link)).unwrap();
    assert_eq!(receive(&link, 1), [[0; 20]]);
}

#[test]
fn trains_arrive_as_the_frames_that_they_were() {
    for (one, other) in [("127.0.0.1", "127.0.0.2"), ("::1", "::1")] {
        let trains = |trains: bool| {
            // With one address, only the ports distinguish the two sockets, which is sufficient for two.
            let (a, b) = pair(one, other);
            if !trains {
                a.output.no_trains();
            }
            let mut sent = Vec::new();
            // Runs longer than one train, a shorter datagram at the end, other flows and classes in between, one longer
            // than the next.
            for round in 0..4_u8 {
                sent.extend((0..40).map(|n| ipv4(A, B, 0, [5, 4791], &[n; 1000])));
                sent.push(ipv4(A, B, 0, [5, 4791], &[round; 10]));
                sent.extend((0..3_u8).map(|n| ipv4(A, B, 0x6a, [n.into(), 4791], &[n; 300])));
                sent.push(ipv4(A, B, 0x6a, [5, 4791], &[0; 4000]));
                sent.push(ipv4(A, B, 0, [5, 4791], &[0; 4001]));
                assert_eq!(a.send(&frames(&sent), sent.len() - 46), 46);
            }
            let mut got = receive(&b, sent.len());
            // The order of different flows is not defined.
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
fn a_train_that_is_too_long_for_the_path_leaves_as_single_datagrams() {
    let (a, b) = pair("127.0.0.1", "127.0.0.2");
    // Two of these are longer than a UDP payload, and one is longer than the loopback's MTU permits for a segment.
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
fn stations_are_found_at_their_last_source() {
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
    assert_eq!(takes(&first), to_a.len() + 9, "the first gets only the broadcast");
    assert_eq!((takes(&second), takes(&second)), (to_a.len() + 8, to_a.len() + 9));
    clock.advance(AGE);
    link.send(&frames(slice::from_ref(&to_a)), 0);
    assert_eq!((takes(&first), takes(&second)), (to_a.len() + 8, to_a.len() + 8), "forgotten");
}

/// Each host of the Internet can send datagrams to an open end, and those of other networks at the same port arrive at
/// the first one.
#[test]
fn only_frames_of_its_network_take_the_room_of_an_open_end() {
    let hub = link(&VxlanConfig { open: true, ..config("127.0.0.1", &[]) });
    let frame = ipv4(A, B, 0, [1, 4791], b"payload");
    let datagram = |flags, vni| [&[flags, 0, 0, 0, 0, 0, vni, 0][..], &frame].concat();
    let accepts = |number: u16, datagram: &[u8]| {
        let [high, low] = number.to_be_bytes();
        let from = SocketAddr::from(([10, 0, high, low], 1000));
        hub.accept(Arrived { from, class: 0, payload: &mut datagram.to_vec() }).is_some()
    };
    for number in 0..3 * u16::try_from(MAX_REMOTES).unwrap() {
        let stranger: &[u8] = match number % 4 {
            0 => &datagram(0, 7),
            1 => &datagram(8, 6),
            2 => &datagram(8, 7)[..20],
            _ => b"short",
        };
        assert!(!accepts(number, stranger), "{number}");
    }
    for number in 0..u16::try_from(MAX_REMOTES).unwrap() {
        assert!(accepts(10_000 + number, &datagram(8, 7)), "{number}");
    }
    assert!(!accepts(u16::MAX, &datagram(8, 7)));
    assert_eq!(figure(&hub, "vxlan_dropped_sender"), 1);
}

#[test]
fn an_open_end_learns_the_address_of_a_remote() {
    let (spoke, spoke_address) = plain("127.0.0.2");
    let hub = link(&VxlanConfig { open: true, ..config("127.0.0.1", &[]) });
    let to_a = frames(&[ipv4(A, B, 0, [1, 2], b"x")]);
    assert_eq!(hub.send(&to_a, 0), 1, "there is no remote to send it to");
    let from_a = ipv4(B, A, 0, [1, 2], b"y");
    spoke.send_to(&[&[8, 0, 0, 0, 0, 0, 7, 0][..], &from_a].concat(), local_address(&hub)).unwrap();
    assert_eq!(receive(&hub, 1), [from_a]);
    // Learned remotes are reached at the local port number.
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
fn contradictory_remotes_are_refused() {
    let remote = |text: &str| text.parse::<SocketAddr>().unwrap();
    let numbers = (0..=u16::try_from(MAX_REMOTES).unwrap()).map(u16::to_be_bytes);
    let many: Vec<_> = numbers.map(|[high, low]| SocketAddr::from(([10, 1, high, low], 1))).collect();
    config("127.0.0.1", &many[1..]).check().unwrap();
    for (remotes, word) in [
        (vec![], "needs a remote"),
        (vec![remote("[::1]:4789")], "IPv6"),
        (vec![remote("10.0.0.1:1"), remote("10.0.0.1:2")], "two remotes"),
        (vec![remote("0.0.0.0:4789")], "one host"),
        (vec![remote("239.0.0.1:4789")], "one host"),
        (vec![remote("10.0.0.1:0")], "one host"),
        (many, "641 remotes"),
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

/// A port with networks, each with a link whose only remote is `remote`.
struct Networks {
    port: VxlanPort,
    local: SocketAddr,
    remote: SocketAddr,
    links: Vec<(u32, VxlanLink)>,
}

impl Networks {
    fn new(local: &str, remote: SocketAddr) -> Self {
        let local = plain(local).1;
        Self { port: VxlanPort::new(local), local, remote, links: Vec::new() }
    }

    fn config(&self, number: u32) -> VxlanConfig {
        let vni = Vni::new(number).unwrap();
        VxlanConfig { local: self.local, remotes: vec![self.remote], vni, open: false }
    }

    fn open(&mut self, number: u32) {
        let config = self.config(number);
        let sockets = self.port.open(&config).unwrap();
        let link = VxlanLink::from_sockets(&config, sockets, Arc::new(ManualClock::default())).unwrap();
        self.links.push((number, link));
    }

    fn close(&mut self, number: u32) {
        self.links.retain(|(known, _)| *known != number);
        self.port.close(Vni::new(number).unwrap());
    }

    /// Returns whether the kernel coalesces datagrams for each link.
    fn trains(&self) -> Vec<bool> {
        use nix::sys::socket::getsockopt;
        use nix::sys::socket::sockopt::UdpGroSegment;
        self.links.iter().map(|(_, link)| getsockopt(&link.socket, UdpGroSegment).unwrap()).collect()
    }

    fn dropped(&self) -> (u64, u64) {
        let sum = |name| self.links.iter().map(|(_, link)| figure(link, name)).sum();
        (sum("vxlan_dropped_vni"), sum("vxlan_dropped_malformed"))
    }

    /// Each network gets its own frames, and of other datagrams only those that belong to no network.
    fn check(&self, sender: &UdpSocket, round: u8) {
        let before = self.dropped();
        let frame =
            |number: u32, n: u8| ipv4(A, B, 0, [n.into(), 4791], &[&number.to_be_bytes()[..], &[round]].concat());
        let send = |number: u32, n| {
            let header = Vni::new(number).unwrap().header();
            sender.send_to(&[&header[..], &frame(number, n)].concat(), self.local).unwrap();
        };
        for n in 0..20 {
            for (number, _) in &self.links {
                send(*number, n);
                send(99, n);
            }
            sender.send_to(&[8; 3], self.local).unwrap();
        }
        for (number, link) in &self.links {
            let got = receive(link, 20);
            assert!(got == (0..20).map(|n| frame(*number, n)).collect::<Vec<_>>(), "VNI {number}");
        }
        // On the loopback, all datagrams that were sent have arrived at this time.
        self.links.iter().for_each(|(_, link)| link.receive(&mut Frames::default(), 1000));
        let after = self.dropped();
        assert_eq!((after.0 - before.0, after.1 - before.1), (20 * self.links.len() as u64, 20));
    }
}

#[test]
fn networks_at_one_port_are_distinguished_by_vni() {
    for (local, remote) in [("127.0.0.1", "127.0.0.2"), ("::1", "::1")] {
        let (sender, remote) = plain(remote);
        let mut networks = Networks::new(local, remote);
        networks.open(7);
        networks.check(&sender, 0);
        assert_eq!(networks.trains(), [true], "alone");
        assert!(UdpSocket::bind(networks.local).is_err());
        let foreign = sockets::bind_shared(networks.local);
        assert!(foreign.is_err(), "one network has the port for itself: {foreign:?}");
        for (round, number) in (1..).zip([8, Vni::MAX, 0, 7 << 8]) {
            networks.open(number);
            networks.check(&sender, round);
        }
        assert_eq!(networks.trains(), [false; 5], "they would hold datagrams of several networks");
        let error = networks.port.open(&networks.config(8)).unwrap_err();
        assert!(error.to_string().contains("VNI 8"), "{error}");
        // The first, the last and one in between are removed; the others keep their assignment.
        for (round, number) in (10..).zip([8, 7, 7 << 8]) {
            networks.close(number);
            networks.check(&sender, round);
        }
        networks.open(8);
        networks.check(&sender, 20);
        for number in [0, Vni::MAX, 5] {
            networks.close(number);
        }
        networks.check(&sender, 21);
        assert_eq!(networks.trains(), [true]);
        let other = VxlanConfig { local: remote, ..networks.config(1) };
        assert!(networks.port.open(&other).is_err());
    }
}

#[test]
fn a_process_keeps_the_ports_of_all_networks() {
    let (_, remote) = plain("127.0.0.2");
    let local = plain("127.0.0.1").1;
    let ports = VxlanPorts::default();
    let open = |local, number| {
        let config = VxlanConfig { local, vni: Vni::new(number).unwrap(), ..config("127.0.0.1", &[remote]) };
        ports.open(&config)
    };
    let one = open(local, 1).unwrap();
    let two = open(local, 2).unwrap();
    let other = plain("127.0.0.1").1;
    let elsewhere = open(other, 1).unwrap();
    assert!(matches!(open(local, 1), Err(VxlanError::SameVni { .. })));
    assert_eq!(one.duplicates().unwrap().len(), 17);
    drop(one);
    drop((open(local, 1).unwrap(), two, elsewhere));
    UdpSocket::bind(local).unwrap();
}

#[test]
fn a_network_that_cannot_be_opened_leaves_the_others_alone() {
    let (sender, remote) = plain("127.0.0.2");
    let mut networks = Networks::new("127.0.0.1", remote);
    networks.open(7);
    networks.open(8);
    let no_remote = VxlanConfig { remotes: vec![], ..networks.config(9) };
    assert!(matches!(networks.port.open(&no_remote), Err(VxlanError::NoRemote)));
    networks.check(&sender, 0);
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
