//! Test of where super-frames are segmented, and that the resulting packets are correct.
//!
//! The ICRC of RoCE covers the IPv4 identification, which counts up from packet to packet. The kernel increments it
//! when it segments. An adapter need not do so, and one that does not corrupts all packets except the first. Therefore
//! one super-frame is sent before any other traffic, and a second socket inspects it behind the place where the kernel
//! segments.
//!
//! Before that, a frame that is built here tests if the kernel segments TCP. When the kernel later rejects a guest's
//! frame, it may reject the frame itself, so such a rejection must not change the offloads of other devices.

use std::io::IoSliceMut;
use std::num::NonZeroU16;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use pvrdma_link::{Frames, Offload};
use pvrdma_packet::{Checksum, MacAddr, PROTOCOL_TCP};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::offload::{OFFLOAD_LEN, VirtioNetHeader, finish_checksum};
use super::output::Output;
use super::{filter, socket};

/// Address reserved for documentation (RFC 5737), which no host has.
const NOWHERE: [u8; 4] = [192, 0, 2, 1];
const PACKETS: u16 = 3;
/// Number of segments of the TCP frame, and data bytes in each.
const SEGMENTS: usize = 2;
const SEGMENT: usize = 64;
/// Maximum wait. Frames are seen immediately unless a queue of the interface delays them.
const PATIENCE: Duration = Duration::from_millis(100);
const ROOM: usize = 2048;

/// Result of sending a super-frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Segmentation {
    /// The kernel segmented it, and the packets were correct. Or it accepts no super-frames, which the link notices
    /// itself.
    Kernel,
    /// It reached the interface in one piece. Virtual interfaces pass it on; an adapter segments it.
    Interface,
    /// The packets were wrong.
    Wrong,
    /// The kernel does not segment TCP frames.
    Refused,
    /// The interface is down, or no frame was seen.
    Unknown,
}

/// Packets of the test super-frame, which the caller builds and recognizes.
#[derive(Clone, Copy, Debug)]
pub struct SegmentationSample {
    /// Builds the packet with this number from and to an address: RoCE v2 over IPv4, all of one flow and one length,
    /// with an identification that counts up with the number.
    pub packet: fn(MacAddr, u16) -> Vec<u8>,
    /// Returns `true` if a frame is the packet with this number, and everything that its receiver checks is intact.
    pub is_intact: fn(&[u8], u16) -> bool,
}

/// Sends a TCP frame to be segmented, and a super-frame of three packets, from `mac` to itself, which the next bridge
/// drops.
///
/// # Errors
/// Missing privileges, no such interface, or not an Ethernet interface.
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
    // Number of TCP segments that a queue of the interface delayed.
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
            // The interface would complete it.
            finish_checksum(&mut frame, place);
        }
        if !(sample.is_intact)(&frame, seen) {
            return Ok(Segmentation::Wrong);
        }
        seen += 1;
    }
    Ok(Segmentation::Kernel)
}

/// Returns a TCP frame to be segmented, with its offload.
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

/// Returns the next frame that leaves. `None` if none is seen in time.
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
