//! Programs for guests that send bytes through vNICs and compare each of them at the other end.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Subcommand;

/// Maximum time for which a packet is in flight.
const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes that are written or read at a time.
const PIECE: usize = 48 << 10;
/// Length of the repeating pattern. It is prime, so that a misplaced segment of any size is noticed.
const PERIOD: usize = 65_521;
/// Longest UDP payload over IPv4.
const MAX_DATAGRAM: usize = 65_507;

/// Role of one side.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum NetPeer {
    /// Receives streams and echoes datagrams, until killed.
    Serve {
        /// Of TCP and UDP.
        #[arg(long)]
        port: u16,
    },
    /// Sends several streams at the same time, and checks the receiver's report for each.
    Stream {
        /// The other side.
        server: SocketAddr,
        /// Bytes of each.
        #[arg(long)]
        bytes: u64,
        /// Number of streams.
        #[arg(long, default_value_t = 1)]
        connections: usize,
    },
    /// Sends datagrams of many sizes and compares the answers.
    Datagrams {
        /// The other side.
        server: SocketAddr,
        /// The first size.
        #[arg(long, default_value_t = 0)]
        from: usize,
        /// The last size.
        #[arg(long)]
        to: usize,
        /// From one size to the next.
        #[arg(long, default_value_t = 1)]
        step: usize,
    },
}

/// Runs one side.
pub(crate) fn run(peer: &NetPeer) -> Result<()> {
    match *peer {
        NetPeer::Serve { port } => serve(port),
        NetPeer::Stream { server, bytes, connections } => {
            thread::scope(|scope| {
                let all: Vec<_> = (0..connections).map(|_| scope.spawn(|| send_stream(server, bytes))).collect();
                all.into_iter().try_for_each(|one| one.join().unwrap_or_else(|_| Err(anyhow!("a thread panicked"))))
            })?;
            println!("{connections} streams of {bytes} bytes arrived");
            Ok(())
        }
        NetPeer::Datagrams { server, from, to, step } => {
            let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).context("cannot make a socket")?;
            let server = mapped(server);
            socket.connect(server).with_context(|| format!("cannot use {server}"))?;
            socket.set_read_timeout(Some(PATIENCE))?;
            let (pattern, mut count) = (pattern(), 0);
            for size in (from..=to.min(MAX_DATAGRAM)).step_by(step) {
                // Each datagram begins at a different offset, so that a late one is not mistaken for the next.
                let start = u64::try_from(size).unwrap_or(0) * 7;
                exchange(&socket, expected(&pattern, start, size))?;
                count += 1;
            }
            println!("{count} datagrams came back");
            Ok(())
        }
    }
}

/// Returns the address as an IPv6 socket uses it (IPv4-mapped).
fn mapped(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V4(v4) => SocketAddr::from((v4.ip().to_ipv6_mapped(), v4.port())),
        v6 @ SocketAddr::V6(_) => v6,
    }
}

/// Returns the pattern, extended by as many bytes as one message needs.
fn pattern() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes: Vec<u8> = (0..PERIOD)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[3]
        })
        .collect();
    bytes.extend_from_within(..MAX_DATAGRAM);
    bytes
}

/// Returns the bytes of a stream from byte `at` on.
fn expected(pattern: &[u8], at: u64, length: usize) -> &[u8] {
    let start = usize::try_from(at % PERIOD as u64).unwrap_or(0);
    &pattern[start..start + length]
}

fn serve(port: u16) -> Result<()> {
    // Each socket serves both versions of IP. The TCP listener is created last; when it listens, all sockets are ready.
    let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port)).context("cannot make a socket")?;
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).context("cannot listen")?;
    thread::spawn(move || {
        let mut room = vec![0; MAX_DATAGRAM];
        loop {
            if let Ok((length, from)) = socket.recv_from(&mut room) {
                // If the answer cannot be sent, the client notices that it is missing.
                let _ = socket.send_to(&room[..length], from);
            }
        }
    });
    for stream in listener.incoming() {
        let stream = stream.context("cannot accept")?;
        thread::spawn(move || {
            if let Err(error) = take_stream(stream) {
                println!("a stream is wrong: {error:#}");
            }
        });
    }
    Ok(())
}

/// Reads a stream to its end, and answers with its length if each byte was correct.
fn take_stream(mut stream: TcpStream) -> Result<()> {
    let pattern = pattern();
    let mut room = vec![0; PIECE];
    let mut at = 0;
    loop {
        let count = stream.read(&mut room).context("cannot read")?;
        if count == 0 {
            break;
        }
        let (got, wanted) = (&room[..count], expected(&pattern, at, count));
        if got != wanted {
            let wrong = got.iter().zip(wanted).position(|(a, b)| a != b).unwrap_or(0);
            bail!("byte {} is {:#x} and not {:#x}", at + wrong as u64, got[wrong], wanted[wrong]);
        }
        at += count as u64;
    }
    stream.write_all(&at.to_le_bytes()).context("cannot answer")
}

fn send_stream(server: SocketAddr, bytes: u64) -> Result<()> {
    let mut stream = TcpStream::connect(server).with_context(|| format!("cannot connect to {server}"))?;
    let pattern = pattern();
    let mut at = 0;
    while at < bytes {
        let length = usize::try_from(bytes - at).unwrap_or(PIECE).min(PIECE);
        stream.write_all(expected(&pattern, at, length)).context("cannot send")?;
        at += length as u64;
    }
    stream.shutdown(Shutdown::Write).context("cannot end the stream")?;
    let mut answer = [0; 8];
    stream.read_exact(&mut answer).context("the other side has found a wrong byte")?;
    let taken = u64::from_le_bytes(answer);
    ensure!(taken == bytes, "{taken} of {bytes} bytes arrived");
    Ok(())
}

fn exchange(socket: &UdpSocket, message: &[u8]) -> Result<()> {
    let size = message.len();
    socket.send(message).with_context(|| format!("cannot send {size} bytes"))?;
    let mut room = vec![0; MAX_DATAGRAM];
    match socket.recv(&mut room) {
        Ok(length) if &room[..length] == message => Ok(()),
        Ok(length) => bail!("{length} other bytes came back for {size}"),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            bail!("the datagram of {size} bytes did not come back")
        }
        Err(error) => Err(error).with_context(|| format!("the datagram of {size} bytes")),
    }
}
