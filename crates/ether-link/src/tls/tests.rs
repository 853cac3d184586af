use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::LazyLock;
use std::time::Instant;

use pvrdma_link::MAX_LINK_FRAME;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};
use rustls::ClientConnection;
use rustls::pki_types::ServerName;

use super::admission::MAX_SILENT;
use super::handshake::{Backoff, FIRST_RETRY, LAST_RETRY, PATIENCE};
use super::keys::{Identity, PROTOCOL};
use super::*;

/// Upper bound for any wait, on any machine.
const LONG: Duration = Duration::from_secs(60);

/// Certificate authority.
struct Authority(CertifiedIssuer<'static, KeyPair>);

/// An authority that the ends trust, and one that they do not.
static OURS: LazyLock<Authority> = LazyLock::new(Authority::new);
static OTHER: LazyLock<Authority> = LazyLock::new(Authority::new);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// Writes a certificate for these names with its key, and the certificate of the authority that its owner trusts.
    fn issue(&self, names: &[&str], trusts: &Self, change: impl FnOnce(&mut CertificateParams)) -> Keys {
        let folder = tempfile::tempdir().unwrap();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(names.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap();
        change(&mut params);
        let certificate = params.signed_by(&key, &self.0).unwrap().pem();
        let write = |name: &str, text: String| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let files = TlsFiles {
            certificate: write("certificate.pem", certificate),
            key: write("key.pem", key.serialize_pem()),
            authority: write("authority.pem", trusts.0.pem()),
        };
        Keys { files, _folder: folder }
    }
}

/// Keys of an end, deleted with the test.
struct Keys {
    files: TlsFiles,
    _folder: tempfile::TempDir,
}

fn keys(names: &[&str]) -> Keys {
    OURS.issue(names, &OURS, |_| {})
}

impl Keys {
    fn config(&self, role: TlsRole, address: SocketAddr) -> TlsConfig {
        TlsConfig { role, address, peer: None, files: self.files.clone() }
    }

    /// Returns the client configuration for these keys.
    fn client(&self, at: SocketAddr) -> Arc<rustls::ClientConfig> {
        let config = self.config(TlsRole::Connect, at);
        let Identity::Client(client, _) = TlsKeys::read(&config).unwrap().identity(&config).unwrap() else { panic!() };
        client
    }
}

fn any_port() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

fn listen() -> TlsLink {
    TlsLink::open(&keys(&["127.0.0.1"]).config(TlsRole::Listen, any_port())).unwrap()
}

fn connect(listener: &TlsLink) -> TlsLink {
    TlsLink::open(&keys(&["some.host"]).config(TlsRole::Connect, address(listener))).unwrap()
}

fn address(listener: &TlsLink) -> SocketAddr {
    listener.listens.unwrap()
}

fn count(link: &TlsLink, name: &str) -> u64 {
    link.counters().iter().find(|counter| counter.name == name).unwrap().value
}

fn is_up(link: &TlsLink) -> bool {
    link.inspect().up.taken().unwrap_or_default()
}

/// Waits for a descriptor of a link, or until its readiness may have changed.
fn wait(link: &TlsLink, flags: PollFlags) {
    let readiness = link.readiness();
    if readiness.wait.is_none() {
        let fd = if flags.contains(PollFlags::OUT) { readiness.writable } else { readiness.readable };
        let patience = Timespec::try_from(LONG).unwrap();
        assert!(poll(&mut [PollFd::new(&*fd.unwrap(), flags)], Some(&patience)).unwrap() > 0, "nothing happens");
    }
}

fn wait_until_up(link: &TlsLink) {
    wait_for_arrivals(link, || is_up(link));
}

/// Waits for connections until `done`.
fn wait_for_arrivals(link: &TlsLink, done: impl Fn() -> bool) {
    let (arrived, patience) = (link.shared.arrived.descriptor(), Timespec::try_from(LONG).unwrap());
    while !done() {
        assert!(
            poll(&mut [PollFd::new(&*arrived, PollFlags::IN)], Some(&patience)).unwrap() > 0,
            "no connection arrives"
        );
    }
}

fn wait_until_both_are_up(one: &TlsLink, other: &TlsLink) {
    wait_until_up(one);
    wait_until_up(other);
}

/// Receives until this number of frames has arrived.
fn receive(link: &TlsLink, many: usize) -> Vec<Vec<u8>> {
    let mut got = Frames::default();
    while got.len() < many {
        wait(link, PollFlags::IN);
        link.receive(&mut got, 64);
    }
    got.iter().map(<[u8]>::to_vec).collect()
}

/// Receives until the connection has ended.
fn until_down(link: &TlsLink) -> Vec<Vec<u8>> {
    let mut got = Frames::default();
    while is_up(link) {
        wait(link, PollFlags::IN);
        link.receive(&mut got, 64);
    }
    got.iter().map(<[u8]>::to_vec).collect()
}

fn batch<'a>(list: impl IntoIterator<Item = &'a [u8]>) -> Frames {
    let mut frames = Frames::default();
    list.into_iter().for_each(|frame| frames.push(frame));
    frames
}

/// A TLS client without a link around it.
struct Stranger {
    tls: ClientConnection,
    tcp: TcpStream,
}

impl Stranger {
    fn new(at: SocketAddr, config: Arc<rustls::ClientConfig>) -> Self {
        let tcp = TcpStream::connect(at).unwrap();
        tcp.set_read_timeout(Some(LONG)).unwrap();
        let name = ServerName::IpAddress(IpAddr::from(Ipv4Addr::LOCALHOST).into());
        Self { tls: ClientConnection::new(config, name).unwrap(), tcp }
    }

    fn write(&mut self, plain: &[u8]) {
        let mut stream = rustls::Stream::new(&mut self.tls, &mut self.tcp);
        stream.write_all(plain).unwrap();
        stream.flush().unwrap();
    }

    /// Sends the greeting, and waits for the greeting of the other end.
    fn greet(&mut self) {
        self.write(&[0; 4]);
        let mut greeting = [1; 4];
        rustls::Stream::new(&mut self.tls, &mut self.tcp).read_exact(&mut greeting).unwrap();
        assert_eq!(greeting, [0; 4]);
    }

    /// Returns all data that arrive until the connection ends.
    fn all(&mut self) -> (Vec<u8>, Option<ErrorKind>) {
        let mut got = Vec::new();
        let end = rustls::Stream::new(&mut self.tls, &mut self.tcp).read_to_end(&mut got);
        (got, end.err().map(|error| error.kind()))
    }
}

/// Reads until the other end closes.
fn until_closed(mut tcp: &TcpStream) {
    tcp.set_read_timeout(Some(LONG)).unwrap();
    let mut rest = Vec::new();
    match tcp.read_to_end(&mut rest) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
    }
}

#[test]
fn frames_arrive_whole_and_in_order() {
    let a = listen();
    let b = connect(&a);
    wait_until_both_are_up(&a, &b);
    assert_eq!([&a, &b].map(|link| link.inspect().kind), ["tls"; 2]);
    assert_eq!(b.inspect().peers, [address(&a).to_string()]);
    let lengths = (14..600).chain([9018, MAX_LINK_FRAME - 1, MAX_LINK_FRAME, 14]);
    let list: Vec<Vec<u8>> =
        lengths.map(|length| (0..length).map(|at| (at ^ length).to_le_bytes()[0]).collect()).collect();
    let frames = batch(list.iter().map(Vec::as_slice));
    for (from, to) in [(&a, &b), (&b, &a)] {
        let (mut sent, mut got) = (0, Frames::default());
        while got.len() < list.len() {
            sent += from.send(&frames, sent);
            wait(to, PollFlags::IN);
            to.receive(&mut got, 7);
        }
        assert!(sent == list.len() && got.iter().eq(list.iter().map(Vec::as_slice)));
        assert!(!from.unsent() && from.lost() == 0);
    }
    assert_eq!([&a, &b].map(|link| (count(link, "tls_connected"), count(link, "tls_refused"))), [(1, 0); 2]);
}

#[test]
fn an_overlong_frame_is_lost_alone() {
    let a = listen();
    let b = connect(&a);
    wait_until_both_are_up(&a, &b);
    let long = vec![0; MAX_LINK_FRAME + 1];
    assert_eq!(a.send(&batch([&long[..], b"a frame"]), 0), 2);
    assert_eq!((receive(&b, 1), a.lost()), (vec![b"a frame".to_vec()], 1));
}

/// Frames are not kept for later while no peer is connected.
#[test]
fn without_a_connection_frames_are_lost() {
    let link = listen();
    assert_eq!((link.send(&batch([&b"1"[..], b"2"]), 0), link.lost(), link.unsent()), (2, 2, false));
    let peer = connect(&link);
    wait_until_both_are_up(&link, &peer);
    link.send(&batch([&b"3"[..]]), 0);
    assert_eq!(receive(&peer, 1), [b"3"]);
}

/// A client without the right key gets no frame and is counted; a client with it can continue.
#[test]
fn a_peer_without_the_key_gets_nothing() {
    let link = listen();
    let at = address(&link);
    let peer = connect(&link);
    wait_until_both_are_up(&link, &peer);
    let mut roots = rustls::RootCertStore::empty();
    roots.add(OURS.0.der().clone()).unwrap();
    let builder = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
    let builder = builder.with_protocol_versions(&[&rustls::version::TLS13]).unwrap().with_root_certificates(roots);
    let mut anonymous = builder.with_no_client_auth();
    anonymous.alpn_protocols = vec![PROTOCOL.to_vec()];
    let mut other_protocol = (*keys(&["x"]).client(at)).clone();
    other_protocol.alpn_protocols = vec![b"h2".to_vec()];
    let mut no_protocol = (*keys(&["x"]).client(at)).clone();
    no_protocol.alpn_protocols.clear();
    let expired = OURS.issue(&["x"], &OURS, |params| {
        (params.not_before, params.not_after) = (date_time_ymd(2001, 1, 1), date_time_ymd(2002, 1, 1));
    });
    let strangers = [
        OTHER.issue(&["x"], &OURS, |_| {}).client(at),
        expired.client(at),
        Arc::new(anonymous),
        Arc::new(other_protocol),
        Arc::new(no_protocol),
    ];
    for (number, config) in (1..).zip(strangers) {
        let mut stranger = Stranger::new(at, config);
        let (got, end) = stranger.all();
        assert!(got.is_empty() && end.is_some(), "{number}: {got:?}");
        until_closed(&stranger.tcp);
        assert_eq!((count(&link, "tls_refused"), count(&link, "tls_connected")), (number, 1));
    }
    link.send(&batch([&b"for the peer"[..]]), 0);
    assert_eq!(receive(&peer, 1), [b"for the peer"]);
}

#[test]
fn the_certificate_of_a_client_is_checked() {
    let keys = [keys(&["127.0.0.1"]), keys(&["right.host"]), keys(&["wrong.host"])];
    let config = TlsConfig { peer: Some("right.host".to_owned()), ..keys[0].config(TlsRole::Listen, any_port()) };
    let link = TlsLink::open(&config).unwrap();
    let mut wrong = Stranger::new(address(&link), keys[2].client(address(&link)));
    let (got, end) = wrong.all();
    assert!(got.is_empty() && end.is_some());
    assert_eq!((count(&link, "tls_refused"), is_up(&link)), (1, false));
    let mut right = Stranger::new(address(&link), keys[1].client(address(&link)));
    right.greet();
    wait_until_up(&link);
}

/// The connecting end sends no frames to a server that is not its peer, and tries again.
#[test]
fn the_certificate_of_a_server_is_checked() {
    for (names, peer, right) in [
        (&["127.0.0.1"][..], None, true),
        (&["there.host"], Some("there.host"), true),
        (&["there.host"], None, false),
        (&["127.0.0.1"], Some("there.host"), false),
        (&["127.0.0.1"], Some("127.0.0.2"), false),
    ] {
        let link = TlsLink::open(&keys(names).config(TlsRole::Listen, any_port())).unwrap();
        let config = keys(&["x"]).config(TlsRole::Connect, address(&link));
        let own = keys(&["x"]);
        let config = TlsConfig { peer: peer.map(str::to_owned), files: own.files.clone(), ..config };
        let peer = TlsLink::open(&config).unwrap();
        if right {
            wait_until_both_are_up(&link, &peer);
            continue;
        }
        // The listener has counted one before it accepts the next.
        while count(&link, "tls_refused") == 0 {
            std::thread::yield_now();
        }
        assert_eq!([&link, &peer].map(|link| (is_up(link), count(link, "tls_connected"))), [(false, 0); 2]);
    }
}

#[test]
fn other_protocols_and_tls_versions_are_refused() {
    let link = listen();
    // A TLS 1.2 hello with one suite and no extensions.
    let hello = [&[0x16, 3, 1, 0, 45, 1, 0, 0, 41, 3, 3][..], &[7; 32], &[0, 0, 2, 0xc0, 0x2f, 1, 0]].concat();
    let garbage: Vec<u8> = (0..100_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    // Data as long as a handshake message may be, or longer, and never complete.
    let endless = [&[0x16, 3, 1, 0x40, 0, 1, 0, 0xff, 0xff][..], &[0; 16_380], &[0x16, 3, 1, 0x40, 0]].concat();
    let bytes = [&hello[..], b"GET / HTTP/1.1\r\n\r\n", &garbage, &endless.repeat(8)];
    for (number, bytes) in (1..).zip(bytes) {
        let mut tcp = TcpStream::connect(address(&link)).unwrap();
        // The connection may be refused before all data are written.
        let _ = tcp.write_all(bytes);
        until_closed(&tcp);
        assert_eq!((count(&link, "tls_refused"), is_up(&link)), (number, false));
    }
    let peer = connect(&link);
    wait_until_both_are_up(&link, &peer);
}

/// Connections that send nothing, or an incomplete message, do not keep the peer out, and their number is bounded.
#[test]
fn connections_that_stay_open() {
    let link = listen();
    let mut silent = Vec::new();
    let mut open = |number: usize| {
        let mut tcp = TcpStream::connect(address(&link)).unwrap();
        // The connection may be closed before.
        let _ = tcp.write_all(&[0x16, 3, 1, 2, 0, 1][..number % 7]);
        silent.push(tcp);
    };
    (0..2 * MAX_SILENT).for_each(&mut open);
    let peer = connect(&link);
    wait_until_both_are_up(&link, &peer);
    (0..MAX_SILENT).for_each(&mut open);
    // A bounded number of accepted connections remains, and each of the others is counted before it is closed.
    let surplus = silent.len() - MAX_SILENT;
    while count(&link, "tls_given_up") < surplus as u64 {
        std::thread::yield_now();
    }
    assert_eq!((count(&link, "tls_given_up"), count(&link, "tls_refused")), (surplus as u64, 0));
    let mut closed = 0;
    for mut tcp in silent {
        tcp.set_nonblocking(true).unwrap();
        let is_open = tcp.read(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
        closed += usize::from(!is_open);
    }
    // The last one that was counted may not be closed yet.
    assert!((surplus - 1..=surplus).contains(&closed), "{closed} of {surplus}");
    assert_eq!(count(&link, "tls_connected"), 1);
    link.send(&batch([&b"a frame"[..]]), 0);
    assert_eq!(receive(&peer, 1), [b"a frame"]);
}

#[test]
fn a_connection_that_takes_too_long_ends() {
    let keys = keys(&["127.0.0.1"]);
    let config = keys.config(TlsRole::Listen, any_port());
    let shared = Arc::new(Shared::new("link".to_owned()).unwrap());
    let listener = listener(config.address).unwrap();
    let at: SocketAddr = rustix::net::getsockname(&listener).unwrap().try_into().unwrap();
    let identity = TlsKeys::read(&config).unwrap().identity(&config).unwrap();
    let mut handshaker = Handshaker::new(Arc::clone(&shared), Origin::Listener(Arc::new(listener)), identity);
    let tcp = TcpStream::connect(at).unwrap();
    let before = Instant::now();
    // At this time the kernel has the connection in its queue.
    handshaker.begin();
    handshaker.expire(before + PATIENCE - Duration::from_nanos(1));
    assert_eq!(shared.counters.tls_refused.get(), 0);
    handshaker.expire(Instant::now() + PATIENCE);
    assert_eq!(shared.counters.tls_refused.get(), 1);
    until_closed(&tcp);
}

/// A client with the right key that sends data a TLS link would never send.
#[test]
fn a_length_that_no_frame_has_ends_the_connection() {
    let link = listen();
    let keys = keys(&["x"]);
    for (number, length) in (1..).zip([u32::try_from(MAX_LINK_FRAME).unwrap() + 1, u32::MAX]) {
        let mut peer = Stranger::new(address(&link), keys.client(address(&link)));
        peer.greet();
        wait_until_up(&link);
        peer.write(&[&7_u32.to_be_bytes()[..], b"a frame", &[0; 4], &length.to_be_bytes(), &[0; 100]].concat());
        assert_eq!(until_down(&link), [b"a frame"], "frames before the malformed one are delivered");
        assert_eq!(count(&link, "tls_malformed"), number);
        until_closed(&peer.tcp);
    }
    // The first data must be a greeting, not a frame.
    let mut peer = Stranger::new(address(&link), keys.client(address(&link)));
    peer.write(&[&7_u32.to_be_bytes()[..], b"a frame"].concat());
    until_closed(&peer.tcp);
    assert_eq!((count(&link, "tls_refused"), is_up(&link)), (1, false));
    let peer = connect(&link);
    wait_until_both_are_up(&link, &peer);
}

/// If the peer does not read, the link takes no more frames from its senders, and a newer connection replaces this one.
#[test]
fn a_peer_that_stops_reading() {
    let link = listen();
    let keys = keys(&["x"]);
    let mut peer = Stranger::new(address(&link), keys.client(address(&link)));
    peer.greet();
    wait_until_up(&link);
    let frame = vec![7; 9000];
    let frames = batch(std::iter::repeat_n(&frame[..], 64));
    // Bounds the data that the kernel buffers for both ends.
    set_socket_recv_buffer_size(&peer.tcp, 64 << 10).unwrap();
    set_socket_send_buffer_size(&*link.shared.session().unwrap().socket, 64 << 10).unwrap();
    let taken: usize = (0..10_000).map(|_| link.send(&frames, 0)).sum();
    assert!(taken * frame.len() < 64 << 20, "{taken} frames");
    assert_eq!((link.unsent(), link.lost()), (true, 0));
    // Inbound frames still arrive.
    peer.write(&[&7_u32.to_be_bytes()[..], b"a frame"].concat());
    assert_eq!(receive(&link, 1), [b"a frame"]);
    // At this time the receiving side has written as much as there was room for.
    while !link.unsent() {
        link.send(&frames, 0);
    }
    let old = link.shared.session().unwrap();
    link.shared.arrived.clear();
    let newer = connect(&link);
    wait_until_up(&newer);
    wait_for_arrivals(&link, || link.shared.session().is_none_or(|session| !Arc::ptr_eq(&session, &old)));
    link.send(&batch([&b"now"[..]]), 0);
    assert_eq!(receive(&newer, 1), [b"now"]);
    // A sender that still uses the old connection does not affect the newer one.
    assert!(old.send(&Frames::default(), 0).is_err() && !old.is_unsent());
    assert_eq!((link.lost(), link.unsent(), count(&link, "tls_connected")), (1, false, 2));
}

/// The thread that reads a link writes the remaining data, and no send is needed for it.
#[test]
fn unsent_data_leaves_when_frames_are_received() {
    let link = listen();
    let mut peer = Stranger::new(address(&link), keys(&["x"]).client(address(&link)));
    peer.greet();
    wait_until_up(&link);
    set_socket_recv_buffer_size(&peer.tcp, 64 << 10).unwrap();
    set_socket_send_buffer_size(&*link.shared.session().unwrap().socket, 64 << 10).unwrap();
    let frame = vec![7; 9000];
    let frames = batch(std::iter::repeat_n(&frame[..], 64));
    while !link.unsent() {
        link.send(&frames, 0);
    }
    let reader = std::thread::spawn(move || io::copy(&mut peer.tcp, &mut io::sink()));
    // Each time there is room for at least one byte.
    for _ in 0..1 << 20 {
        if !link.unsent() {
            break;
        }
        wait(&link, PollFlags::OUT);
        link.receive(&mut Frames::default(), 1);
    }
    assert_eq!((link.unsent(), link.lost()), (false, 0));
    drop(link);
    // The thread ends with the link.
    drop(reader.join().unwrap());
}

#[test]
fn a_connection_that_ended_is_made_again() {
    let a = listen();
    let b = connect(&a);
    for number in 1..=2 {
        wait_until_both_are_up(&a, &b);
        assert_eq!([&a, &b].map(|link| count(link, "tls_connected")), [number; 2]);
        b.send(&batch([&b"a frame"[..]]), 0);
        assert_eq!(receive(&a, 1), [b"a frame"]);
        a.shared.session().unwrap().end();
        [&a, &b].into_iter().for_each(|link| drop(until_down(link)));
    }
}

/// A listener that is not a peer is contacted again, after a longer time with each failure.
#[test]
fn the_connecting_end_retries() {
    let listener = TcpListener::bind(any_port()).unwrap();
    let link = TlsLink::open(&keys(&["x"]).config(TlsRole::Connect, listener.local_addr().unwrap())).unwrap();
    for attempt in 0..2 {
        let (tcp, _) = listener.accept().unwrap();
        assert_eq!((count(&link, "tls_refused"), is_up(&link)), (attempt, false));
        drop(tcp);
    }
    let start = Instant::now();
    let mut backoff = Backoff::new(start);
    assert!(backoff.wait(start).is_zero());
    let mut expected = FIRST_RETRY;
    for _ in 0..10 {
        backoff.failed(start);
        assert_eq!(backoff.wait(start), expected);
        expected = (expected * 2).min(LAST_RETRY);
    }
    assert_eq!(expected, LAST_RETRY);
    backoff.succeeded(start);
    assert_eq!(backoff.wait(start), FIRST_RETRY);
    backoff.failed(start);
    assert_eq!(backoff.wait(start), FIRST_RETRY);
}

#[test]
fn ends_are_made_of_descriptors() {
    let (ours, theirs) = (keys(&["127.0.0.1"]), keys(&["x"]));
    let listens = ours.config(TlsRole::Listen, any_port());
    let listener = listener(listens.address).unwrap();
    let at = rustix::net::getsockname(&listener).unwrap().try_into().unwrap();
    let mut fds = vec![listener];
    let connects = theirs.config(TlsRole::Connect, at);
    let (our_keys, their_keys) = (TlsKeys::read(&listens).unwrap(), TlsKeys::read(&connects).unwrap());
    fds.extend(our_keys.descriptors().unwrap());
    let make = |config, fds| TlsLink::from_descriptors(config, fds, Arc::new(TlsConnector(at)));
    let a = make(&listens, fds).unwrap();
    let b = make(&connects, their_keys.descriptors().unwrap()).unwrap();
    wait_until_both_are_up(&a, &b);
    for count in [0, 2, 3] {
        let fds = our_keys.descriptors().unwrap().into_iter().take(count).collect();
        assert!(make(&listens, fds).is_err(), "{count}");
    }
    // The keys can be provided again, which the next process needs.
    assert!(make(&connects, their_keys.descriptors().unwrap()).is_ok());
}

#[test]
fn files_that_are_wrong_are_named_with_the_line() {
    let keys = keys(&["127.0.0.1"]);
    let config = keys.config(TlsRole::Listen, any_port());
    let files = &keys.files;
    let text = |path: &Path| std::fs::read_to_string(path).unwrap();
    let (certificate, key) = (text(&files.certificate), text(&files.key));
    let other = text(&self::keys(&["x"]).files.key);
    let damaged = certificate.replacen("MII", "MI!", 1);
    let cut = certificate.lines().take(3).collect::<Vec<_>>().join("\n");
    let no_der = "# certificate\n\n-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let no_key = "\n-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";
    let second = format!("{certificate}{no_der}");
    let second_line = format!("line {}: ", certificate.lines().count() + 3);
    for (path, content, words) in [
        (&files.certificate, "", "no certificate is in it"),
        (&files.certificate, &key, "no certificate is in it"),
        (&files.certificate, &damaged, "line 1: this is not base64"),
        (&files.certificate, &format!("\n\n{cut}"), "line 3: the line with END is missing"),
        (&files.certificate, no_der, "line 3: "),
        (&files.certificate, &second, &second_line),
        (&files.key, &certificate, "no private key"),
        (&files.key, no_key, "line 2: "),
        (&files.key, &format!("{key}{other}"), "more than one"),
        (&files.key, &other, "certificate.pem: "),
        (&files.authority, &key, "no certificate"),
        (&files.authority, no_der, "line 3: "),
    ] {
        let before = text(path);
        std::fs::write(path, content).unwrap();
        let error = TlsKeys::read(&config).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        assert!(error.contains(&path.display().to_string()) || words == "certificate.pem: ", "{error}");
        assert!(
            !key.lines().chain(other.lines()).skip(1).any(|line| error.contains(line)),
            "the error quotes the private key"
        );
        std::fs::write(path, before).unwrap();
    }
    std::fs::write(&files.authority, vec![b'\n'; 300 << 10]).unwrap();
    let too_long = TlsKeys::read(&config).unwrap_err();
    assert!(std::error::Error::source(&too_long).is_some(), "{too_long}");
    std::fs::remove_file(&files.key).unwrap();
    assert!(TlsKeys::read(&config).unwrap_err().to_string().ends_with("key.pem"));
    let shown = format!("{:?}", self::keys(&["x"]).client(any_port()));
    assert!(!shown.contains("PRIVATE"));
}

#[test]
fn an_invalid_peer_name_is_refused() {
    let keys = keys(&["x"]);
    let config = TlsConfig { peer: Some("not a name".to_owned()), ..keys.config(TlsRole::Connect, any_port()) };
    assert!(TlsKeys::read(&config).unwrap_err().to_string().contains("'not a name'"));
}
