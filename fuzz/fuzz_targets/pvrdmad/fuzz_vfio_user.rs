//! A client that sends anything, with descriptors: to the parser of requests, and over a socket to a small function.
//!
//! All messages are in the socket before the server reads, so the server never waits. It never writes more than the
//! socket holds, so no reader is needed meanwhile.
#![no_main]

use std::cell::Cell;
use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arbitrary::{Arbitrary, Unstructured};
use libfuzzer_sys::fuzz_target;
use pvrdma_guest_memory::{DmaSpace, MemoryBudget, PinPolicy};
use pvrdma_pci_function::{Bar, Deferred, InterruptSink, Migratable, MsixPlace, PciFunction, StateError};
use pvrdma_vfio_user_server::{
    ConnectionStats, Endpoint, IrqTable, MigratableDevice,
    message::{Command, HEADER_SIZE, Header, MessageKind},
    request::Request,
};
use rustix::event::EventfdFlags;
use rustix::fs::MemfdFlags;
use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

/// Bytes that fit into a socket without a reader. Linux counts more than the payload.
const SOCKET_BUFFER: usize = 200 << 10;

/// Most messages of one input.
const MAX_MESSAGES: usize = 60;

const BARS: [u64; 3] = [0x4000, 0x1000, 0x10_0000];

/// Message of a client.
#[derive(Arbitrary, Debug)]
struct Message {
    command: Choice<u16>,
    flags: Choice<u32>,
    /// In place of the right one.
    size: Option<u32>,
    body: Body,
    /// Bytes that are changed.
    changes: Vec<(u8, u8)>,
    descriptors: u8,
}

#[derive(Arbitrary, Debug)]
enum Choice<T> {
    Good(u8),
    Any(T),
}

#[derive(Arbitrary, Debug)]
enum Body {
    Map {
        flags: u8,
        offset: u8,
        address: u8,
        size: u8,
    },
    Unmap {
        flags: u8,
        address: u8,
        size: u8,
    },
    Info {
        argsz: u8,
        index: u8,
    },
    Irqs {
        flags: u8,
        index: u8,
        start: u8,
        count: u8,
        data: Vec<u8>,
    },
    Access {
        offset: u32,
        region: u8,
        count: u16,
        data: Vec<u8>,
        matching: bool,
    },
    Multi(Vec<(u16, u8, u8, u64)>),
    Version(Vec<u8>),
    Any(Vec<u8>),
    Empty,
    /// A feature of a migration. The state is the first number.
    Feature {
        feature: u8,
        operation: u8,
        numbers: Vec<u8>,
    },
    /// A part of a saved state: to read, or to write.
    Data {
        reads: bool,
        size: u16,
        data: Vec<u8>,
    },
    Log {
        address: u8,
        size: u8,
        unit: u8,
        report: bool,
    },
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

impl Body {
    fn bytes(&self) -> Vec<u8> {
        let pages = |count: u8| (u64::from(count) << 12).to_le_bytes();
        match self {
            Self::Map { flags, offset, address, size } => {
                let rest = [pages(*offset), pages(*address), pages(*size)].concat();
                [words(&[32, u32::from(flags % 4)]), rest].concat()
            }
            Self::Unmap { flags, address, size } => {
                [words(&[24, u32::from(flags % 4)]), [pages(*address), pages(*size)].concat()].concat()
            }
            Self::Info { argsz, index } => words(&[u32::from(argsz % 40), 0, u32::from(index % 12), 0, 0, 0, 0, 0]),
            Self::Irqs { flags, index, start, count, data } => {
                let numbers = [20, u32::from(flags % 64), u32::from(index % 6), u32::from(start % 5)];
                [words(&numbers), words(&[u32::from(count % 5)]), data.clone()].concat()
            }
            Self::Access { offset, region, count, data, matching } => {
                let count = if *matching { data.len() as u32 } else { u32::from(*count) };
                let offset = if offset % 4 == 0 { u64::from(*offset) << 32 } else { u64::from(offset >> 12) };
                [offset.to_le_bytes().to_vec(), words(&[u32::from(region % 10), count]), data.clone()].concat()
            }
            Self::Multi(writes) => {
                let mut bytes = (writes.len() as u64).to_le_bytes().to_vec();
                for (offset, region, count, data) in writes {
                    bytes.extend(u64::from(*offset).to_le_bytes());
                    bytes.extend(words(&[u32::from(region % 10), u32::from(count % 10)]));
                    bytes.extend(data.to_le_bytes());
                }
                bytes
            }
            Self::Version(json) => [&[0; 4][..], br#"{"capabilities":{"max_msg_fds":"#, json, b"}}\0"].concat(),
            Self::Any(bytes) => bytes.clone(),
            Self::Empty => Vec::new(),
            Self::Feature { feature, operation, numbers } => {
                let flags = u32::from(feature % 11) | 1 << (16 + operation % 4);
                [words(&[4096, flags]), numbers.iter().flat_map(|&number| words(&[number.into()])).collect()].concat()
            }
            Self::Data { reads: true, size, .. } => words(&[u32::from(*size) + 8, u32::from(*size)]),
            Self::Data { data, .. } => [words(&[8, data.len() as u32]), data.clone()].concat(),
            Self::Log { address, size, unit, report: true } => {
                let unit = (1_u64 << (12 + unit % 3)).to_le_bytes();
                [words(&[4096, 1 << 16 | 8]), [pages(*address), pages(*size), unit].concat()].concat()
            }
            Self::Log { address, size, .. } => {
                let range = [pages(*address), pages(*size)].concat();
                [words(&[4096, 1 << 17 | 6, 0, 0, 1, 0]), range].concat()
            }
        }
    }

    fn command(&self) -> Command {
        match self {
            Self::Map { .. } => Command::DMA_MAP,
            Self::Unmap { .. } => Command::DMA_UNMAP,
            Self::Info { index, .. } if index % 3 == 0 => Command::DEVICE_GET_INFO,
            Self::Info { index, .. } if index % 3 == 1 => Command::DEVICE_GET_IRQ_INFO,
            Self::Info { .. } => Command::DEVICE_GET_REGION_INFO,
            Self::Irqs { .. } => Command::DEVICE_SET_IRQS,
            Self::Access { matching: true, .. } => Command::REGION_WRITE,
            Self::Access { .. } => Command::REGION_READ,
            Self::Multi(_) => Command::REGION_WRITE_MULTI,
            Self::Version(_) | Self::Any(_) => Command::VERSION,
            Self::Empty => Command::DEVICE_RESET,
            Self::Feature { .. } | Self::Log { .. } => Command::DEVICE_FEATURE,
            Self::Data { reads: true, .. } => Command::MIG_DATA_READ,
            Self::Data { .. } => Command::MIG_DATA_WRITE,
        }
    }
}

impl Message {
    fn bytes(&self, id: u16) -> Vec<u8> {
        let mut body = self.body.bytes();
        for (at, value) in self.changes.iter().take(3) {
            if let Some(byte) = body.get_mut(usize::from(*at)) {
                *byte = *value;
            }
        }
        let command = match self.command {
            Choice::Good(_) => self.body.command(),
            Choice::Any(number) => Command(if number & 1 == 0 { number >> 1 & 31 } else { number }),
        };
        let flags = match self.flags {
            Choice::Good(choice) => [0, 0, 0, Header::NO_REPLY][usize::from(choice % 4)],
            Choice::Any(flags) => flags,
        };
        let size = self.size.filter(|size| size % 8 == 0).unwrap_or((HEADER_SIZE + body.len()) as u32);
        [&Header { id, command, size, flags, error: 0 }.to_bytes()[..], &body].concat()
    }
}

/// A sequence of messages, as long as the input has bytes.
#[derive(Debug)]
struct Messages(Vec<Message>);

impl<'a> Arbitrary<'a> for Messages {
    fn arbitrary(input: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        let mut messages = Vec::new();
        while !input.is_empty() && messages.len() < MAX_MESSAGES {
            messages.push(input.arbitrary()?);
        }
        Ok(Self(messages))
    }
}

/// A function that checks the guarantees of the server: accesses are inside its regions, none to a BAR comes in a
/// pause, only a paused function is saved, and at the end it is reset and runs.
struct Function {
    reset: AtomicBool,
    paused: AtomicBool,
    irqs: Arc<IrqTable>,
}

impl Migratable for Function {
    fn pause(&self) {
        self.paused.store(true, Ordering::Relaxed);
    }

    fn save(&self, to: &mut dyn Write) -> Result<(), StateError> {
        assert!(self.paused.load(Ordering::Relaxed));
        Ok(to.write_all(&[7; 300])?)
    }

    fn restore(&self, from: &mut dyn Read) -> Result<(), StateError> {
        self.paused.store(false, Ordering::Relaxed);
        let mut state = [0; 3];
        from.read_exact(&mut state)?;
        if state[0] & 1 == 0 {
            return Err("refused".into());
        }
        self.paused.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn resume(&self) -> Result<(), StateError> {
        self.paused.store(false, Ordering::Relaxed);
        Ok(())
    }
}

impl PciFunction for Function {
    fn bars(&self) -> [Option<Bar>; 6] {
        let [a, b, c] = BARS.map(|size| Some(Bar { size, is_64bit: false }));
        [a, b, c, None, None, None]
    }

    fn config_size(&self) -> usize {
        256
    }

    fn config_read(&self, offset: usize, data: &mut [u8]) {
        assert!(!data.is_empty() && offset + data.len() <= 256);
        data.fill(0x11);
    }

    fn config_write(&self, offset: usize, data: &[u8]) {
        self.reset.store(false, Ordering::Relaxed);
        assert!(!data.is_empty() && offset + data.len() <= 256);
    }

    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]) {
        assert!(!data.is_empty() && offset + data.len() as u64 <= BARS[bar]);
        assert!(!self.paused.load(Ordering::Relaxed));
        data.fill(0x22);
    }

    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]) -> Deferred {
        self.reset.store(false, Ordering::Relaxed);
        assert!(!data.is_empty() && offset + data.len() as u64 <= BARS[bar]);
        assert!(!self.paused.load(Ordering::Relaxed));
        self.irqs.msix(u16::from(data[0] % 4));
        self.irqs.intx(data[0] & 4 != 0);
        Deferred::Pending
    }

    fn run_deferred(&self) {}

    fn msix(&self) -> Option<MsixPlace> {
        Some(MsixPlace { capability: 0x40, vectors: 3, bar: 0, table: 0, pending: 0x2000 })
    }

    fn reset(&self) {
        self.reset.store(true, Ordering::Relaxed);
    }
}

/// Sends bytes with descriptors. Returns `false` if the socket is full.
fn send(stream: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> bool {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::sendmsg(stream, &[IoSlice::new(bytes)], &mut control, flags).is_ok_and(|sent| sent == bytes.len())
}

/// Returns the headers of messages that must be answered: those that reach the server completely, up to one whose end
/// is unknown.
fn expected(bytes: &[u8]) -> Vec<Header> {
    let (mut rest, mut expected) = (bytes, Vec::new());
    while let Some((header, body)) = rest.split_first_chunk::<HEADER_SIZE>() {
        let header = Header::parse(header);
        let answered = matches!(header.kind(), MessageKind::Request | MessageKind::Invalid);
        let size = header.body_size();
        let cut_off = size.is_ok_and(|size| size > body.len());
        if answered && !cut_off {
            expected.push(header);
        }
        match size.ok().and_then(|size| body.get(size..)) {
            Some(next) => rest = next,
            None => break,
        }
    }
    expected
}

/// Replies, as many as came whole.
fn replies(bytes: &[u8]) -> Vec<Header> {
    let (mut rest, mut replies) = (bytes, Vec::new());
    while let Some(header) = rest.first_chunk::<HEADER_SIZE>() {
        let header = Header::parse(header);
        assert!(matches!(header.flags, Header::REPLY) || header.flags == Header::REPLY | Header::ERROR, "{header:?}");
        assert_eq!(header.error != 0, header.flags & Header::ERROR != 0, "{header:?}");
        let Some(next) = rest.get(header.size as usize..) else { break };
        replies.push(header);
        rest = next;
    }
    replies
}

fuzz_target!(|input: (bool, Messages)| {
    let (negotiate, Messages(messages)) = input;
    let hello = Message {
        command: Choice::Good(0),
        flags: Choice::Good(0),
        size: None,
        body: Body::Version(b"16".to_vec()),
        changes: Vec::new(),
        descriptors: 0,
    };

    let (server, mut client) = UnixStream::pair().unwrap();
    for stream in [&server, &client] {
        set_socket_send_buffer_size(stream, SOCKET_BUFFER).unwrap();
        set_socket_recv_buffer_size(stream, SOCKET_BUFFER).unwrap();
    }
    let file = File::from(rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(16 << 12).unwrap();
    let event: OwnedFd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let (pipe, _writer) = std::io::pipe().unwrap();

    let mut sent = Vec::new();
    let mut ids = 1_u16..;
    let fits = Cell::new(true);
    for message in negotiate.then_some(&hello).into_iter().chain(&messages) {
        let bytes = message.bytes(ids.next().unwrap_or_default());
        if let Some(body) = bytes.get(HEADER_SIZE..) {
            let command = Header::parse(bytes.first_chunk().unwrap()).command;
            if let Ok(Request::RegionWriteMulti(multi)) = Request::parse(command, body) {
                assert!(multi.writes().all(|(access, data)| access.count as usize == data.len()));
            }
        }
        let one = match message.descriptors >> 5 & 3 {
            0 => file.as_fd(),
            1 => event.as_fd(),
            2 => pipe.as_fd(),
            _ => client.as_fd(),
        };
        let count = usize::from(message.descriptors & 31);
        let descriptors = vec![one; if count < 8 { count } else { count.saturating_sub(12) }];
        if !send(&client, &bytes, &descriptors) {
            fits.set(false);
            break;
        }
        sent.extend(bytes);
    }
    client.shutdown(Shutdown::Write).unwrap();
    // A reply that does not fit into the socket ends the connection.
    server.set_nonblocking(true).unwrap();

    let irqs = Arc::new(IrqTable::default());
    let function =
        Arc::new(Function { reset: AtomicBool::new(false), paused: AtomicBool::new(false), irqs: Arc::clone(&irqs) });
    let memory = DmaSpace::new(PinPolicy::Off);
    let (stats, budget) = (Arc::new(ConnectionStats::default()), MemoryBudget::new(1 << 20));
    let endpoint = Endpoint::new("fuzz", function.clone(), Arc::clone(&memory), irqs)
        .with_stats(Arc::clone(&stats))
        .with_migration(Some(MigratableDevice::new(function.clone(), Arc::clone(&budget))))
        .with_intx(messages.len() % 2 == 0);
    endpoint.serve(&server);

    assert!(function.reset.load(Ordering::Relaxed), "left without a reset");
    assert!(!function.paused.load(Ordering::Relaxed), "left paused");
    assert_eq!((memory.mapped_bytes(), memory.has_dirty_log(), budget.used()), (0, false, 0));
    drop(server);
    let mut bytes = Vec::new();
    // Fails if the server has not received all descriptors.
    let _ = client.read_to_end(&mut bytes);
    let expected = expected(&sent);
    let replies = replies(&bytes);
    assert!(replies.len() <= expected.len());
    for (reply, request) in replies.iter().zip(&expected) {
        assert_eq!((reply.id, reply.command), (request.id, request.command));
    }
    // All of them, unless there was no room for one.
    if bytes.len() < SOCKET_BUFFER / 4 && fits.get() {
        assert_eq!(replies.len(), expected.len(), "{expected:?}");
    }
});
