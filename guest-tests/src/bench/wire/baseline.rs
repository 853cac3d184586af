//! What the wire is compared with on the same pair of interfaces: a TCP stream, and datagrams without any protocol.

use std::io::{IoSlice, IoSliceMut};
use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use nix::sys::socket::{MsgFlags, MultiHeaders, SockaddrIn, recvmmsg, sendmmsg};

use super::network::Network;
use super::session::Talker;
use crate::bed::Bed;

/// Datagrams in a call.
const BATCH: usize = 64;
const PORT: u16 = 4790;

/// One TCP stream, measured by `iperf3`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stream {
    /// Gb/s that arrived.
    pub(super) gigabits: f64,
    /// Processor seconds of both sides.
    pub(super) processor: f64,
    /// Bytes that arrived.
    pub(super) bytes: f64,
}

/// Sends for a while over one stream.
pub(super) fn stream(network: &Network, seconds: f64) -> Result<Stream> {
    let iperf = Bed::built_program("usr/bin/iperf3").context("there is no iperf3")?;
    let command =
        |words: &[&str]| iperf.iter().cloned().chain(words.iter().map(|&word| word.to_owned())).collect::<Vec<_>>();
    let mut server = Talker::start(network, 1, &command(&["-s", "-1", "--forceflush"]))?;
    while !server.line()?.contains("listening") {}
    let (address, time) = (Network::host_address(1), seconds.to_string());
    let mut client = Talker::start(network, 0, &command(&["-J", "-c", &address, "-t", &time]))?;
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

/// Options of the hidden command `udp-peer`.
#[derive(Clone, Debug, Args)]
pub(crate) struct UdpOptions {
    /// 0 sends, 1 receives.
    #[arg(long)]
    side: usize,
    /// Bytes of a datagram.
    #[arg(long)]
    size: usize,
    /// How long to send.
    #[arg(long)]
    seconds: f64,
}

/// Datagrams of `size` bytes, in batches and without any protocol. Gives how many arrived in a second.
pub(super) fn datagrams(network: &Network, size: usize, seconds: f64) -> Result<f64> {
    let command = |side: usize| {
        let words =
            ["udp-peer", "--side", &side.to_string(), "--size", &size.to_string(), "--seconds", &seconds.to_string()];
        words.map(str::to_owned).to_vec()
    };
    let mut receiver = Talker::start_self(network, 1, command(1))?;
    receiver.line()?;
    let _sender = Talker::start_self(network, 0, command(0))?;
    receiver.line()?.trim().parse().context("the rate of datagrams")
}

/// Plays one side of [`datagrams`].
#[expect(clippy::cast_precision_loss, reason = "figures have three digits")]
pub(crate) fn run(options: &UdpOptions) -> Result<()> {
    let address = |side| (Network::host_address(side), PORT);
    let length = Duration::from_secs_f64(options.seconds);
    let mut headers = MultiHeaders::<SockaddrIn>::preallocate(BATCH, None);
    if options.side == 0 {
        let socket = UdpSocket::bind((Network::host_address(0), 0))?;
        socket.connect(address(1))?;
        let (data, end) = (vec![0x5a; options.size], Instant::now() + length);
        let slices: Vec<_> = (0..BATCH).map(|_| [IoSlice::new(&data)]).collect();
        while Instant::now() < end {
            sendmmsg(socket.as_raw_fd(), &mut headers, &slices, [None; BATCH], [], MsgFlags::empty())?;
        }
        return Ok(());
    }
    let socket = UdpSocket::bind(address(1))?;
    println!("ready");
    let mut buffers = vec![vec![0; options.size]; BATCH];
    let (mut count, mut start) = (0, None);
    // The sender stops a little later than the first datagram came; we stop before it does.
    while start.is_none_or(|start: Instant| start.elapsed() < length.mul_f64(0.9)) {
        let mut slices: Vec<_> = buffers.iter_mut().map(|buffer| [IoSliceMut::new(buffer)]).collect();
        let got = recvmmsg(socket.as_raw_fd(), &mut headers, &mut slices, MsgFlags::MSG_WAITFORONE, None)?;
        count += got.count();
        start.get_or_insert_with(Instant::now);
    }
    println!("{}", count as f64 / start.map_or(f64::NAN, |start| start.elapsed().as_secs_f64()));
    Ok(())
}
