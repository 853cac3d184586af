//! Who cuts super-frames, and whether the packets are right then.
//!
//! The ICRC of RoCE covers the identification of IPv4, which counts up from packet to packet. The kernel counts it up
//! when it cuts; whether an adapter that cuts does so as well, nobody promises, and one that does not damages all
//! packets but the first. So one super-frame leaves an interface before anything else does, and a second socket looks
//! at it behind the place where the kernel cuts.
//!
//! Whether the kernel cuts TCP is asked before that, with a frame made here: when it refuses a guest's frame later on,
//! that may be the fault of the frame, and must not change what other devices get from the kernel.

use std::io::IoSliceMut;
use std::num::NonZeroU16;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use pvrdma_packet::{Checksum, MacAddr, PROTOCOL_TCP};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::offload::{OFFLOAD_LEN, VirtioNetHeader, finish_checksum};
use super::output::Output;
use super::{filter, socket};
use crate::{Frames, Offload};

/// Nobody's (RFC 5737).
const NOWHERE: [u8; 4] = [192, 0, 2, 1];
const PACKETS: u16 = 3;
/// Segments of the TCP frame, and data in each.
const SEGMENTS: usize = 2;
const SEGMENT: usize = 64;
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
    /// The kernel takes no frames of TCP to cut.
    Refused,
    /// The interface is down, or nothing was seen.
    Unknown,
}

/// The packets of the super-frame that is tried, which the caller makes and knows again.
#[derive(Clone, Copy, Debug)]
pub struct SegmentationSample {
    /// Makes the packet with this number from and to an address: RoCE v2 over IPv4, of one flow and one length, with an
    /// identification that counts up with the number.
    pub packet: fn(MacAddr, u16) -> Vec<u8>,
    /// Returns `true` if a frame is the packet with this number, intact in all that its receiver checks.
    pub is_intact: fn(&[u8], u16) -> bool,
}

/// Sends a frame of TCP to be cut, and a super-frame of three packets, from `mac` to itself, which the next bridge
/// drops.
///
/// # Errors
/// No right to, no such interface, or not an Ethernet.
pub(super) fn test(interface: &str, mac: MacAddr, sample: SegmentationSample) -> Result<Segmentation, Errno> {
    let (sender, _) = socket::open(interface, &filter::program(&[], filter::VlanFilter::All))?;
    if Output::default().send(&sender, &long_tcp(mac), 0).refused > 0 {
        return Ok(Segmentation::Refused);
    }
    let (watcher, _) = socket::open(interface, &filter::to_itself(mac))?;
    socket::hear_outgoing(watcher.as_fd())?;
    let mut frames = Frames::default();
    for number in 0..PACKETS {
        frames.push(&(sample.packet)(mac, number));
    }
    let sent = Output::default().send(&sender, &frames, 0);
    if sent.error.is_some() || sent.lost > 0 {
        return Ok(Segmentation::Unknown);
    }
    // Segments of TCP that waited in a queue of the interface.
    let mut late = 0;
    let mut seen = 0;
    while seen < PACKETS {
        let Some((offload, mut frame)) = next(&watcher)? else { return Ok(Segmentation::Unknown) };
        if late < SEGMENTS && is_tcp(&frame) {
            late += 1;
            continue;
        }
        if offload.segment().is_some() {
            return Ok(Segmentation::Interface);
        }
        if let Some(place) = offload.checksum {
            // The interface would.
            finish_checksum(&mut frame, place);
        }
        if !(sample.is_intact)(&frame, seen) {
            return Ok(Segmentation::Wrong);
        }
        seen += 1;
    }
    Ok(Segmentation::Kernel)
}

/// A TCP frame to be cut, with its offload.
pub(super) fn long_tcp(mac: MacAddr) -> Frames {
    const TCP: [u8; 20] = [0xc0, 1, 0, 9, 0xff, 0xff, 0xfc, 0x18, 0, 0, 0, 0, 0x50, 0x10, 0, 0, 0, 0, 0, 0];
    let data = SEGMENTS * SEGMENT;
    let [high, low] = u16::try_from(40 + data).unwrap_or(u16::MAX).to_be_bytes();
    let ip = [0x45, 0, high, low, 0x7f, 0xfe, 0x40, 0, 1, PROTOCOL_TCP, 0, 0];
    let [mut head, mut pseudo] = [(); 2].map(|()| Checksum::default());
    [&ip[..], &NOWHERE, &NOWHERE].iter().for_each(|part| head.add(part));
    let length = u16::try_from(20 + data).unwrap_or(u16::MAX).to_be_bytes();
    [&NOWHERE[..], &NOWHERE, &[0, PROTOCOL_TCP], &length].iter().for_each(|part| pseudo.add(part));
    let mut frame = [&mac.0[..], &mac.0, &[8, 0], &ip, &NOWHERE, &NOWHERE, &TCP, &vec![0; data]].concat();
    for (at, sum) in [(24, head.finish()), (50, !pseudo.finish())] {
        if let Some(field) = frame.get_mut(at..).and_then(<[u8]>::first_chunk_mut) {
            *field = sum.to_be_bytes();
        }
    }
    let mut frames = Frames::default();
    let mss = u16::try_from(SEGMENT).ok().and_then(NonZeroU16::new);
    if let Some(offload) = mss.and_then(|mss| Offload::segmentation(&frame, mss)) {
        frames.push_with_offload(&frame, offload);
    }
    frames
}

/// Returns `true` for such a frame, or a segment of it.
fn is_tcp(frame: &[u8]) -> bool {
    frame.get(23) == Some(&PROTOCOL_TCP)
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
