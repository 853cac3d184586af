// Long: a function, its server and a client for all tests, which use each other.
//! A PCI function that records its accesses, and a client that sends and receives raw messages.
#![allow(
    clippy::allow_attributes,
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic,
    reason = "each test uses a part"
)]

pub mod churn;
pub mod daemon;
pub mod endless_close;
pub mod frozen;
pub mod migratable;
pub mod moving_vm;
pub mod patient;
pub mod place;
pub mod process;
pub mod remote;
pub mod traffic;

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pvrdma_guest_memory::{DmaSpace, MemoryBudget, PinPolicy};
use pvrdma_link::ManualClock;
use pvrdma_pci_function::{Bar, Deferred, InterruptSink, MsixPlace, Outline, PciFunction, StateError};
use pvrdma_vfio_user_server::{
    AdoptError, AdoptedClient, ClientConnection, ConnectionStats, Endpoint, FileRules, IrqTable, MigratableDevice,
    REPLY_DEADLINE, Recovery, Server,
    keeper::client::Keeper,
    message::{Command, HEADER_SIZE, Header},
};
use rustix::fs::MemfdFlags;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use tempfile::TempDir;

/// Longer than any step takes; a test that waits for this long has failed.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Register whose write panics.
pub const PANIC: u64 = 0x90;

/// Register whose write never returns.
pub const BLOCK: u64 = 0xa0;

/// Register whose write raises the MSI-X vector of this number.
pub const RAISE: u64 = 0x80;

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    Reset,
    Write(usize, u64, Vec<u8>),
    Config(usize, Vec<u8>),
    Deferred,
    Pause,
    Save,
    Restore(Vec<u8>),
    Resume,
}

pub struct TestFunction {
    config: Mutex<Vec<u8>>,
    registers: Mutex<Vec<u8>>,
    events: Mutex<Vec<Event>>,
    changed: Condvar,
    irqs: Arc<IrqTable>,
    /// See [`migratable`].
    pub paused: Mutex<migratable::Paused>,
}

const BARS: [u32; 3] = [0x4000, 0x1000, 0x10_0000];

impl TestFunction {
    fn new(irqs: Arc<IrqTable>) -> Self {
        let mut config = vec![0; 256];
        config[..4].copy_from_slice(&[0xad, 0x15, 0x20, 0x08]);
        config[6] = 0x10;
        config[0x34] = 0x40;
        // MSI-X, last in the list, three vectors, table at 0 and pending bits at 0x2000 of BAR 0.
        config[0x40..0x4c].copy_from_slice(&[0x11, 0, 2, 0, 0, 0, 0, 0, 0, 0x20, 0, 0]);
        Self {
            config: Mutex::new(config),
            registers: Mutex::new(vec![0; 0x1000]),
            events: Mutex::default(),
            changed: Condvar::new(),
            irqs,
            paused: Mutex::default(),
        }
    }

    fn note(&self, event: Event) {
        self.events.lock().unwrap().push(event);
        self.changed.notify_all();
    }

    /// Waits until the recorded events satisfy `done`, and takes them.
    pub fn wait(&self, done: impl Fn(&[Event]) -> bool) -> Vec<Event> {
        std::mem::take(&mut *self.wait_for(done))
    }

    /// Waits until the recorded events satisfy `done`.
    pub fn wait_for(&self, done: impl Fn(&[Event]) -> bool) -> MutexGuard<'_, Vec<Event>> {
        let events = self.events.lock().unwrap();
        let (events, result) = self.changed.wait_timeout_while(events, PATIENCE, |events| !done(events)).unwrap();
        assert!(!result.timed_out(), "only {events:?}");
        events
    }

    pub fn wait_reset(&self) -> Vec<Event> {
        self.wait(|events| events.contains(&Event::Reset))
    }
}

impl PciFunction for TestFunction {
    fn bars(&self) -> [Option<Bar>; 6] {
        let bar = |index: usize| Some(Bar { size: u64::from(BARS[index]), is_64bit: false });
        [bar(0), bar(1), bar(2), None, None, None]
    }

    fn config_size(&self) -> usize {
        256
    }

    fn config_read(&self, offset: usize, data: &mut [u8]) {
        data.copy_from_slice(&self.config.lock().unwrap()[offset..offset + data.len()]);
    }

    fn config_write(&self, offset: usize, data: &[u8]) {
        let mut config = self.config.lock().unwrap();
        for (index, byte) in (offset..).zip(data) {
            let mask = match index {
                4 | 5 => 0xff,
                0x10..0x1c => (!(BARS[(index - 0x10) / 4] - 1)).to_le_bytes()[index % 4],
                0x43 => 0xc0,
                _ => 0,
            };
            config[index] = config[index] & !mask | byte & mask;
        }
        drop(config);
        self.note(Event::Config(offset, data.to_vec()));
    }

    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]) {
        if bar == 1 {
            let at = usize::try_from(offset).unwrap();
            data.copy_from_slice(&self.registers.lock().unwrap()[at..at + data.len()]);
        }
    }

    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]) -> Deferred {
        if bar == 1 {
            let at = usize::try_from(offset).unwrap();
            self.registers.lock().unwrap()[at..at + data.len()].copy_from_slice(data);
            assert_ne!(offset, PANIC, "a bug");
            if offset == BLOCK {
                self.note(Event::Write(bar, offset, data.to_vec()));
                loop {
                    std::thread::park();
                }
            }
            if offset == RAISE {
                self.irqs.msix(u16::from(data[0]));
            }
        }
        self.note(Event::Write(bar, offset, data.to_vec()));
        Deferred::Pending
    }

    fn run_deferred(&self) {
        self.note(Event::Deferred);
    }

    fn msix(&self) -> Option<MsixPlace> {
        Some(MsixPlace { capability: 0x40, vectors: 3, bar: 0, table: 0, pending: 0x2000 })
    }

    fn outline_bar(&self) -> Option<usize> {
        Some(1)
    }

    fn outline(&self) -> Option<Outline> {
        let config = self.config.lock().unwrap()[..].try_into().unwrap();
        Some(Outline { config, interrupt_mask: 0, shared_region: 0 })
    }

    fn recover(&self, outline: &Outline) -> Result<(), StateError> {
        self.config.lock().unwrap().copy_from_slice(&outline.config);
        self.note(Event::Reset);
        Ok(())
    }

    fn reset(&self) {
        self.registers.lock().unwrap().fill(0);
        self.note(Event::Reset);
    }
}

/// A served test function.
pub struct Served {
    pub function: Arc<TestFunction>,
    pub memory: Arc<DmaSpace>,
    pub irqs: Arc<IrqTable>,
    pub stats: Arc<ConnectionStats>,
    /// Memory that a migration may take.
    pub budget: Arc<MemoryBudget>,
    /// Unique name of the device, because tests of one process share the log.
    pub name: String,
    pub path: PathBuf,
    pub server: Option<Server>,
    _folder: TempDir,
}

impl Served {
    pub fn new() -> Self {
        Self::with_intx(false)
    }

    pub fn with_intx(intx: bool) -> Self {
        Self::with(intx, REPLY_DEADLINE)
    }

    pub fn with(intx: bool, reply_deadline: Duration) -> Self {
        Self::with_all(intx, reply_deadline, FileRules::default())
    }

    pub fn with_files(files: FileRules) -> Self {
        Self::with_all(false, REPLY_DEADLINE, files)
    }

    fn with_all(intx: bool, reply_deadline: Duration, files: FileRules) -> Self {
        Self::with_memory(intx, reply_deadline, files, DmaSpace::new(PinPolicy::Off))
    }

    /// Same as [`Self::new`], with a DMA space of the caller.
    pub fn with_space(memory: Arc<DmaSpace>) -> Self {
        Self::with_memory(false, REPLY_DEADLINE, FileRules::default(), memory)
    }

    fn with_memory(intx: bool, reply_deadline: Duration, files: FileRules, memory: Arc<DmaSpace>) -> Self {
        let start = |path: &Path, endpoint| (Server::listen(path, endpoint).unwrap(), ());
        Self::with_server(intx, reply_deadline, files, memory, start).0
    }

    /// A second server, which adopts the client of another one.
    pub fn adopt(connection: ClientConnection) -> (Self, Result<AdoptedClient, AdoptError>) {
        let (rules, memory) = (FileRules::default(), DmaSpace::new(PinPolicy::Off));
        let (served, adopted) = Self::with_server(true, REPLY_DEADLINE, rules, memory, |path, endpoint| {
            let listener = UnixListener::bind(path).unwrap();
            match Server::adopt(listener, endpoint, connection) {
                Ok((server, adopted)) => (Some(server), Ok(adopted)),
                Err(error) => (None, Err(error)),
            }
        });
        (served, adopted)
    }

    /// A server whose descriptors a keeper receives, with the client of another server that has crashed.
    pub fn recover(keeper: &Arc<Keeper>) -> (Self, Recovery) {
        let (rules, memory) = (FileRules::default(), DmaSpace::new(PinPolicy::Off));
        Self::with_server(false, REPLY_DEADLINE, rules, memory, |path, endpoint| {
            let endpoint = endpoint.with_keeper(Some(keeper.device()));
            Server::recover(UnixListener::bind(path).unwrap(), endpoint).unwrap()
        })
    }

    fn with_server<S: Into<Option<Server>>, R>(
        intx: bool,
        reply_deadline: Duration,
        files: FileRules,
        memory: Arc<DmaSpace>,
        start: impl FnOnce(&Path, Endpoint) -> (S, R),
    ) -> (Self, R) {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let name = format!("device-{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("device.sock");
        // With a clock that stands still, every signal counts as short and is sent before the call returns.
        let irqs = Arc::new(IrqTable::with_clock(Arc::new(ManualClock::default())));
        let function = Arc::new(TestFunction::new(Arc::clone(&irqs)));
        let (stats, budget) = (Arc::new(ConnectionStats::default()), MemoryBudget::new(1 << 20));
        let endpoint = Endpoint::new(name.clone(), function.clone(), Arc::clone(&memory), Arc::clone(&irqs))
            .with_files(files)
            .with_stats(Arc::clone(&stats))
            .with_migration(Some(MigratableDevice::new(function.clone(), Arc::clone(&budget))))
            .with_intx(intx)
            .with_reply_deadline(reply_deadline);
        let (server, result) = start(&path, endpoint);
        (Self { function, memory, irqs, stats, budget, name, path, server: server.into(), _folder: folder }, result)
    }

    /// Connects a client that has not sent a message yet.
    pub fn connect(&self) -> Raw {
        Raw::connect(&self.path)
    }

    /// A client after version negotiation.
    pub fn client(&self) -> Raw {
        let mut client = self.connect();
        client.negotiate();
        client
    }
}

/// Creates a file like those that VMMs create for guest memory.
pub fn memfd(name: &str, size: u64) -> File {
    let file = File::from(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC).unwrap());
    file.set_len(size).unwrap();
    file
}

pub fn eventfd() -> OwnedFd {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK).unwrap()
}

/// Returns the counter of an eventfd, and resets it to 0.
pub fn take_signals(fd: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    rustix::io::read(fd, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
}

/// Sends bytes with descriptors on the first of them.
pub fn send(mut stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let sent = rustix::net::sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    stream.write_all(&bytes[sent..])
}

#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    pub header: Header,
    pub body: Vec<u8>,
}

impl Answer {
    /// Returns the body of a successful reply.
    #[track_caller]
    pub fn ok(self) -> Vec<u8> {
        assert_eq!((self.header.flags, self.header.error), (Header::REPLY, 0), "{self:?}");
        self.body
    }

    /// Returns the errno of a failed request.
    #[track_caller]
    pub fn errno(self) -> u32 {
        assert_eq!(self.header.flags, Header::REPLY | Header::ERROR, "{self:?}");
        assert_eq!(self.header.size, 16);
        assert_ne!(self.header.error, 0);
        self.header.error
    }
}

pub struct Raw {
    pub stream: UnixStream,
    next_id: u16,
}

pub const EINVAL: u32 = 22;

/// Ends the connection, also where closing the socket does not: between fork and exec, a process that another test
/// starts holds the descriptors of all tests, and until then the server would turn the next client away.
impl Drop for Raw {
    fn drop(&mut self) {
        // Fails if the server has ended the connection first.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl Raw {
    pub fn connect(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Self { stream, next_id: 100 }
    }

    /// Sends QEMU's first message. Connects again while the server turns this client away: the client before may be a
    /// process that has just been killed.
    pub fn negotiate(&mut self) -> Vec<u8> {
        let mut body = vec![0; 4];
        body.extend(
            br#"{"capabilities":{"max_msg_fds":16,"max_data_xfer_size":1048576,"max_dma_maps":65535,"pgsizes":4096,"write_multiple":true,"migration":{"pgsize":4096,"max_bitmap_size":268435456}}}"#,
        );
        body.push(0);
        let deadline = Instant::now() + PATIENCE;
        loop {
            let (_, message) = self.message(Command::VERSION, 0, &body);
            let answer = send(&self.stream, &message, &[]).ok().and_then(|()| self.try_receive());
            if let Some(answer) = answer {
                return answer.ok();
            }
            assert!(Instant::now() < deadline, "the server hung up");
            let server = self.stream.peer_addr().unwrap();
            *self = Self::connect(server.as_pathname().expect("a socket without a path"));
        }
    }

    pub fn send_raw(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        send(&self.stream, bytes, fds).unwrap();
    }

    /// Sends a message and returns its number.
    pub fn send(&mut self, command: Command, flags: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> u16 {
        let (id, message) = self.message(command, flags, body);
        self.send_raw(&message, fds);
        id
    }

    /// Returns the number of the next message, and its bytes.
    fn message(&mut self, command: Command, flags: u32, body: &[u8]) -> (u16, Vec<u8>) {
        self.next_id = self.next_id.wrapping_add(1);
        let size = u32::try_from(HEADER_SIZE + body.len()).unwrap();
        let header = Header { id: self.next_id, command, size, flags, error: 0 };
        let mut bytes = header.to_bytes().to_vec();
        bytes.extend(body);
        (self.next_id, bytes)
    }

    /// Returns the next reply, or `None` when the connection ends.
    pub fn try_receive(&mut self) -> Option<Answer> {
        let mut header = [0; HEADER_SIZE];
        match self.stream.read_exact(&mut header) {
            Ok(()) => {}
            Err(error) => {
                use std::io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
                assert!(matches!(error.kind(), UnexpectedEof | ConnectionReset | BrokenPipe), "{error}");
                return None;
            }
        }
        let header = Header::parse(&header);
        assert_eq!(header.flags & Header::TYPE_MASK, Header::REPLY);
        let mut body = vec![0; header.size as usize - HEADER_SIZE];
        self.stream.read_exact(&mut body).unwrap();
        Some(Answer { header, body })
    }

    #[track_caller]
    pub fn receive(&mut self) -> Answer {
        self.try_receive().expect("the server hung up")
    }

    #[track_caller]
    pub fn call(&mut self, command: Command, body: &[u8], fds: &[BorrowedFd<'_>]) -> Answer {
        let id = self.send(command, 0, body, fds);
        let answer = self.receive();
        assert_eq!((answer.header.id, answer.header.command), (id, command));
        answer
    }

    /// Sends a request. Returns the reply and its descriptors.
    pub fn call_for_files(&mut self, command: Command, body: &[u8]) -> (Answer, Vec<OwnedFd>) {
        self.send(command, 0, body, &[]);
        let mut header = [0; HEADER_SIZE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let buffer = &mut [IoSliceMut::new(&mut header)];
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
        let received = rustix::net::recvmsg(&self.stream, buffer, &mut control, flags).unwrap();
        assert_eq!(received.bytes, HEADER_SIZE);
        let fds = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        let fds = fds.flatten().collect();
        let header = Header::parse(&header);
        let mut body = vec![0; header.size as usize - HEADER_SIZE];
        self.stream.read_exact(&mut body).unwrap();
        (Answer { header, body }, fds)
    }

    pub fn map(&mut self, address: u64, size: u64, offset: u64, flags: u32, file: Option<&File>) -> Answer {
        let fds: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
        self.call(Command::DMA_MAP, &map_body(flags, offset, address, size), &fds)
    }

    pub fn unmap(&mut self, address: u64, size: u64, flags: u32) -> Answer {
        self.call(Command::DMA_UNMAP, &unmap_body(flags, address, size), &[])
    }

    #[track_caller]
    pub fn read(&mut self, region: u32, offset: u64, count: u32) -> Vec<u8> {
        let body = self.call(Command::REGION_READ, &access(region, offset, count), &[]).ok();
        assert_eq!(body[..16], access(region, offset, count));
        body[16..].to_vec()
    }

    #[track_caller]
    pub fn write(&mut self, region: u32, offset: u64, data: &[u8]) {
        let body = self.call(Command::REGION_WRITE, &write_body(region, offset, data), &[]).ok();
        assert_eq!(body, write_body(region, offset, data)[..16]);
    }

    pub fn set_irqs(&mut self, index: u32, flags: u32, start: u32, count: u32, fds: &[BorrowedFd<'_>]) -> Answer {
        self.call(Command::DEVICE_SET_IRQS, &irqs_body(index, flags, start, count), fds)
    }

    /// Waits until the server closes the connection, and discards messages that arrive before.
    pub fn wait_hang_up(mut self) {
        while self.try_receive().is_some() {}
    }

    pub fn close_writing(&self) {
        self.stream.shutdown(Shutdown::Write).unwrap();
    }
}

pub fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub fn map_body(flags: u32, offset: u64, address: u64, size: u64) -> Vec<u8> {
    let mut body = words(&[32, flags]);
    [offset, address, size].iter().for_each(|value| body.extend(value.to_le_bytes()));
    body
}

pub fn unmap_body(flags: u32, address: u64, size: u64) -> Vec<u8> {
    let mut body = words(&[24, flags]);
    [address, size].iter().for_each(|value| body.extend(value.to_le_bytes()));
    body
}

pub fn irqs_body(index: u32, flags: u32, start: u32, count: u32) -> Vec<u8> {
    words(&[20, flags, index, start, count])
}

pub fn access(region: u32, offset: u64, count: u32) -> Vec<u8> {
    let mut body = offset.to_le_bytes().to_vec();
    body.extend(words(&[region, count]));
    body
}

pub fn write_body(region: u32, offset: u64, data: &[u8]) -> Vec<u8> {
    let mut body = access(region, offset, u32::try_from(data.len()).unwrap());
    body.extend(data);
    body
}

pub fn region_info_body(index: u32, argsz: u32) -> Vec<u8> {
    words(&[argsz, 0, index, 0, 0, 0, 0, 0])
}
