//! Attackers that can connect to an end of a TLS link: strangers that send any bytes, and a peer with a valid key that
//! sends any frames, or invalid ones, after the handshake.
#![no_main]

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use pvrdma_ether_link::tls::{TlsConfig, TlsFiles, TlsLink, TlsRole};
use pvrdma_link::{Frames, Link, MAX_LINK_FRAME, Readiness};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, Stream};

/// Time limit that is sufficient on any machine.
const PATIENCE: Duration = Duration::from_secs(15);
/// Most pieces of an input.
const MAX_STEPS: usize = 32;

#[derive(Arbitrary, Debug)]
enum Script {
    /// A client without a key sends these pieces. The first piece may begin like a ClientHello.
    Stranger { hello: bool, pieces: Vec<Vec<u8>> },
    /// A client with a key completes the handshake and executes these steps.
    Peer(Vec<Step>),
}

/// Steps after the handshake.
#[derive(Arbitrary, Debug)]
enum Step {
    Frame(Vec<u8>),
    /// One of this length in bytes.
    Long(u32),
    /// Arbitrary bytes, in a TLS record of their own.
    Raw(Vec<u8>),
}

/// The end under attack, and the keys with which its peer connects.
struct End {
    link: TlsLink,
    address: SocketAddr,
    peer: Arc<ClientConfig>,
}

static END: LazyLock<End> = LazyLock::new(|| {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &authority).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let files = TlsFiles {
        certificate: write("certificate", certificate.pem()),
        key: write("key", key.serialize_pem()),
        authority: write("authority", authority.pem()),
    };
    let address = (Ipv4Addr::LOCALHOST, 0).into();
    let link = TlsLink::open(&TlsConfig::new(TlsRole::Listen, address).with_files(files)).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).unwrap()).unwrap();
    let key = PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let peer = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&rustls::version::TLS13]);
    let peer = peer.unwrap().with_root_certificates(roots);
    let mut peer = peer.with_client_auth_cert(vec![certificate.der().clone()], key).unwrap();
    peer.alpn_protocols = vec![b"pvrdma-ethernet/1".to_vec()];
    let address = link.inspect().name.parse().unwrap();
    End { link, address, peer: Arc::new(peer) }
});

impl End {
    fn count(&self, name: &str) -> u64 {
        self.link.counters().iter().find(|counter| counter.name == name).unwrap().value
    }

    fn is_up(&self) -> bool {
        loop {
            // The lock is never held for long.
            if let Some(up) = self.link.inspect().up.taken() {
                return up;
            }
        }
    }

    /// Receives until `done` says so.
    fn receive(&self, frames: &mut Frames, mut done: impl FnMut(&Frames) -> bool) {
        loop {
            self.link.receive(frames, 16);
            if done(frames) {
                return;
            }
            wait(&self.link.readiness());
        }
    }

    fn wait_until_up(&self) {
        loop {
            // The readiness tells which descriptor announces a connection, so it is requested before the connection is
            // made.
            let readiness = self.link.readiness();
            if self.is_up() {
                return;
            }
            wait(&readiness);
        }
    }

    /// A stranger gets no frame, and is counted.
    fn stranger(&self, hello: bool, pieces: &[Vec<u8>]) {
        let (refused, connected) = (self.count("tls_refused"), self.count("tls_connected"));
        let mut tcp = TcpStream::connect(self.address).unwrap();
        tcp.set_nodelay(true).unwrap();
        tcp.set_read_timeout(Some(PATIENCE)).unwrap();
        let begin: &[u8] = if hello { &[0x16, 3, 1, 1, 0, 1, 0, 0, 0xfc, 3, 3] } else { &[] };
        // The connection may be refused before all pieces are written.
        let mut pieces = [begin].into_iter().chain(pieces.iter().take(MAX_STEPS).map(Vec::as_slice));
        let _ = pieces.try_for_each(|piece| tcp.write_all(piece));
        let _ = tcp.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _ = tcp.read_to_end(&mut answer);
        assert!(answer.len() < 4096, "{}", answer.len());
        assert_eq!((self.count("tls_refused"), self.count("tls_connected")), (refused + 1, connected));
        assert!(!self.is_up());
    }

    /// Frames of the peer arrive unchanged and in order, up to the first invalid one.
    fn peer(&self, steps: &[Step]) {
        let malformed = self.count("tls_malformed");
        let mut tcp = TcpStream::connect(self.address).unwrap();
        tcp.set_read_timeout(Some(PATIENCE)).unwrap();
        tcp.set_nodelay(true).unwrap();
        let name = ServerName::IpAddress(IpAddr::from(Ipv4Addr::LOCALHOST).into());
        let mut tls = ClientConnection::new(Arc::clone(&self.peer), name).unwrap();
        let mut stream = Stream::new(&mut tls, &mut tcp);
        stream.write_all(&[0; 4]).unwrap();
        let mut greeting = [1; 4];
        stream.read_exact(&mut greeting).unwrap();
        assert_eq!(greeting, [0; 4]);
        let mut frames = Frames::default();
        // The greeting is sent before the link uses the connection.
        self.wait_until_up();
        let (mut sent, mut got) = (Vec::new(), 0);
        for step in steps.iter().take(MAX_STEPS) {
            let piece = match step {
                Step::Frame(frame) => [&(frame.len() as u32).to_be_bytes(), &frame[..]].concat(),
                Step::Long(length) => {
                    let length = length % (MAX_LINK_FRAME as u32 + 3);
                    [&length.to_be_bytes()[..], &vec![length as u8; length as usize]].concat()
                }
                Step::Raw(bytes) => bytes.clone(),
            };
            sent.extend_from_slice(&piece);
            // The other side may have ended it.
            if stream.write_all(&piece).and_then(|()| stream.flush()).is_err() {
                break;
            }
            // So that neither waits for the other.
            let (expected, end) = parse(&sent);
            self.receive(&mut frames, |frames| frames.len() >= expected.len() && (!end || !self.is_up()));
            assert!(frames.iter().skip(got).eq(expected.iter().copied().skip(got)), "another frame");
            got = expected.len();
            if end {
                break;
            }
        }
        let (expected, end) = parse(&sent);
        drop(tcp);
        self.receive(&mut frames, |_| !self.is_up());
        assert_eq!((frames.len(), self.count("tls_malformed") - malformed), (expected.len(), u64::from(end)));
    }
}

fn wait(readiness: &Readiness) {
    if readiness.wait.is_none() {
        let patience = Timespec::try_from(PATIENCE).unwrap();
        let mut fds = [PollFd::new(readiness.readable.as_deref().unwrap(), PollFlags::IN)];
        // The fuzzer's own clock interrupts.
        let more = retry_on_intr(|| poll(&mut fds, Some(&patience))).unwrap();
        assert!(more > 0, "no data arrives");
    }
}

/// Returns the frames in a stream, and whether it contains an invalid one.
fn parse(mut bytes: &[u8]) -> (Vec<&[u8]>, bool) {
    let mut frames = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk::<4>() {
        let length = u32::from_be_bytes(*length) as usize;
        if length > MAX_LINK_FRAME {
            return (frames, true);
        }
        let Some((frame, rest)) = rest.split_at_checked(length) else { break };
        frames.extend((!frame.is_empty()).then_some(frame));
        bytes = rest;
    }
    (frames, false)
}

fuzz_target!(|script: Script| {
    match script {
        Script::Stranger { hello, pieces } => END.stranger(hello, &pieces),
        Script::Peer(steps) => END.peer(&steps),
    }
});
