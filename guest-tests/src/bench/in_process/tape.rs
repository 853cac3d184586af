//! A link that records the writes that arrive, and replays them.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use pvrdma_link::{Bell, Frames, Link, LinkInspect, Readiness, memory::MemoryLink};

/// Consecutive packets of a connection: a super-frame of packets of 1024 bytes, as in a network with an MTU of 1500.
const RUN: usize = 44;
/// Positions in an Ethernet frame with IPv4, UDP and BTH.
const DESTINATION: Range<usize> = 0..6;
const OPCODE: usize = 42;
const DESTINATION_QP: Range<usize> = 47..50;
const PSN: Range<usize> = 51..54;
/// The opcode of an ACK.
const ACK: u8 = 0x11;

/// A connection: the Ethernet address of the receiver, its QP there, and the QP that gets the ACKs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    pub(super) mac: [u8; 6],
    pub(super) to: u32,
    pub(super) from: u32,
}

/// Recorded packets of a connection.
#[derive(Debug)]
struct Track {
    way: Way,
    frames: Vec<Vec<u8>>,
    first_psn: u32,
    next: usize,
}

/// Returns the distance of a PSN from the first.
fn distance(first_psn: u32, psn: u32) -> usize {
    (psn.wrapping_sub(first_psn) & 0xff_ffff) as usize
}

/// Returns three bytes of a frame as a number.
fn word(frame: &[u8], at: Range<usize>) -> Option<u32> {
    frame.get(at)?.first_chunk().map(|&[a, b, c]| u32::from_be_bytes([0, a, b, c]))
}

#[derive(Debug, Default)]
struct Reel {
    tracks: Vec<Track>,
    /// The current track, and the remaining packets of its turn.
    turn: usize,
    left: usize,
}

/// Acknowledged part of a track.
#[derive(Debug)]
struct Acked {
    first_psn: u32,
    /// Number of acknowledged packets, and of all packets.
    count: AtomicUsize,
    of: usize,
}

/// Acknowledged part of each track, and the track of an ACK. A thread that sends an ACK never waits for the reader of
/// the tape.
#[derive(Debug)]
struct Acks {
    list: Vec<Acked>,
    by_sender: HashMap<u32, usize>,
}

impl Reel {
    /// Records a packet if it is the next of its connection, so that none is recorded twice.
    fn record(&mut self, frame: &[u8]) {
        let (Some(to), Some(psn)) = (word(frame, DESTINATION_QP), word(frame, PSN)) else { return };
        let is_for = |track: &&mut Track| frame.get(DESTINATION) == Some(&track.way.mac) && track.way.to == to;
        let Some(track) = self.tracks.iter_mut().find(is_for) else { return };
        if track.frames.is_empty() {
            track.first_psn = psn;
        }
        if distance(track.first_psn, psn) == track.frames.len() {
            track.frames.push(frame.to_vec());
        }
    }

    /// Delivers packets within the windows, in turns, as if all connections sent at the same time. Returns `false` if
    /// no more can be delivered before an ACK.
    fn bring(&mut self, acks: &Acks, window: usize, out: &mut Frames, most: usize) -> bool {
        let ready = |track: &Track, acked: &Acked| {
            let end = acked.count.load(Ordering::Acquire).saturating_add(window).min(acked.of);
            end.saturating_sub(track.next)
        };
        let mut room = most;
        let mut idle = 0;
        while room > 0 {
            let (turn, left) = (self.turn, self.left);
            let (Some(track), Some(acked)) = (self.tracks.get_mut(turn), acks.list.get(turn)) else { return false };
            let count = ready(track, acked).min(left).min(room);
            track.frames.iter().skip(track.next).take(count).for_each(|frame| out.push(frame));
            track.next += count;
            room -= count;
            self.left -= count;
            if self.left == 0 || ready(track, acked) == 0 {
                (self.turn, self.left) = ((turn + 1) % self.tracks.len(), RUN);
                idle = if count == 0 { idle + 1 } else { 0 };
            }
            if idle > self.tracks.len() {
                return false;
            }
        }
        true
    }
}

impl Acks {
    fn of(tracks: &[Track]) -> Self {
        let acked =
            |track: &Track| Acked { first_psn: track.first_psn, count: AtomicUsize::new(0), of: track.frames.len() };
        let by_sender = tracks.iter().enumerate().map(|(index, track)| (track.way.from, index)).collect();
        Self { list: tracks.iter().map(acked).collect(), by_sender }
    }

    /// Processes an ACK. Returns `true` if it makes room in a window.
    fn note(&self, frame: &[u8]) -> bool {
        let (Some(qpn), Some(psn)) = (word(frame, DESTINATION_QP), word(frame, PSN)) else { return false };
        let acked = self.by_sender.get(&qpn).and_then(|&index| self.list.get(index));
        let Some(acked) = acked.filter(|_| frame.get(OPCODE) == Some(&ACK)) else { return false };
        let count = (distance(acked.first_psn, psn) + 1).min(acked.of);
        acked.count.fetch_max(count, Ordering::AcqRel) < count
    }
}

/// An end of a cable that records arriving packets, and replays them as fast as they are taken and acknowledged.
#[derive(Debug)]
pub(super) struct Tape {
    cable: MemoryLink,
    reel: Mutex<Reel>,
    /// Set when the first replay begins.
    acks: OnceLock<Acks>,
    /// Maximum number of packets of a connection in flight.
    window: usize,
    /// Readable while there may be a packet to deliver.
    more: Bell,
}

impl Tape {
    /// Records the packets of a cable. In a replay, up to `window` packets of each connection may be in flight.
    pub(super) fn new(cable: MemoryLink, window: usize) -> io::Result<Self> {
        Ok(Self { cable, reel: Mutex::default(), acks: OnceLock::new(), window, more: Bell::new()? })
    }

    fn reel(&self) -> MutexGuard<'_, Reel> {
        self.reel.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the connections to record from now on.
    pub(super) fn set_ways(&self, ways: &[Way]) {
        let track = |&way: &Way| Track { way, frames: Vec::new(), first_psn: 0, next: 0 };
        *self.reel() = Reel { tracks: ways.iter().map(track).collect(), ..Reel::default() };
    }

    /// Begins to replay everything, and returns the number of packets. The first replay changes the descriptor to wait
    /// for, so a switch must be notified.
    pub(super) fn play(&self) -> usize {
        let mut reel = self.reel();
        (reel.turn, reel.left) = (0, RUN);
        reel.tracks.iter_mut().for_each(|track| track.next = 0);
        let acks = self.acks.get_or_init(|| Acks::of(&reel.tracks));
        acks.list.iter().for_each(|acked| acked.count.store(0, Ordering::Release));
        self.more.ring();
        reel.tracks.iter().map(|track| track.frames.len()).sum()
    }
}

impl Link for Tape {
    fn receive(&self, frames: &mut Frames, most: usize) {
        let mut reel = self.reel();
        if let Some(acks) = self.acks.get() {
            if !reel.bring(acks, self.window, frames, most) {
                self.more.clear();
                // An ACK that arrived in between has already signalled this.
                if reel.bring(acks, self.window, frames, most.saturating_sub(frames.len())) {
                    self.more.ring();
                }
            }
            return;
        }
        let before = frames.len();
        self.cable.receive(frames, most);
        frames.iter_from(before).for_each(|frame| reel.record(frame));
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        match self.acks.get() {
            Some(acks) if frames.iter_from(from).fold(false, |more, frame| acks.note(frame) | more) => self.more.ring(),
            Some(_) => {}
            None => _ = self.cable.send(frames, from),
        }
        frames.len() - from
    }

    /// All devices have the tape itself as their link.
    fn line(&self) -> Option<usize> {
        Some(std::ptr::from_ref(self).addr())
    }

    fn readiness(&self) -> Readiness {
        if self.acks.get().is_some() {
            return Readiness { readable: Some(self.more.descriptor()), ..Readiness::default() };
        }
        Readiness { changed: Some(self.more.descriptor()), ..self.cable.readiness() }
    }

    fn lost(&self) -> u64 {
        self.cable.lost()
    }

    fn inspect(&self) -> LinkInspect {
        self.cable.inspect()
    }
}
