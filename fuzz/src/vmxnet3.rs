//! Shared parts of the targets of `vmxnet3-dev`: plausible numbers and addresses, and a port that changes the guest's
//! memory while the device processes a packet.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use arbitrary::Arbitrary;
use pvrdma_link::testing::{self, Attack, Rules, Tags};
use pvrdma_link::{Frames, GsoLink, Link, Offload, memory};
use pvrdma_vmxnet3::testing::frames::{GUEST_MAC, PEER_MAC, tagged};
use pvrdma_vmxnet3::testing::{MEMORY_BASE, Memory, RxPacket};
use pvrdma_vmxnet3::{Checksum, Frame, FramePort, MAX_FRAME, MAX_SUPER_FRAME, PortOffloads, Sent};

/// Bytes in a page.
pub const PAGE: u64 = 4096;
/// Number of memory pages: more than a driver needs, but few enough for random addresses to hit something.
pub const PAGES: u64 = 1024;
/// Number of pages at which random addresses point: a driver has its rings there.
const NEAR: u64 = 24;

/// A number as it occurs in lengths, masks and indices.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Word {
    /// Small.
    Small(u8),
    /// A power of two, one less or one more.
    Bit(u8, i8),
    /// A length with a generation.
    Ready(u16),
    /// Anything.
    Any(u32),
}

impl Word {
    /// The number.
    pub fn get(self) -> u32 {
        match self {
            Self::Small(value) => u32::from(value % 40),
            Self::Bit(bit, off) => (1_u32 << (bit % 32)).wrapping_add_signed(i32::from(off % 2)),
            Self::Ready(value) => 1 << 31 | 1 << 14 | u32::from(value),
            Self::Any(value) => value,
        }
    }
}

/// A bus address.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Address {
    /// A page that a driver uses.
    Page(u8),
    /// In such a page.
    In(u8, u16),
    /// At the end of memory.
    End(u8),
    /// Anything.
    Any(u64),
}

impl Address {
    /// The address.
    pub fn get(self) -> u64 {
        match self {
            Self::Page(page) => MEMORY_BASE + u64::from(page) % NEAR * PAGE,
            Self::In(page, at) => MEMORY_BASE + u64::from(page) % NEAR * PAGE + u64::from(at) % PAGE,
            Self::End(back) => MEMORY_BASE + PAGES * PAGE - u64::from(back),
            Self::Any(address) => address,
        }
    }
}

/// Writes as much as lies in memory.
pub fn poke(memory: &Memory, address: u64, bytes: &[u8]) {
    if (MEMORY_BASE..memory.end()).contains(&address) {
        let room = (memory.end() - address) as usize;
        memory.write(address, &bytes[..bytes.len().min(room)]);
    }
}

/// The only address that the sender of a frame may use.
const OWN_V4: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 5);
const OWN: IpAddr = IpAddr::V4(OWN_V4);

/// Checks a frame that a port gets.
fn judge(frame: &Frame<'_>) {
    let most = if frame.mss().is_some() { MAX_SUPER_FRAME } else { MAX_FRAME };
    assert!((14..=most).contains(&frame.bytes().len()));
}

/// Rules of networks: with and without tags, where a host may have one IPv4 address and no other.
fn networks() -> [Rules<'static>; 3] {
    [Tags::Untagged, Tags::Access(5), Tags::Trunk].map(|tags| Rules {
        sources: &[],
        tags,
        roce: false,
        may_have: &|address, _| address == OWN,
    })
}

/// Checks that a frame that follows the rules of a network still does when it leaves, whatever offloads its sender
/// requested.
pub fn obeys(inspected: &[u8], left: &[u8]) {
    for rules in networks() {
        if rules.check(inspected).is_ok() {
            assert_eq!(rules.check(left), Ok(()), "{rules:?}: {inspected:x?} left as {left:x?}");
        }
    }
}

/// A port that writes to the guest's memory each time it gets a frame, while the packet is still in the ring.
#[derive(Default)]
pub struct MeddlingPort {
    memory: OnceLock<Arc<Memory>>,
    /// Behaviour of the next call: bits for offloads and room, then an address.
    mood: AtomicU64,
    /// Frames since the last call of [`Self::take`].
    frames: AtomicU64,
}

impl MeddlingPort {
    /// Whose memory it writes.
    pub fn meddle_with(&self, memory: &Arc<Memory>) {
        let _ = self.memory.set(Arc::clone(memory));
    }

    /// Sets the behaviour from now on.
    pub fn set_mood(&self, mood: u64) {
        self.mood.store(mood, Ordering::Relaxed);
    }

    /// Frames since the last call.
    pub fn take(&self) -> u64 {
        self.frames.swap(0, Ordering::Relaxed)
    }
}

impl FramePort for MeddlingPort {
    fn offloads(&self) -> PortOffloads {
        let mood = self.mood.load(Ordering::Relaxed);
        PortOffloads { checksum: mood & 1 != 0, segmentation: mood & 2 != 0 }
    }

    fn send(&self, frame: &Frame<'_>) -> Sent {
        judge(frame);
        cut(frame);
        let mood = self.mood.load(Ordering::Relaxed);
        self.frames.fetch_add(1, Ordering::Relaxed);
        if let Some(memory) = self.memory.get() {
            let address = MEMORY_BASE + (mood >> 8) % (NEAR * PAGE);
            poke(memory, address & !3, &mood.to_le_bytes());
        }
        self.set_mood(mood.rotate_left(7));
        if mood & 0x1c == 0x1c { Sent::Full } else { Sent::Taken }
    }
}

/// Segments a frame as a link would, and checks each segment.
pub fn cut(frame: &Frame<'_>) {
    let mut room = Vec::new();
    let count = frame.for_each_wire_frame(&mut room, |part| {
        judge(part);
        obeys(frame.bytes(), part.bytes());
        assert!(part.mss().is_none());
        true
    });
    assert!((1..=pvrdma_vmxnet3::MAX_SEGMENTS).contains(&count));
    through_a_link(frame);
}

/// Same as [`cut`], behind a port that leaves segmentation to links.
fn through_a_link(frame: &Frame<'_>) {
    let bytes = frame.bytes();
    let offload = match (frame.checksum(), frame.mss()) {
        (_, Some(mss)) => Offload::segmentation(bytes, mss),
        (Checksum::Partial { start, at }, None) => Offload::checksum(bytes, start, at),
        _ => None,
    };
    let Some(offload) = offload else { return };
    let (near, far) = memory::pair(pvrdma_vmxnet3::MAX_SEGMENTS).unwrap();
    let (mut frames, mut left) = (Frames::default(), Frames::default());
    frames.push_with_offload(bytes, offload);
    assert_eq!(GsoLink::new(Arc::new(near)).send(&frames, 0), 1);
    far.receive(&mut left, pvrdma_vmxnet3::MAX_SEGMENTS);
    assert!(!left.is_empty());
    left.iter().for_each(|part| obeys(bytes, part));
}

/// Returns a frame as the guest received it, with its stripped tag.
pub fn arrived(packet: &RxPacket) -> Vec<u8> {
    packet.tag.map_or_else(|| packet.bytes.clone(), |tag| tagged(&packet.bytes, tag))
}

/// Returns a frame, with one byte changed, that breaks a rule once its checksum is stored at the given offset.
pub fn attack(number: u8, change: u16) -> Attack {
    let mut all = testing::attacks(PEER_MAC, GUEST_MAC, &[0; 8], [OWN_V4, Ipv4Addr::new(10, 0, 0, 1)]);
    let mut attack = all.swap_remove(usize::from(number) % all.len());
    if change != 0 {
        let at = 12 + usize::from(change >> 8) % (attack.frame.len() - 12);
        attack.frame[at] ^= change.to_le_bytes()[0];
    }
    attack
}

/// Chooses the last bytes of a frame so that a sum stored at `at` makes it break a rule.
pub fn forge(frame: &mut [u8], start: u16, at: u16, rule: u8) {
    // VLANs, RoCE v1 and ARP as ethertypes, the port of RoCE v2, and half an address.
    let value = [666, 0x8915, 0x0806, 4791, 1, 0x8100][usize::from(rule) % 6];
    testing::forge(frame, start.into(), at.into(), value);
}
