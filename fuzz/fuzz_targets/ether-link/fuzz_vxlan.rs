//! Attackers that can send datagrams to a tunnel's end, with the address of a remote or of a stranger, alone or in
//! trains, while MAC addresses are learned, move and age, and while the end itself sends.
//!
//! On the loopback interface, a datagram has usually reached its receiver when the call that sends it returns. If not,
//! the target waits for it.
#![no_main]

use std::io::IoSlice;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use nix::sys::socket::{ControlMessage, MsgFlags, SockaddrIn, sendmsg};
use pvrdma_ether_link::vxlan::{MAX_REMOTES, MAX_STATIONS, Vni, VxlanConfig, VxlanLink};
use pvrdma_link::{Frames, Link, ManualClock};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::set_ip_tos;

const VNI: u32 = 0x12_3456;
/// Bytes in front of a frame.
const HEADER: [u8; 8] = [8, 0, 0, 0, 0x12, 0x34, 0x56, 0];
/// Number of senders: two remotes and two strangers.
const SENDERS: usize = 4;
const REMOTES: usize = 2;
/// Most steps of an input.
const MAX_STEPS: usize = 64;
/// Time limit that is sufficient on any machine.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Arbitrary, Debug)]
struct Script {
    /// Strangers become remotes.
    open: bool,
    /// The second remote is one.
    two: bool,
    steps: Vec<Step>,
}

#[derive(Arbitrary, Debug)]
enum Step {
    /// A datagram comes.
    Comes { from: u8, class: u8, header: Header, frame: Frame },
    /// A train of datagrams, cut after this many bytes each.
    Train { from: u8, class: u8, segment: u16, header: Header, frame: Frame, count: u8 },
    /// The end sends.
    Goes(Vec<Frame>),
    /// Stations age.
    Passes(u16),
}

#[derive(Arbitrary, Debug)]
enum Header {
    Right,
    Other([u8; 8]),
    None,
}

#[derive(Arbitrary, Debug)]
enum Frame {
    Built { to: u8, from: u8, kind: u8, tag: bool, class: u8, body: Vec<u8> },
    Any(Vec<u8>),
}

impl Header {
    const fn bytes(&self) -> &[u8] {
        match self {
            Self::Right => &HEADER,
            Self::Other(bytes) => bytes,
            Self::None => &[],
        }
    }
}

impl Frame {
    fn bytes(&self) -> Vec<u8> {
        let (to, from, kind, tag, class, body) = match self {
            Self::Built { to, from, kind, tag, class, body } => (to, from, kind, tag, class, body),
            Self::Any(bytes) => return bytes.clone(),
        };
        // A few stations, and groups.
        let mac = |number: &u8| [number >> 7, 0, 0, 0, 0, number & 15];
        let tag: &[u8] = if *tag { &[0x81, 0, 0, 1] } else { &[] };
        let (kind, ip): (_, &[u8]) = match kind & 3 {
            0 => ([8, 0], &[0x45, *class, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0, 1, 0x12, 0xb7]),
            1 => ([0x86, 0xdd], &[0x60 | class >> 4, class << 4, 0, 0, 0, 0, 17, 64]),
            2 => ([0x89, 0x15], &[0x60 | class >> 4, class << 4, 0, 0, 0, 0, 0x1b, 64]),
            _ => ([*class, 6], &[]),
        };
        [&mac(to), &mac(from), tag, &kind, ip, body].concat()
    }
}

/// An end of a tunnel between senders.
struct Tunnel {
    link: VxlanLink,
    clock: Arc<ManualClock>,
    local: SocketAddrV4,
    remotes: usize,
    open: bool,
    senders: [UdpSocket; SENDERS],
    /// Says that nothing more comes.
    last: UdpSocket,
}

impl Tunnel {
    fn new(script: &Script) -> Self {
        let mut senders = [2, 3, 4, 5].map(|last| UdpSocket::bind((Ipv4Addr::new(127, 0, 0, last), 0)).unwrap());
        senders.iter().for_each(|sender| sender.set_read_timeout(Some(PATIENCE)).unwrap());
        let last = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let remotes = if script.two { REMOTES } else { 1 };
        let config = VxlanConfig::new((Ipv4Addr::LOCALHOST, 0).into())
            .with_remotes(senders[..remotes].iter().map(|sender| sender.local_addr().unwrap()).collect())
            .with_vni(Vni::new(VNI).unwrap())
            .with_open(script.open);
        let clock = Arc::new(ManualClock::default());
        let link = VxlanLink::bind(&config, clock.clone()).unwrap();
        let name = link.inspect().name;
        let SocketAddr::V4(local) = name.split(' ').next().unwrap().parse().unwrap() else { panic!("{name}") };
        // Frames to MAC addresses behind a stranger go to its address and the tunnel's port, which the stranger may
        // have by chance.
        for stranger in &mut senders[remotes..] {
            let SocketAddr::V4(at) = stranger.local_addr().unwrap() else { panic!("{stranger:?}") };
            if at.port() == local.port() {
                *stranger = UdpSocket::bind((*at.ip(), 0)).unwrap();
                stranger.set_read_timeout(Some(PATIENCE)).unwrap();
            }
        }
        Self { link, clock, local, remotes, open: script.open, senders, last }
    }

    fn count(&self, prefix: &str) -> u64 {
        let counters = self.link.counters();
        counters.iter().filter(|counter| counter.name.starts_with(prefix)).map(|counter| counter.value).sum()
    }

    /// Datagrams arrive. Each becomes a frame, unchanged except for a congestion mark, or is counted as dropped.
    fn deliver(&self, from: u8, class: u8, payload: &[u8], segment: Option<u16>) {
        let from = usize::from(from) % SENDERS;
        set_ip_tos(&self.senders[from], class).unwrap();
        let size = segment.map_or(payload.len(), usize::from);
        let control = segment.as_ref().map(ControlMessage::UdpGsoSegments);
        let control: Vec<_> = control.into_iter().collect();
        let (socket, to) = (self.senders[from].as_raw_fd(), SockaddrIn::from(self.local));
        let dropped = self.count("vxlan_dropped");
        // Linux refuses trains of too many.
        if sendmsg(socket, &[IoSlice::new(payload)], &control, MsgFlags::MSG_DONTWAIT, Some(&to)).is_err() {
            return;
        }
        let mut datagrams: Vec<&[u8]> = payload.chunks(size.max(1)).collect();
        if payload.is_empty() {
            datagrams.push(&[]);
        }
        let mut frames = Frames::default();
        loop {
            self.link.receive(&mut frames, datagrams.len() + 1);
            let seen = frames.len() as u64 + self.count("vxlan_dropped") - dropped;
            assert!(seen <= datagrams.len() as u64, "{seen} of {}", datagrams.len());
            if seen == datagrams.len() as u64 {
                break;
            }
            let readable = self.link.readiness().readable.unwrap();
            let patience = Timespec::try_from(PATIENCE).unwrap();
            let more = poll(&mut [PollFd::new(&*readable, PollFlags::IN)], Some(&patience)).unwrap();
            assert!(more > 0, "{seen} of {}", datagrams.len());
        }
        let mut left = datagrams.iter();
        for frame in frames.iter() {
            assert!(self.open || from < self.remotes, "a stranger is heard");
            let same = |sent: &&&[u8]| sent.get(8..).is_some_and(|sent| is_same(sent, frame));
            let sent = left.find(same).expect("no end has sent this");
            assert!(sent[0] & 8 != 0 && sent[4..7] == HEADER[4..7], "of another network: {sent:x?}");
            assert!(frame.len() >= 14 && frame[6] & 1 == 0, "no frame, or from a group: {frame:x?}");
        }
        assert!(self.count("vxlan_stations") <= (MAX_REMOTES * MAX_STATIONS) as u64);
    }

    /// Frames leave. Each remote gets each of them at most once and unchanged, and a stranger gets none.
    fn send(&self, list: &[Vec<u8>]) {
        let mut frames = Frames::default();
        list.iter().for_each(|frame| frames.push(frame));
        let lost = self.link.lost();
        let sent = self.link.send(&frames, 0);
        let lost = self.link.lost() - lost;
        assert!(sent <= list.len());
        let mut arrived = 0;
        for (index, sender) in self.senders.iter().enumerate() {
            let mut buffer = [0; 8192];
            let mut left: Vec<_> = list[..sent].iter().collect();
            self.last.send_to(&[], sender.local_addr().unwrap()).unwrap();
            loop {
                let length = sender.recv(&mut buffer).unwrap();
                if length == 0 {
                    break;
                }
                assert!(index < self.remotes, "a stranger gets a frame");
                let (header, frame) = buffer[..length].split_at(HEADER.len());
                assert_eq!(header, HEADER);
                let at = left.iter().position(|sent| *sent == frame).expect("more than was sent");
                left.remove(at);
                arrived += 1;
            }
        }
        // Frames to a learned remote cannot be observed.
        assert!(self.open || arrived + lost >= sent as u64, "{sent} sent, {arrived} arrived, {lost} lost");
    }
}

/// Returns `true` if a frame equals the sent one, except for the congestion mark and the checksum that covers it.
fn is_same(sent: &[u8], frame: &[u8]) -> bool {
    let network = if frame.get(12..14) == Some(&[0x81, 0]) { 18 } else { 14 };
    let may_differ = [network + 1, network + 10, network + 11];
    sent.len() == frame.len()
        && sent.iter().zip(frame).enumerate().all(|(at, (sent, frame))| sent == frame || may_differ.contains(&at))
}

fuzz_target!(|script: Script| {
    let tunnel = Tunnel::new(&script);
    for step in script.steps.iter().take(MAX_STEPS) {
        match step {
            Step::Comes { from, class, header, frame } => {
                tunnel.deliver(*from, *class, &[header.bytes(), &frame.bytes()].concat(), None);
            }
            Step::Train { from, class, segment, header, frame, count } => {
                let one = [header.bytes(), &frame.bytes()].concat();
                let all = one.repeat(usize::from(count % 8) + 1);
                // A train of equal datagrams, or of any lengths.
                let segment = if segment % 2 == 0 { one.len() as u16 } else { segment % 2048 };
                tunnel.deliver(*from, *class, &all, Some(segment.max(1)));
            }
            Step::Goes(frames) => {
                tunnel.send(&frames.iter().take(16).map(Frame::bytes).collect::<Vec<_>>());
            }
            Step::Passes(seconds) => tunnel.clock.advance(Duration::from_secs(u64::from(*seconds))),
        }
    }
});
