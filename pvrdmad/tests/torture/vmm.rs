//! A hostile VMM: clients of a device's socket that say anything, with memory, interrupts and a guest that is as bad.

use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;

use pvrdma_dev::testing::{MEMORY_BASE, Request, command_id as id, register};
use pvrdma_dev::{ObjectCounts, PvrdmaDevice};
use pvrdma_guest_memory::{DmaSpace, PinPolicy};
use pvrdma_rxe::Rxe;
use pvrdmad::vfio_user::message::{Command, HEADER_SIZE, Header};
use pvrdmad::vfio_user::{ConnectionStats, Endpoint, FileRules, IrqTable, REPLY_DEADLINE};
use rustix::event::EventfdFlags;
use rustix::fs::MemfdFlags;
use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use vm_memory::mmap::MmapRegion;
use vm_memory::{Bytes, FileOffset};

use crate::network::{Network, VMM};
use pvrdmad::testing::Dice;

const PAGE: u64 = 4096;
/// Pages of its guest: the shared region, two slots, two rings with their directories, and more.
const PAGES: u64 = 64;
/// Bytes that a socket takes without a reader. Linux counts more than the payload.
const SOCKET_BUFFER: usize = 200 << 10;
const BUS: u64 = MEMORY_BASE;

pub(crate) struct Vmm {
    endpoint: Endpoint,
    device: Arc<PvrdmaDevice<Rxe>>,
    /// It takes memory away while it is used, which needs a thread.
    truncates: bool,
    dice: Dice,
}

/// A client, and what it has.
struct Client<'a> {
    stream: &'a UnixStream,
    dice: &'a mut Dice,
    file: &'a File,
    event: &'a OwnedFd,
}

impl Vmm {
    pub(crate) fn new(network: &Network, seed: u64, truncates: bool) -> Self {
        let (irqs, memory) = (Arc::new(IrqTable::default()), DmaSpace::new(PinPolicy::Off));
        let config = Network::config(VMM, seed);
        let device = PvrdmaDevice::new(config, Arc::clone(&memory), Arc::clone(&irqs) as _, network.rxe(VMM)).unwrap();
        let endpoint = Endpoint {
            name: "hostile".to_owned(),
            function: Arc::clone(&device) as _,
            memory,
            files: FileRules::default(),
            irqs,
            stats: Arc::new(ConnectionStats::default()),
            mappable: None,
            intx: false,
            reply_deadline: REPLY_DEADLINE,
        };
        Self { endpoint, device, truncates, dice: Dice::new(seed, 4) }
    }

    /// A client from its first message to its last.
    pub(crate) fn step(&mut self) {
        let (server, client) = UnixStream::pair().unwrap();
        for stream in [&server, &client] {
            set_socket_send_buffer_size(stream, SOCKET_BUFFER).unwrap();
            set_socket_recv_buffer_size(stream, SOCKET_BUFFER).unwrap();
        }
        let file = File::from(rustix::fs::memfd_create("hostile", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(PAGES * PAGE).unwrap();
        // One that blocks, at times.
        let flags = if self.dice.one_in(2) { EventfdFlags::NONBLOCK } else { EventfdFlags::empty() };
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | flags).unwrap();
        Client { stream: &client, dice: &mut self.dice, file: &file, event: &event }.talk();
        // A reply that finds no room ends the connection.
        server.set_nonblocking(true).unwrap();
        let truncate = self.truncates && self.dice.one_in(3);
        thread::scope(|scope| {
            if truncate {
                scope.spawn(|| file.set_len(0).unwrap());
            }
            self.endpoint.serve(&server);
        });
        let status = self.device.status();
        assert_eq!((status.objects, status.kept.used_bytes), (ObjectCounts::default(), 0));
        assert_eq!(self.endpoint.memory.mapped_bytes(), 0);
    }
}

impl Client<'_> {
    /// All messages are in the socket before the server looks.
    fn talk(&mut self) {
        if !self.dice.one_in(16) {
            self.send(Command::VERSION, b"\0\0\0\0{\"capabilities\":{\"max_msg_fds\":16}}\0", &[]);
        }
        if !self.dice.one_in(4) {
            self.bring_up();
        }
        for _ in 0..self.dice.below(40) {
            self.say();
        }
        self.stream.shutdown(Shutdown::Write).unwrap();
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
        // What does not fit is not said.
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

    /// What a VMM and a driver do, so that there is something to attack.
    fn bring_up(&mut self) {
        let offset = FileOffset::new(self.file.try_clone().unwrap(), 0);
        let memory = MmapRegion::<()>::from_file(offset, (PAGES * PAGE) as usize).unwrap();
        let page = |number: u64| BUS + number * PAGE;
        let store = |at: u64, value: u64| {
            use vm_memory::VolatileMemory as _;
            memory.as_volatile_slice().write_obj(value, (at - BUS) as usize).unwrap();
        };
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
        let shared = self.file.try_clone().unwrap();
        let map = [words(&[32, 3]), longs(&[0, BUS, PAGES * PAGE])].concat();
        self.send(Command::DMA_MAP, &map, &[shared.as_fd()]);
        let event = self.event.try_clone().unwrap();
        self.send(Command::DEVICE_SET_IRQS, &words(&[20, 0x24, 2, 0, 3]), &[event.as_fd(); 3]);
        // BAR 2 where the region says, memory and bus mastering on.
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

    /// A message: one that makes sense in part, or none.
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

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_le_bytes()).collect()
}
