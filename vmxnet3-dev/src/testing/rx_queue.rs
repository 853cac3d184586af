//! Driver side of a receive queue, with the assertions of the kernel.

use super::Memory;

/// Buffer layout of a receive queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RxLayout {
    /// Number of descriptors of ring 1.
    pub first: u32,
    /// Number of descriptors of ring 2; may be 0.
    pub second: u32,
    /// Size of a HEAD buffer, in bytes.
    pub head: u32,
    /// Size of a BODY buffer, in bytes.
    pub body: u32,
    /// Number of BODY buffers after each HEAD buffer in ring 1.
    pub bodies: u32,
    /// Size of a slot of the data ring, in bytes; 0 if there is none.
    pub data_slot: u16,
}

impl RxLayout {
    /// The kernel's layout for an MTU of 1,500.
    pub const SMALL: Self = Self { first: 64, second: 32, head: 1536, body: 4096, bodies: 0, data_slot: 0 };
    /// The kernel's layout for an MTU of 9,000.
    pub const JUMBO: Self = Self { first: 96, second: 32, head: 3072, body: 4096, bodies: 2, data_slot: 0 };
}

/// Protocols of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct RxKind {
    /// IPv4.
    pub ipv4: bool,
    /// IPv6.
    pub ipv6: bool,
    /// TCP.
    pub tcp: bool,
    /// UDP.
    pub udp: bool,
}

impl RxKind {
    /// Asserts that the end of the TCP headers is found. The kernel's driver panics (`BUG_ON`) otherwise.
    fn assert_found(self, bytes: &[u8]) {
        let word = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
        let (kind, behind) = if matches!(word(12), 0x8100 | 0x88a8) { (word(16), 18) } else { (word(12), 14) };
        if self.tcp && self.ipv4 {
            assert!(kind == 0x0800 && bytes[behind + 9] == 6, "the kernel panics");
        } else if self.tcp && self.ipv6 {
            assert_eq!(kind, 0x86dd, "the kernel panics");
        }
    }
}

/// A packet as the driver passes it to the network stack.
#[derive(Clone, PartialEq, Eq, Debug, Hash, Default)]
pub struct RxPacket {
    /// Bytes of the packet.
    pub bytes: Vec<u8>,
    /// VLAN tag that was stripped.
    pub tag: Option<u16>,
    /// Protocols reported by the device.
    pub kind: RxKind,
    /// The stack need not verify the checksum.
    pub checksum_verified: bool,
    /// Hash type and hash.
    pub hash: Option<(u8, u32)>,
    /// Number and size of segments.
    pub segments: Option<(u8, u16)>,
    /// Number of buffers used.
    pub buffers: usize,
    /// The packet was in the data ring.
    pub in_data_ring: bool,
}

#[derive(Clone, Copy, Debug)]
struct Buffer {
    address: u64,
    len: u32,
    body: bool,
    /// Word 2 as written by the driver.
    word: u32,
}

/// A ring of buffers.
#[derive(Clone, Debug)]
struct Ring {
    base: u64,
    buffers: Vec<Buffer>,
    next_fill: u32,
    generation: bool,
    next_completion: u32,
}

impl Ring {
    fn new(memory: &Memory, size: u32, kind: impl Fn(u32) -> (u32, bool)) -> Self {
        let base = memory.alloc(size as usize * 16);
        memory.fill(base, size as usize * 16, 0);
        let buffers = (0..size).map(|index| {
            let (len, body) = kind(index);
            Buffer { address: memory.alloc(len as usize), len, body, word: 0 }
        });
        let buffers = buffers.collect();
        Self { base, buffers, next_fill: 0, generation: true, next_completion: 0 }
    }

    fn size(&self) -> u32 {
        self.buffers.len() as u32
    }

    fn desc(&self, index: u32) -> u64 {
        self.base + u64::from(index) * 16
    }

    /// Posts all buffers but one.
    fn fill(&mut self, memory: &Memory) {
        let size = self.size();
        while size > 0 && (self.next_fill + 1) % size != self.next_completion {
            let at = self.desc(self.next_fill);
            let buffer = &mut self.buffers[self.next_fill as usize];
            buffer.word = buffer.len | u32::from(buffer.body) << 14 | u32::from(self.generation) << 31;
            memory.store_u64(at, buffer.address);
            memory.store(at + 8, buffer.word);
            self.next_fill += 1;
            if self.next_fill == size {
                (self.next_fill, self.generation) = (0, !self.generation);
            }
        }
    }

    /// Asserts that the device has not written to the receive descriptors.
    fn assert_untouched(&self, memory: &Memory) {
        for (index, buffer) in (0..).zip(&self.buffers).filter(|(_, buffer)| buffer.word != 0) {
            let at = self.desc(index);
            let address = u64::from(memory.load(at)) | u64::from(memory.load(at + 4)) << 32;
            assert_eq!((address, memory.load(at + 8)), (buffer.address, buffer.word), "descriptor {index} has changed");
        }
    }
}

/// Driver side of a receive queue.
#[derive(Clone, Debug)]
pub struct DriverRxQueue {
    rings: [Ring; 2],
    layout: RxLayout,
    data: u64,
    completions: u64,
    completion_size: u32,
    next_completion: u32,
    completion_generation: bool,
    /// Number of the queue, and the number of all queues.
    number: u32,
    count: u32,
    /// Bus address of the queue descriptor.
    desc: u64,
    current: Option<RxPacket>,
}

impl DriverRxQueue {
    /// Allocates queue `number` of `count`, whose descriptor is at `desc`, and fills it.
    pub fn new(memory: &Memory, layout: RxLayout, number: u32, count: u32, desc: u64) -> Self {
        let head = |index: u32| index.is_multiple_of(layout.bodies + 1);
        let first =
            Ring::new(memory, layout.first, |i| if head(i) { (layout.head, false) } else { (layout.body, true) });
        let second = Ring::new(memory, layout.second, |_| (layout.body, true));
        let completion_size = layout.first + layout.second;
        let completions = memory.alloc(completion_size as usize * 16);
        memory.fill(completions, completion_size as usize * 16, 0);
        let data = memory.alloc((layout.first as usize * usize::from(layout.data_slot)).max(1));
        let mut queue = Self {
            rings: [first, second],
            layout,
            data,
            completions,
            completion_size,
            next_completion: 0,
            completion_generation: true,
            number,
            count,
            desc,
            current: None,
        };
        queue.rings.iter_mut().for_each(|ring| ring.fill(memory));
        queue
    }

    /// Returns the bus addresses of both rings, the completion ring and the data ring.
    pub const fn bases(&self) -> [u64; 4] {
        [self.rings[0].base, self.rings[1].base, self.completions, self.data]
    }

    /// Returns `true` if the device asks for doorbells.
    pub fn doorbell_wanted(&self, memory: &Memory) -> bool {
        memory.read(self.desc, 1)[0] != 0
    }

    /// Returns `true` if there are completions to consume.
    pub fn has_completions(&self, memory: &Memory) -> bool {
        let last = memory.load(self.completions + u64::from(self.next_completion) * 16 + 12);
        (last >> 31 == 1) == self.completion_generation
    }

    /// Receives packets, and returns their buffers to the device. Returns the packets, and the producer indices to
    /// write to the doorbells of both rings.
    pub fn poll(&mut self, memory: &Memory, most: usize) -> (Vec<RxPacket>, [Option<u32>; 2]) {
        let (mut packets, mut doorbells) = (Vec::new(), [None; 2]);
        while packets.len() < most {
            let at = self.completions + u64::from(self.next_completion) * 16;
            let last = memory.load(at + 12);
            if (last >> 31 == 1) != self.completion_generation {
                break;
            }
            let words = [memory.load(at), memory.load(at + 4), memory.load(at + 8), last];
            self.next_completion += 1;
            if self.next_completion == self.completion_size {
                (self.next_completion, self.completion_generation) = (0, !self.completion_generation);
            }
            let ring = self.take(memory, words, &mut packets);
            self.rings[ring].fill(memory);
            if self.doorbell_wanted(memory) {
                doorbells[ring] = Some(self.rings[ring].next_fill);
            }
        }
        self.rings.iter().for_each(|ring| ring.assert_untouched(memory));
        (packets, doorbells)
    }

    /// Consumes one completion. Returns the ring that it belongs to.
    fn take(&mut self, memory: &Memory, words: [u32; 4], packets: &mut Vec<RxPacket>) -> usize {
        let [head, hash, len_word, flags] = words;
        let (index, last, first) = (head & 0xfff, head >> 14 & 1 == 1, head >> 15 & 1 == 1);
        let id = head >> 16 & 0x3ff;
        let ids = [self.number, self.number + self.count, self.number + 2 * self.count];
        let which = ids.iter().position(|&it| it == id).expect("a completion of no ring of the queue");
        let in_data_ring = which == 2;
        let ring = which % 2;
        let buffer = *self.rings[ring].buffers.get(index as usize).expect("no such descriptor");
        assert_ne!(buffer.word, 0, "the device never had this buffer");
        let len = len_word & 0x3fff;
        assert_eq!(len_word >> 14 & 1, 0, "error");
        if first {
            assert!(!buffer.body && ring == 0, "the start of a packet is not in a HEAD buffer of ring 1");
            assert!(self.current.is_none(), "a packet has no end");
            self.current = Some(RxPacket::default());
        } else {
            assert!(buffer.body, "the continuation of a packet is not in a BODY buffer");
        }
        assert!(len != 0 || (first && last), "an empty completion");
        let (address, room) = if in_data_ring {
            assert!(first && last && self.layout.data_slot != 0);
            let slot = u64::from(self.layout.data_slot);
            (self.data + slot * u64::from(index), u32::from(self.layout.data_slot))
        } else {
            (buffer.address, buffer.len)
        };
        assert!(len <= room, "{len} bytes in a buffer of {room}");
        let packet = self.current.as_mut().expect("a packet has no start");
        packet.bytes.extend(memory.read(address, len as usize));
        packet.buffers += 1;
        assert!(packet.buffers <= 18, "more fragments than a socket buffer has");
        packet.in_data_ring |= in_data_ring;
        describe(packet, first, [head, hash, len_word, flags]);
        if last {
            packet.kind.assert_found(&packet.bytes);
            packets.extend(self.current.take());
        }
        // The device may have skipped descriptors.
        self.rings[ring].next_completion = index;
        ring
    }
}

/// Applies the fields of a completion to its packet.
fn describe(packet: &mut RxPacket, first: bool, [head, hash, len_word, flags]: [u32; 4]) {
    let bit = |at: u32| flags >> at & 1 == 1;
    let lro = flags >> 24 & 0x7f == 4;
    assert!(lro || flags >> 24 & 0x7f == 3, "a completion of an unknown type");
    if first && lro {
        packet.segments = Some(((hash & 0xff) as u8, (flags & 0xffff) as u16));
    } else {
        assert!(!lro && flags & 0xffff == 0, "the driver would trust the checksum field");
    }
    packet.hash = match head >> 26 & 0xf {
        0 => packet.hash,
        kind => Some((kind as u8, hash)),
    };
    packet.tag = (len_word >> 15 & 1 == 1).then_some((len_word >> 16) as u16);
    packet.kind = RxKind { ipv4: bit(21), ipv6: bit(20), tcp: bit(18), udp: bit(17) };
    packet.checksum_verified = false;
    let (transport, fragment) = (bit(17) || bit(18), bit(22));
    if head >> 30 & 1 == 0 {
        let right = (bit(21) && bit(16) && bit(19)) || (bit(20) && bit(16));
        assert!(!right || (transport && !fragment), "the kernel warns");
        packet.checksum_verified = right;
    }
}
