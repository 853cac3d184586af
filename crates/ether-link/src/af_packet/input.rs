//! Receiving: super-frames are segmented in place.

use std::io::IoSliceMut;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

use pvrdma_link::Frames;
use rustix::io::Errno;

use super::offload::{
    Headers, MAX_HEADERS, MAX_RECEIVED, MAX_SEGMENTS, MAX_SUPER, OFFLOAD_LEN, SuperFrameHeaders, VirtioNetHeader,
    finish_checksum,
};
use super::socket::{self, Arrival, MAX_MESSAGES};

/// Room in front of a frame for the tag that the kernel removed.
const TAG_LEN: usize = 4;
/// Minimum length in bytes of a super-frame that changes the buffer layout for the following messages.
const MIN_APART: usize = 16 << 10;
/// Number of calls without a super-frame after which the layout returns to one piece.
const MAX_CALLS: usize = 64;
/// Length of the MAC addresses in front of the tag.
const ADDRESSES: usize = 12;

/// Layout of a message's buffer, in the expectation that the next message is a super-frame like the last one. The
/// payloads of its packets are received at distances that leave room for headers, so that only the headers need to be
/// filled in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Layout {
    headers: usize,
    segment: usize,
    /// Number of packets with room for headers. Further bytes follow the last one.
    count: usize,
}

impl Layout {
    /// Layout in one piece.
    const WHOLE: Self = Self { headers: 0, segment: MAX_SUPER, count: 1 };

    fn of(headers: usize, segment: usize) -> Self {
        Self { headers, segment, count: (MAX_SUPER / segment.max(1)).clamp(1, MAX_SEGMENTS) }
    }

    /// Returns the distance of two packets: room for a tag, headers and payload.
    const fn stride(self) -> usize {
        TAG_LEN + self.headers + self.segment
    }

    /// Returns the bytes needed for a message.
    const fn room(self) -> usize {
        self.count * self.stride() + MAX_SUPER.saturating_sub(self.count * self.segment)
    }

    /// Returns the maximum number of messages per call. For super-frames, a few are as efficient as many, and a batch
    /// that is kept then occupies little more than its packets.
    const fn most_messages(self) -> usize {
        if self.count > 1 { 4 } else { MAX_MESSAGES }
    }

    /// Iterates over the ranges of the pieces in the message's buffer.
    fn pieces(self) -> impl Iterator<Item = Range<usize>> {
        let stride = self.stride();
        let apart = (0..self.count).map(move |index| {
            let end = (index + 1) * stride;
            let start = if index == 0 { TAG_LEN } else { end - self.segment };
            start..end
        });
        apart.chain(std::iter::once(self.count * stride..self.room()))
    }
}

/// Receiving half of the link.
#[derive(Debug)]
pub(super) struct Input {
    layout: Layout,
    /// Average number of packets per message in the last call.
    pub(super) burst: usize,
    /// Number of calls since the last super-frame.
    calls: usize,
    /// Buffer for a super-frame that did not match the layout.
    scratch: Vec<u8>,
}

impl Default for Input {
    fn default() -> Self {
        Self { layout: Layout::WHOLE, burst: 1, calls: 0, scratch: Vec::new() }
    }
}

impl Input {
    /// Appends received frames, about `most`. Returns the number of lost ones.
    pub(super) fn receive(&mut self, socket: &OwnedFd, frames: &mut Frames, most: usize) -> Result<usize, Errno> {
        self.calls += 1;
        if self.calls > MAX_CALLS {
            self.layout = Layout::WHOLE;
        }
        let layout = self.layout;
        let messages = (most / self.burst).clamp(1, layout.most_messages());
        let span = frames.reserve(messages * layout.room());
        let mut offloads = [[0; OFFLOAD_LEN]; MAX_MESSAGES];
        let mut arrivals = [Arrival { length: 0, tag: None, truncated: false }; MAX_MESSAGES];
        let arrivals = arrivals.get_mut(..messages).unwrap_or_default();
        let count = {
            let mut parts = Vec::with_capacity(messages * (layout.count + 2));
            for (room, offload) in frames.room(span.clone()).chunks_exact_mut(layout.room()).zip(&mut offloads) {
                parts.push(IoSliceMut::new(offload));
                scatter(room, layout, &mut parts);
            }
            socket::receive(socket.as_fd(), &mut parts, layout.count + 2, arrivals)?
        };
        let (before, mut lost) = (frames.len(), 0);
        for ((index, arrival), offload) in arrivals.iter().enumerate().take(count).zip(&offloads) {
            let start = span.start + index * layout.room();
            let taken = self.take(frames, start, layout, arrival, VirtioNetHeader::from_bytes(offload));
            lost += usize::from(taken.is_none());
        }
        self.burst = ((frames.len() - before) / count.max(1)).max(1);
        Ok(lost)
    }

    /// Appends the frames of one message, whose buffer begins at `start`. `None` if the message is unusable.
    fn take(
        &mut self,
        frames: &mut Frames,
        start: usize,
        layout: Layout,
        arrival: &Arrival,
        offload: VirtioNetHeader,
    ) -> Option<()> {
        let length = arrival.length.checked_sub(OFFLOAD_LEN).filter(|_| !arrival.truncated)?;
        let room = start..start + layout.room();
        let first = layout.headers + layout.segment;
        if let Some(segment) = offload.segment() {
            if length >= MIN_APART {
                self.calls = 0;
            }
            let whole = frames.room(room.clone());
            let headers = whole.get(TAG_LEN..TAG_LEN + length.min(first)).and_then(Headers::of);
            if let Some(headers) = &headers
                && (headers.len, segment) == (layout.headers, layout.segment)
                && length <= layout.headers + layout.count * layout.segment
            {
                return in_place(frames, start, layout, headers, (length, arrival.tag));
            }
        }
        let bytes = frames.room(room);
        if length > first {
            gather(bytes, layout);
        }
        let mut begin = TAG_LEN;
        let frame = bytes.get_mut(TAG_LEN..TAG_LEN + length)?;
        if offload.segment().is_none()
            && let Some(place) = offload.checksum
            && !finish_checksum(frame, place)
        {
            return None;
        }
        if let Some(tag) = arrival.tag {
            bytes.copy_within(TAG_LEN..TAG_LEN + ADDRESSES, 0);
            bytes.get_mut(ADDRESSES..ADDRESSES + TAG_LEN)?.copy_from_slice(&tag);
            begin = 0;
        }
        let Some(segment) = offload.segment() else {
            return frames.mark(start + begin..start + TAG_LEN + length).then_some(());
        };
        self.scratch.clear();
        self.scratch.extend_from_slice(bytes.get(begin..TAG_LEN + length)?);
        let headers = Headers::of(&self.scratch)?;
        if self.scratch.len().checked_sub(headers.len)?.div_ceil(segment) > MAX_RECEIVED {
            return None;
        }
        // For a small message, copying is faster than passing many pieces to the kernel in each call.
        if length >= MIN_APART {
            self.layout = Layout::of(headers.len - (TAG_LEN - begin), segment);
        }
        split(frames, &self.scratch, &headers, segment)
    }
}

/// Appends the pieces of a message's buffer to the vector for the kernel.
fn scatter<'r>(room: &'r mut [u8], layout: Layout, parts: &mut Vec<IoSliceMut<'r>>) {
    let (mut rest, mut at) = (room, 0);
    for piece in layout.pieces() {
        let (_, after) = rest.split_at_mut_checked(piece.start - at).unwrap_or_default();
        let (part, after) = after.split_at_mut_checked(piece.len()).unwrap_or_default();
        parts.push(IoSliceMut::new(part));
        (rest, at) = (after, piece.end);
    }
}

/// Moves the pieces together into one contiguous frame.
fn gather(room: &mut [u8], layout: Layout) {
    let mut end = TAG_LEN;
    for piece in layout.pieces() {
        let next = end + piece.len();
        if piece.start > end && piece.end <= room.len() {
            room.copy_within(piece, end);
        }
        end = next;
    }
}

/// Fills in the headers of packets that are in their final place, including the tag that the kernel removed.
fn in_place(
    frames: &mut Frames,
    start: usize,
    layout: Layout,
    headers: &Headers,
    (length, tag): (usize, Option<[u8; TAG_LEN]>),
) -> Option<()> {
    let tagged = match tag {
        Some(tag) => Some(headers.tagged(tag)?),
        None => None,
    };
    let (headers, before) = tagged.as_ref().map_or((headers, TAG_LEN), |tagged| (tagged, 0));
    let payload = length.checked_sub(layout.headers)?;
    let count = payload.div_ceil(layout.segment);
    for index in 0..count {
        let bytes = (payload - index * layout.segment).min(layout.segment);
        let first = start + index * layout.stride();
        let span = first + before..first + TAG_LEN + layout.headers + bytes;
        headers.write(index, layout.segment, index + 1 == count, frames.room(span.clone()))?;
        frames.mark(span);
    }
    Some(())
}

/// Copies the packets of a super-frame to separate frames.
fn split(frames: &mut Frames, whole: &[u8], headers: &Headers, segment: usize) -> Option<()> {
    let payload = whole.get(headers.len..)?;
    let count = payload.len().div_ceil(segment);
    for (index, bytes) in payload.chunks(segment).enumerate() {
        frames.push_with(MAX_HEADERS + bytes.len(), |room| {
            let frame = room.get_mut(..headers.len + bytes.len())?;
            frame.get_mut(headers.len..)?.copy_from_slice(bytes);
            headers.write(index, segment, index + 1 == count, frame)?;
            Some(frame.len())
        });
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use pvrdma_link::offload::sample::{data, long_tcp};

    use super::*;

    /// Passes a TCP frame with this payload to the link, as one message of the kernel in this layout. Returns the
    /// number of resulting frames, if the message was usable.
    fn frames_of(layout: Layout, length: usize, segment: u16) -> Option<usize> {
        let (frame, _) = long_tcp([2; 6], [4; 6], &data(length), segment);
        let [s0, s1] = segment.to_ne_bytes();
        let offload = VirtioNetHeader::from_bytes(&[1, 1, 0, 0, s0, s1, 34, 0, 16, 0]);
        let mut frames = Frames::default();
        let span = frames.reserve(layout.room());
        let mut parts = Vec::new();
        scatter(frames.room(span.clone()), layout, &mut parts);
        let mut rest = &frame[..];
        for part in &mut parts {
            let (here, after) = rest.split_at(part.len().min(rest.len()));
            part[..here.len()].copy_from_slice(here);
            rest = after;
        }
        let arrival = Arrival { length: OFFLOAD_LEN + frame.len(), tag: None, truncated: false };
        let taken = Input::default().take(&mut frames, span.start, layout, &arrival, offload);
        assert!(taken.is_some() || frames.is_empty());
        taken.map(|()| frames.len())
    }

    /// A virtual machine on the same bridge chooses the segments of its super-frames, down to one byte.
    #[test]
    fn a_super_frame_of_tiny_segments_is_lost() {
        for (length, segment, expected) in [
            (65_000, 1448, Some(45)),
            (65_000, 64, Some(1016)),
            (1024, 1, Some(1024)),
            (1025, 1, None),
            (65_000, 63, None),
            (65_000, 1, None),
        ] {
            for layout in [Layout::WHOLE, Layout::of(54, segment.into())] {
                assert_eq!(frames_of(layout, length, segment), expected, "{length} {segment} {layout:?}");
            }
        }
    }
}
