//! Messages of a hostile VMM: random ones around a valid beginning, with hostile guest memory.
#![expect(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "for tests: a panic fails the test")]

use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use pvrdma_dev::testing::{MEMORY_BASE, Request, command_id as id, register};
use pvrdma_packet::MacAddr;
use pvrdma_vfio_user_server::message::{Command, HEADER_SIZE, Header};
use rustix::event::EventfdFlags;
use rustix::fs::MemfdFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use vm_memory::mmap::MmapRegion;
use vm_memory::{Bytes, FileOffset, VolatileMemory};

use super::Dice;

const PAGE: u64 = 4096;
/// Number of guest pages: the shared region, two slots, two rings with their directories, and more.
const PAGES: u64 = 64;
const BUS: u64 = MEMORY_BASE;

/// Function behind a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behind {
    /// The RDMA adapter.
    Rdma,
    /// The network function with this MAC address. The addresses of its victims differ in the last byte.
    Network(MacAddr),
}

/// A client that sends arbitrary messages, with its memory, and one event for all its interrupts.
#[derive(Debug)]
pub struct HostileClient {
    file: File,
    event: OwnedFd,
}

/// A conversation of the client with a server.
struct Talk<'a> {
    stream: &'a UnixStream,
    dice: &'a mut Dice,
    file: &'a File,
    event: &'a OwnedFd,
}

impl HostileClient {
    /// Creates a client with fresh memory.
    pub fn new(dice: &mut Dice) -> Self {
        let file = File::from(rustix::fs::memfd_create("hostile", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(PAGES * PAGE).unwrap();
        // Sometimes an event whose writes block.
        let flags = if dice.one_in(2) { EventfdFlags::NONBLOCK } else { EventfdFlags::empty() };
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | flags).unwrap();
        Self { file, event }
    }

    /// Sends messages until the conversation ends or the socket is full.
    pub fn talk(&self, stream: &UnixStream, dice: &mut Dice, behind: Behind) {
        Talk { stream, dice, file: &self.file, event: &self.event }.talk(behind);
    }

    /// Truncates the memory, which may be in use.
    pub fn truncate(&self) {
        self.file.set_len(0).unwrap();
    }
}

impl Talk<'_> {
    fn talk(&mut self, behind: Behind) {
        if !self.dice.one_in(16) {
            self.send(Command::VERSION, b"\0\0\0\0{\"capabilities\":{\"max_msg_fds\":16}}\0", &[]);
        }
        if !self.dice.one_in(4) {
            match behind {
                Behind::Rdma => self.bring_up(),
                Behind::Network(mac) => self.bring_up_network(mac),
            }
        }
        for _ in 0..self.dice.below(40) {
            self.say();
        }
        // The server may disconnect a client that did not read a reply in time.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    fn send(&mut self, command: Command, body: &[u8], descriptors: &[BorrowedFd<'_>]) {
        let size = u32::try_from(HEADER_SIZE + body.len()).unwrap();
        let header = Header { id: 1, command, size, flags: 0, error: 0 };
        self.send_raw(header, body, descriptors);
    }

    fn send_raw(&mut self, header: Header, body: &[u8], descriptors: &[BorrowedFd<'_>]) {
        let bytes = [&header.to_bytes()[..], body].concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        // A message that does not fit into the socket is not sent.
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = rustix::net::sendmsg(self.stream, &[IoSlice::new(&bytes)], &mut control, flags);
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) {
        let head = [&offset.to_le_bytes()[..], &words(&[region, data.len() as u32])].concat();
        self.send(Command::REGION_WRITE, &[&head[..], data].concat(), &[]);
    }

    fn register(&mut self, at: u64, value: u32) {
        self.write(1, at, &value.to_le_bytes());
    }

    fn memory(&self) -> MmapRegion {
        let offset = FileOffset::new(self.file.try_clone().unwrap(), 0);
        MmapRegion::from_file(offset, (PAGES * PAGE) as usize).unwrap()
    }

    /// Maps memory and sets interrupts, as a VMM does.
    fn connect(&mut self) {
        let (file, event) = (self.file.as_fd(), self.event.as_fd());
        let map = [words(&[32, 3]), longs(&[0, BUS, PAGES * PAGE])].concat();
        self.send(Command::DMA_MAP, &map, &[file]);
        self.send(Command::DEVICE_SET_IRQS, &words(&[20, 0x24, 2, 0, 3]), &[event; 3]);
    }

    /// Brings the network function up like a VMM and a driver, with frames for all guests in the transmit ring and with
    /// receive buffers.
    fn bring_up_network(&mut self, mac: MacAddr) {
        let memory = self.memory();
        let store = |at: u64, bytes: &[u8]| {
            memory.as_volatile_slice().write_slice(bytes, (at - BUS) as usize).unwrap();
        };
        // The shared area, and the descriptors of a queue in each direction: rings of 32 entries on separate pages.
        let shared = [(0, 0xbabe_fee1), (24, 5), (40, page(1)), (52, 512 | 1500 << 32), (120, 7)];
        shared.iter().for_each(|&(at, value)| store(page(0) + at, &value.to_le_bytes()));
        store(page(0) + 62, &[1, 1]);
        store(page(0) + 80, &[0, 2, 1]);
        for (at, value) in [(16, page(2)), (32, page(3)), (56, 32), (64, 32)] {
            store(page(1) + at, &value.to_le_bytes());
        }
        let receive = [(16, page(4)), (24, page(5)), (32, page(6)), (48, page(7)), (56, 32 | 32 << 32), (64, 64)];
        receive.iter().for_each(|&(at, value)| store(page(1) + 256 + at, &value.to_le_bytes()));
        for at in 0..32 {
            let victim = self.dice.byte() % 8;
            let [a, b, c, d, e, _] = mac.0;
            let to = self.dice.pick(&[[0xff; 6], [a, b, c, d, e, victim]]);
            // A frame with the source address of another device is dropped.
            let from = if self.dice.one_in(8) { [a, b, c, d, e, victim] } else { mac.0 };
            let kind = self.dice.pick(&[[0x08, 0], [0x86, 0xdd], [0x89, 0x15], [0x88, 0xcc]]);
            let len = 14 + self.dice.below(1400);
            let payload = self.dice.bytes(len - 14);
            store(page(16 + at), &[&to[..], &from, &kind, &payload].concat());
            // A complete frame, and a receive buffer of a page.
            store(page(2) + 16 * at, &[page(16 + at), (len | 1 << 14) as u64 | 3 << 44].map(u64::to_le_bytes).concat());
            store(page(4) + 16 * at, &[page(16 + at), 2048 | 1 << 31].map(u64::to_le_bytes).concat());
        }
        // Overwrites random words of it.
        if self.dice.one_in(2) {
            for _ in 0..self.dice.below(8) {
                let at = page(self.dice.below(8) as u64) + 8 * self.dice.below(64) as u64;
                let number = self.dice.number();
                store(at, &[number, self.dice.number()].map(u32::to_le_bytes).concat());
            }
        }
        self.connect();
        self.write(7, 0x42, &[0, 0x80]);
        self.write(7, 4, &[6, 0]);
        for (at, value) in [(0, 4), (8, 1), (0x10, BUS as u32), (0x18, 0), (0x20, 0xcafe_0000), (0x20, 0xcafe_0003)] {
            self.register(at, value);
        }
        for (at, value) in [(0x800, 31), (0xa00, 31), (0x600, 1 + self.dice.word() % 31)] {
            self.write(0, at, &value.to_le_bytes());
        }
    }

    /// Brings the device up like a VMM and a driver, so that there are objects to attack.
    fn bring_up(&mut self) {
        let memory = self.memory();
        let store = |at: u64, value: u64| memory.as_volatile_slice().write_obj(value, (at - BUS) as usize).unwrap();
        // The shared region, two slots, and rings of two pages each.
        let pfn = 0x80_0000_0000_u64 >> 12;
        for (at, value) in [(0, 20), (8, 0x46), (16, page(1)), (24, page(2)), (32, 2), (48, 2), (64, pfn)] {
            store(page(0) + at, value);
        }
        for (at, directory) in [(40, 3), (56, 5)] {
            store(page(0) + at, page(directory));
            store(page(directory), page(directory + 1));
            store(page(directory + 1), page(20 + directory));
            store(page(directory + 1) + 8, page(21 + directory));
        }
        self.connect();
        // Places BAR 2 at the address in the shared region, and enables memory accesses and bus mastering.
        self.write(7, 0x18, &longs(&[0x80_0000_0000 | 4]));
        self.write(7, 4, &[6, 0]);
        for (at, value) in [(register::DSRLOW, BUS as u32), (register::DSRHIGH, 0), (register::IMR, 0)] {
            self.register(at, value);
        }
        self.register(register::CTL, 0);
        let command = self.dice.pick(&[id::QUERY_PORT, id::CREATE_PD, id::CREATE_UC]);
        let request = Request::new(command).u64(16, if command == id::CREATE_UC { pfn + 1 } else { 0 });
        let request = if command == id::QUERY_PORT { request.u8(16, 1) } else { request };
        for (at, chunk) in (0_u64..).step_by(8).zip(request.bytes().chunks_exact(8)) {
            store(page(1) + at, u64::from_le_bytes(chunk.try_into().unwrap()));
        }
        self.register(register::REQUEST, 0);
    }

    /// Sends a message: a partly valid one, or random bytes.
    fn say(&mut self) {
        let dice = &mut *self.dice;
        let page = |dice: &mut Dice| u64::from(dice.number()) * PAGE;
        let (command, body) = match dice.below(9) {
            0 => {
                let range = longs(&[page(dice), BUS + page(dice), page(dice)]);
                (Command::DMA_MAP, [words(&[32, dice.number() & 3]), range].concat())
            }
            1 => {
                let (address, size) = if dice.one_in(2) { (BUS, PAGES * PAGE) } else { (page(dice), page(dice)) };
                (Command::DMA_UNMAP, [words(&[24, dice.number() & 3]), longs(&[address, size])].concat())
            }
            2 => {
                let numbers = [20, dice.number() & 63, dice.number() % 6, dice.number() % 5, dice.number() % 5];
                (Command::DEVICE_SET_IRQS, words(&numbers))
            }
            3 => {
                let offset = u64::from(dice.number());
                (Command::REGION_READ, [longs(&[offset]), words(&[dice.number() % 10, dice.number()])].concat())
            }
            4 | 5 => {
                let (region, count) = (dice.pick(&[1, 1, 2, 7, 0]), dice.pick(&[1_usize, 2, 4, 4, 4, 8]));
                let offset = 4 * dice.below(16) as u64 + PAGE * dice.below(3) as u64;
                let head = [longs(&[offset]), words(&[region, count as u32])].concat();
                (Command::REGION_WRITE, [head, dice.bytes(count)].concat())
            }
            6 => {
                let mut body = longs(&[3]);
                for _ in 0..3 {
                    let offset = 4 * dice.below(16) as u64;
                    body.extend(longs(&[offset]));
                    body.extend(words(&[dice.number() % 8, 4, dice.number(), 0]));
                }
                (Command::REGION_WRITE_MULTI, body)
            }
            7 => (Command::DEVICE_RESET, Vec::new()),
            _ => {
                let len = dice.below(100);
                (Command((dice.word() % 20) as u16), dice.bytes(len))
            }
        };
        let mut header =
            Header { id: 2, command, size: u32::try_from(HEADER_SIZE + body.len()).unwrap(), flags: 0, error: 0 };
        match dice.below(24) {
            0 => header.size = dice.number(),
            1 => header.flags = dice.number(),
            2..6 => header.flags = Header::NO_REPLY,
            _ => {}
        }
        let (file, event) = (self.file.try_clone().unwrap(), self.event.try_clone().unwrap());
        let one = if self.dice.one_in(2) { file.as_fd() } else { event.as_fd() };
        let count = match command {
            Command::DMA_MAP | Command::DEVICE_SET_IRQS => 1 + self.dice.below(3),
            _ if self.dice.one_in(16) => self.dice.below(20),
            _ => 0,
        };
        self.send_raw(header, &body, &vec![one; count]);
    }
}

/// Bus address of a page of the guest.
const fn page(number: u64) -> u64 {
    BUS + number * PAGE
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_le_bytes()).collect()
}
