//! A VMM that gives up on an answer after a timeout, and continues with the same connection, as QEMU does.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use pvrdma_dev::testing::{Driver, GuestMemory, Irqs, MEMORY_BASE, ProbeError};
use pvrdma_pci_function::{Bar, Deferred, InterruptSink, MsixPlace, PciFunction};
use pvrdma_vfio_user_server::message::{Command, HEADER_SIZE, Header};
use rustix::event::{PollFd, PollFlags};

use super::{Raw, access, eventfd, memfd, take_signals, write_body};

const CONFIG: u32 = 7;
const MSIX: u32 = 2;
/// VFIO_IRQ_SET_DATA_EVENTFD and VFIO_IRQ_SET_ACTION_TRIGGER.
const TRIGGER_EVENTFD: u32 = 4 | 32;
/// Time for an answer. Shorter than QEMU's five seconds, so that a test does not take so long.
const TIMEOUT: Duration = Duration::from_secs(2);

/// A VMM with a guest, whose driver can be loaded any number of times.
pub struct PatientVmm {
    function: Arc<Function>,
    pub memory: Arc<GuestMemory>,
    irqs: Arc<Irqs>,
}

impl PatientVmm {
    /// Connects to a device, and gives it memory and interrupts.
    pub fn connect(socket: &Path, bytes: u64) -> Self {
        let mut client = Raw::connect(socket);
        client.negotiate();
        let file = memfd("guest", bytes);
        client.map(MEMORY_BASE, bytes, 0, 3, Some(&file)).ok();
        let events = [eventfd(), eventfd(), eventfd()];
        client.set_irqs(MSIX, TRIGGER_EVENTFD, 0, 3, &events.each_ref().map(AsFd::as_fd)).ok();
        client.stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        Self::with(client, events, file)
    }

    fn with(client: Raw, events: [OwnedFd; 3], file: File) -> Self {
        let irqs = Irqs::new();
        let (sink, stop) = (Arc::clone(&irqs), Arc::new(AtomicBool::new(false)));
        let stopping = Arc::clone(&stop);
        let thread = std::thread::spawn(move || forward(&events, &stopping, &sink));
        let interrupts = Interrupts { stop, thread: Some(thread) };
        let function = Function { client: Mutex::new(client), lost: AtomicU64::new(0), _interrupts: interrupts };
        Self { function: Arc::new(function), memory: GuestMemory::in_file(file), irqs }
    }

    /// Loads the driver.
    pub fn load(&self) -> Result<Driver, ProbeError> {
        Driver::probe(Arc::clone(&self.function) as _, &self.memory, &self.irqs)
    }

    /// Returns how often each vector was raised.
    pub fn interrupts(&self) -> [u64; 3] {
        self.irqs.counts()
    }

    /// Returns the number of requests that were not answered.
    pub fn unanswered(&self) -> u64 {
        self.function.lost.load(Ordering::Relaxed)
    }

    /// Returns bytes of configuration space.
    pub fn config(&self, offset: usize, count: usize) -> Vec<u8> {
        let mut data = vec![0; count];
        self.function.config_read(offset, &mut data);
        data
    }

    /// Runs `action` with the connection.
    pub fn raw<R>(&self, action: impl FnOnce(&mut Raw) -> R) -> R {
        action(&mut self.function.client.lock().unwrap())
    }
}

struct Function {
    client: Mutex<Raw>,
    lost: AtomicU64,
    _interrupts: Interrupts,
}

impl Function {
    /// Returns the body of the answer, or `None` if there is none in time. An error is a failure of the test, as is the
    /// end of the connection.
    fn call(&self, command: Command, body: &[u8]) -> Option<Vec<u8>> {
        let mut client = self.client.lock().unwrap();
        let id = client.send(command, 0, body, &[]);
        let mut header = [0; HEADER_SIZE];
        match client.stream.read_exact(&mut header) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.lost.fetch_add(1, Ordering::Relaxed);
                return None;
            }
            read => read.expect("the connection lives"),
        }
        let header = Header::parse(&header);
        let mut body = vec![0; header.size as usize - HEADER_SIZE];
        client.stream.read_exact(&mut body).unwrap();
        assert_eq!((header.flags, header.error, header.id), (Header::REPLY, 0, id), "{command:?}");
        Some(body)
    }

    fn read(&self, region: u32, offset: u64, data: &mut [u8]) {
        let body = self.call(Command::REGION_READ, &access(region, offset, u32::try_from(data.len()).unwrap()));
        match body {
            Some(body) => data.copy_from_slice(&body[16..]),
            None => data.fill(0xff),
        }
    }
}

impl PciFunction for Function {
    fn bars(&self) -> [Option<Bar>; 6] {
        [None; 6]
    }

    fn config_size(&self) -> usize {
        256
    }

    fn config_read(&self, offset: usize, data: &mut [u8]) {
        self.read(CONFIG, offset as u64, data);
    }

    fn config_write(&self, offset: usize, data: &[u8]) {
        self.call(Command::REGION_WRITE, &write_body(CONFIG, offset as u64, data));
    }

    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]) {
        self.read(u32::try_from(bar).unwrap(), offset, data);
    }

    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]) -> Deferred {
        self.call(Command::REGION_WRITE, &write_body(u32::try_from(bar).unwrap(), offset, data));
        Deferred::Nothing
    }

    fn run_deferred(&self) {}

    fn msix(&self) -> Option<MsixPlace> {
        Some(MsixPlace { capability: 0x40, vectors: 3, bar: 0, table: 0, pending: 0x2000 })
    }

    fn reset(&self) {
        self.call(Command::DEVICE_RESET, &[]);
    }
}

/// Thread that forwards interrupts.
struct Interrupts {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Interrupts {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn forward(events: &[OwnedFd; 3], stop: &AtomicBool, irqs: &Irqs) {
    let [a, b, c] = events;
    let moment = rustix::event::Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
    while !stop.load(Ordering::Acquire) {
        let mut ready = [a, b, c].map(|event| PollFd::new(event, PollFlags::IN));
        let _ = rustix::event::poll(&mut ready, Some(&moment));
        for (vector, event) in (0..).zip(events) {
            (0..take_signals(event)).for_each(|_| irqs.msix(vector));
        }
    }
}
