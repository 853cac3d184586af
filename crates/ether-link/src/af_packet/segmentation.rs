//! Who cuts super-frames, and whether the packets are right then.
//!
//! The ICRC of RoCE covers the identification of IPv4, which counts up from packet to packet. The kernel counts it up
//! when it cuts; whether an adapter that cuts does so as well, nobody promises, and one that does not damages all
//! packets but the first. So one super-frame leaves an interface before anything else does, and a second socket looks
//! at it behind the place where the kernel cuts.

use std::io::IoSliceMut;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use pvrdma_roce::wire::{Bth, Ethernet, Extension, Header, Ipv4, Network, Opcode, Packet, Position, Udp, build};
use pvrdma_verbs::{MacAddr, Psn, Qpn};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::offload::{OFFLOAD_LEN, VirtioNetHeader, finish_checksum};
use super::output::Output;
use super::{filter, socket};
use crate::Frames;

/// Nobody's (RFC 5737).
const NOWHERE: [u8; 4] = [192, 0, 2, 1];
const PACKETS: u32 = 3;
const PAYLOAD: usize = 64;
/// What leaves is seen at once, unless the interface has a queue that waits.
const PATIENCE: Duration = Duration::from_millis(100);
const ROOM: usize = 2048;

/// What became of a super-frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Segmentation {
    /// The kernel has cut it, and the packets were right; or it takes none, which is noticed anyway.
    Kernel,
    /// It went to the interface whole. Between virtual ones it stays so; an adapter cuts it.
    Interface,
    /// The packets were wrong.
    Wrong,
    /// The interface is down, or nothing was seen.
    Unknown,
}

/// Sends a super-frame of three packets from `mac` to itself, which the next bridge drops.
///
/// # Errors
/// No right to, no such interface, or not an Ethernet.
pub(super) fn test(interface: &str, mac: MacAddr) -> Result<Segmentation, Errno> {
    let (sender, _) = socket::open(interface, &filter::program(&[], filter::VlanFilter::All))?;
    let (watcher, _) = socket::open(interface, &filter::to_itself(mac))?;
    socket::hear_outgoing(watcher.as_fd())?;
    let mut frames = Frames::default();
    for number in 0..3 {
        frames.push(&packet(mac, number));
    }
    let sent = Output::default().send(&sender, &frames, 0);
    if sent.error.is_some() || sent.lost > 0 {
        return Ok(Segmentation::Unknown);
    }
    let mut seen = 0;
    while seen < PACKETS {
        let Some((offload, mut frame)) = next(&watcher)? else { return Ok(Segmentation::Unknown) };
        if offload.segment().is_some() {
            return Ok(Segmentation::Interface);
        }
        if let Some(place) = offload.checksum {
            // The interface would.
            finish_checksum(&mut frame, place);
        }
        // The ICRC covers the identification and the payload.
        let right = Packet::parse(&frame).is_ok_and(|packet| {
            packet.verify().is_ok() && packet.header.bth.psn == Psn::new(seen) && packet.payload.len() == PAYLOAD
        });
        if !right {
            return Ok(Segmentation::Wrong);
        }
        seen += 1;
    }
    Ok(Segmentation::Kernel)
}

fn packet(mac: MacAddr, number: u16) -> Vec<u8> {
    let ip = Ipv4 {
        traffic_class: 0,
        identification: 0x7ffe + number,
        dont_fragment: true,
        hop_limit: 1,
        source: NOWHERE,
        destination: NOWHERE,
    };
    let network = Network::V2Ipv4(ip, Udp { source_port: 0xc001, checksum: 0 });
    let ethernet = Ethernet { destination: mac, source: mac, vlan: None };
    let bth = Bth::new(Opcode::send(Position::Middle), Qpn::new(0), Psn::new(number.into()));
    build(&Header { ethernet, network, bth, extension: Extension::None }, &[0; PAYLOAD]).unwrap_or_default()
}

/// The next frame that leaves.
fn next(watcher: &OwnedFd) -> Result<Option<(VirtioNetHeader, Vec<u8>)>, Errno> {
    let mut fds = [PollFd::new(watcher, PollFlags::IN)];
    let patience = Timespec::try_from(PATIENCE).map_err(|_| Errno::INVAL)?;
    if rustix::event::poll(&mut fds, Some(&patience))? == 0 {
        return Ok(None);
    }
    let (mut offload, mut frame) = ([0; OFFLOAD_LEN], vec![0; ROOM]);
    let mut arrivals = [socket::Arrival { length: 0, tag: None, truncated: false }];
    let mut parts = [IoSliceMut::new(&mut offload), IoSliceMut::new(&mut frame)];
    match socket::receive(watcher.as_fd(), &mut parts, 2, &mut arrivals) {
        Ok(0) | Err(Errno::AGAIN | Errno::NETDOWN) => return Ok(None),
        Ok(_) => {}
        Err(errno) => return Err(errno),
    }
    let [arrival] = arrivals;
    frame.truncate(arrival.length.saturating_sub(OFFLOAD_LEN));
    Ok(Some((VirtioNetHeader::from_bytes(&offload), frame)))
}
