//! Baselines of the wire on the same pair of interfaces: a TCP stream, and datagrams without any protocol.

use std::io::{IoSlice, IoSliceMut};
use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::socket::{MsgFlags, MultiHeaders, SockaddrIn, recvmmsg, sendmmsg};
use serde_json::json;

use super::network::Network;
use super::peer::{Outcome, PeerOptions, next_line, processor_time};
use super::session::{self, Talker};
use crate::image::GuestImage;

/// Datagrams per system call.
const BATCH: usize = 64;
const PORT: u16 = 4790;

/// One TCP stream, measured by `iperf3`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stream {
    /// Received Gb/s.
    pub(super) gigabits: f64,
    /// Processor seconds of both sides.
    pub(super) processor: f64,
    /// Received bytes.
    pub(super) bytes: f64,
}

/// Sends for `seconds` over one stream.
pub(super) fn stream(network: &Network, seconds: f64) -> Result<Stream> {
    stream_with(network, seconds, &[])
}

/// Same as [`stream`], with further arguments of `iperf3` for the size of its writes or the number of streams.
pub(super) fn stream_with(network: &Network, seconds: f64, arguments: &[&str]) -> Result<Stream> {
    let iperf = GuestImage::built_program("usr/bin/iperf3").context("there is no iperf3")?;
    let command =
        |words: &[&str]| iperf.iter().cloned().chain(words.iter().map(|&word| word.to_owned())).collect::<Vec<_>>();
    let mut server = Talker::start(network, 1, &command(&["-s", "-1", "--forceflush"]))?;
    while !server.line()?.contains("listening") {}
    let (address, time) = (Network::host_address(1).to_string(), seconds.to_string());
    let words = [&["-J", "-c", &address, "-t", &time], arguments].concat();
    let mut client = Talker::start(network, 0, &command(&words))?;
    let result: serde_json::Value = serde_json::from_str(&client.rest()?).context("the output of iperf3")?;
    let number = |path: &str| {
        result
            .pointer(path)
            .and_then(serde_json::Value::as_f64)
            .with_context(|| format!("no {path} in the output of iperf3: {result}"))
    };
    let took = number("/end/sum_received/seconds")?;
    let percent =
        number("/end/cpu_utilization_percent/host_total")? + number("/end/cpu_utilization_percent/remote_total")?;
    Ok(Stream {
        gigabits: number("/end/sum_received/bits_per_second")? / 1e9,
        processor: percent / 100.0 * took,
        bytes: number("/end/sum_received/bytes")?,
    })
}

/// Sends datagrams of `size` bytes, in batches and without any protocol. Returns the received millions per second.
pub(super) fn datagrams(network: &Network, size: usize) -> Result<f64> {
    let [_, received] = session::run(network, &PeerOptions { udp: true, size, ..PeerOptions::SMALL })?;
    Ok(received.million_messages())
}

/// Runs one side of [`datagrams`], with the same protocol on standard streams as a side with a device.
pub(crate) fn run_udp(options: &PeerOptions) -> Result<()> {
    let address = |side| (Network::host_address(side), PORT);
    // The socket is bound before the other side learns its address.
    let socket = UdpSocket::bind(address(options.side))?;
    println!("bound");
    next_line()?;
    println!("ready");
    let (length, cpu) = (Duration::from_secs_f64(options.seconds), processor_time());
    let (messages, seconds) = if options.side == 0 {
        socket.connect(address(1))?;
        send(&socket, options.size, length)?
    } else {
        let received = receive(&socket, options.size, length)?;
        // The socket must exist until then. Otherwise the sender's packets are refused.
        next_line()?;
        received
    };
    let outcome = Outcome { messages, seconds, processor: processor_time() - cpu, p99_us: None, counters: json!({}) };
    println!("{}", serde_json::to_string(&outcome)?);
    Ok(())
}

/// Sends after a start line. Returns the number of datagrams, and the seconds.
fn send(socket: &UdpSocket, size: usize, length: Duration) -> Result<(u64, f64)> {
    next_line()?;
    let mut headers = MultiHeaders::<SockaddrIn>::preallocate(BATCH, None);
    let (data, start, mut count) = (vec![0x5a; size], Instant::now(), 0);
    let slices: Vec<_> = (0..BATCH).map(|_| [IoSlice::new(&data)]).collect();
    while start.elapsed() < length {
        count += sendmmsg(socket.as_raw_fd(), &mut headers, &slices, [None; BATCH], [], MsgFlags::empty())?.count();
    }
    Ok((count as u64, start.elapsed().as_secs_f64()))
}

/// Receives from the first datagram on, and stops before the sender does. Returns the number of datagrams, and the
/// seconds.
fn receive(socket: &UdpSocket, size: usize, length: Duration) -> Result<(u64, f64)> {
    let mut headers = MultiHeaders::<SockaddrIn>::preallocate(BATCH, None);
    let mut buffers = vec![vec![0; size]; BATCH];
    let (mut count, mut start) = (0, None);
    while start.is_none_or(|start: Instant| start.elapsed() < length.mul_f64(0.9)) {
        let mut slices: Vec<_> = buffers.iter_mut().map(|buffer| [IoSliceMut::new(buffer)]).collect();
        let got = recvmmsg(socket.as_raw_fd(), &mut headers, &mut slices, MsgFlags::MSG_WAITFORONE, None)?;
        count += got.count();
        start.get_or_insert_with(Instant::now);
    }
    Ok((count as u64, start.map_or(f64::NAN, |start| start.elapsed().as_secs_f64())))
}
