//! Driver side of a transmit queue.

use std::collections::VecDeque;

use super::Memory;

/// Offload requested from the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TxOffload {
    /// No offload.
    #[default]
    None,
    /// Store the sum from `start` at `at`.
    Checksum {
        /// Offset of the first byte that is summed.
        start: u16,
        /// Offset of the checksum.
        at: u16,
    },
    /// Segment the packet.
    Segment {
        /// Number of header bytes.
        header: u16,
        /// Number of data bytes per segment.
        mss: u16,
    },
}

/// A packet to send.
#[derive(Clone, Debug, Default)]
pub struct TxPacket {
    /// Bytes of the packet, one descriptor per part.
    pub parts: Vec<Vec<u8>>,
    /// Offload requested from the device.
    pub offload: TxOffload,
    /// VLAN tag to insert.
    pub tag: Option<u16>,
}

impl TxPacket {
    /// Creates a packet in one piece without an offload.
    pub fn plain(bytes: &[u8]) -> Self {
        Self { parts: vec![bytes.to_vec()], ..Self::default() }
    }

    /// Creates a packet in pieces of `len` bytes.
    pub fn in_parts(bytes: &[u8], len: usize, offload: TxOffload) -> Self {
        Self { parts: bytes.chunks(len).map(<[u8]>::to_vec).collect(), offload, tag: None }
    }
}

/// Driver side of a transmit queue.
#[derive(Clone, Debug)]
pub struct DriverTxQueue {
    /// Bus address of the ring.
    pub ring: u64,
    /// Number of descriptors in the ring.
    pub size: u32,
    /// Bus address of the completion ring.
    pub completions: u64,
    /// Bus address of the packet buffers.
    buffers: u64,
    next_fill: u32,
    generation: bool,
    next_completion: u32,
    completion_generation: bool,
    /// For each packet in the ring: the index of its last descriptor, and the number of its descriptors.
    outstanding: VecDeque<(u32, u32)>,
    free: u32,
}

/// Size of a transmit buffer, in bytes.
const BUFFER: u64 = 16_384;

impl DriverTxQueue {
    /// Allocates rings of `size` descriptors.
    pub fn new(memory: &Memory, size: u32) -> Self {
        let rings = [memory.alloc(size as usize * 16), memory.alloc(size as usize * 16)];
        for ring in rings {
            memory.fill(ring, size as usize * 16, 0);
        }
        Self {
            ring: rings[0],
            size,
            completions: rings[1],
            buffers: memory.alloc(size as usize * BUFFER as usize),
            next_fill: 0,
            generation: true,
            next_completion: 0,
            completion_generation: true,
            outstanding: VecDeque::new(),
            // One descriptor stays free, as in the kernel.
            free: size - 1,
        }
    }

    /// Returns the number of free descriptors.
    pub const fn free(&self) -> u32 {
        self.free
    }

    /// Returns the index of the next descriptor.
    pub const fn next_fill(&self) -> u32 {
        self.next_fill
    }

    /// Returns the bus address of a descriptor.
    pub fn desc(&self, index: u32) -> u64 {
        self.ring + u64::from(index) * 16
    }

    /// Puts a packet into the ring. The generation of its first descriptor is written last.
    pub fn post(&mut self, memory: &Memory, packet: &TxPacket) {
        let first = self.next_fill;
        let first_generation = self.generation;
        let count = packet.parts.len() as u32;
        assert!(count <= self.free, "the ring is full");
        for (number, part) in packet.parts.iter().enumerate() {
            let index = self.next_fill;
            let address = self.buffers + u64::from(index) * BUFFER;
            memory.write(address, part);
            let last = number + 1 == packet.parts.len();
            let generation = if number == 0 { !self.generation } else { self.generation };
            let mut words = [part.len() as u32 & 0x3fff | u32::from(generation) << 14, 0];
            if number == 0 {
                describe(&mut words, packet);
            }
            words[1] |= if last { 1 << 12 | 1 << 13 } else { 0 };
            memory.store_u64(self.desc(index), address);
            memory.store(self.desc(index) + 12, words[1]);
            memory.store(self.desc(index) + 8, words[0]);
            self.advance();
            if last {
                self.outstanding.push_back((index, count));
            }
        }
        self.free -= count;
        let word = memory.load(self.desc(first) + 8) & !(1 << 14) | u32::from(first_generation) << 14;
        memory.store(self.desc(first) + 8, word);
    }

    fn advance(&mut self) {
        self.next_fill += 1;
        if self.next_fill == self.size {
            (self.next_fill, self.generation) = (0, !self.generation);
        }
    }

    /// Returns `true` if there are completions to consume.
    pub fn has_completions(&self, memory: &Memory) -> bool {
        let last = memory.load(self.completions + u64::from(self.next_completion) * 16 + 12);
        (last >> 31 == 1) == self.completion_generation
    }

    /// Consumes completions. The kernel panics unless each names the last descriptor of the oldest packet.
    pub fn reap(&mut self, memory: &Memory) -> usize {
        let mut count = 0;
        loop {
            let at = self.completions + u64::from(self.next_completion) * 16;
            let last = memory.load(at + 12);
            if (last >> 31 == 1) != self.completion_generation {
                return count;
            }
            let (expected, descriptors) = self.outstanding.pop_front().expect("a completion for nothing");
            assert_eq!((memory.load(at) & 0xfff, last >> 24 & 0x7f), (expected, 0), "not the end of the oldest packet");
            self.free += descriptors;
            self.next_completion += 1;
            if self.next_completion == self.size {
                (self.next_completion, self.completion_generation) = (0, !self.completion_generation);
            }
            count += 1;
        }
    }
}

fn describe(words: &mut [u32; 2], packet: &TxPacket) {
    let (mode, hlen, value) = match packet.offload {
        TxOffload::None => (0, 0, 0),
        TxOffload::Checksum { start, at } => (2, start, at),
        TxOffload::Segment { header, mss } => (3, header, mss),
    };
    words[0] |= u32::from(value) << 18;
    words[1] |= u32::from(hlen) | mode << 10;
    if let Some(tag) = packet.tag {
        words[1] |= 1 << 15 | u32::from(tag) << 16;
    }
}
