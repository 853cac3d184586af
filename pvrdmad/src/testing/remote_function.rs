//! A client of a device's socket that shares no code with the daemon.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use anyhow::{Context, Result, bail};
use parking_lot::Mutex;
use pvrdma_dev::testing::{Irqs, MEMORY_BASE};
use pvrdma_pci_function::{Bar, Deferred, InterruptSink, MsixPlace, PciFunction};
use rustix::event::{EventfdFlags, PollFd, PollFlags};
use vfio_user::Client;
use vm_memory::mmap::MmapRegion;
use vm_memory::{Bytes, FileOffset, VolatileMemory, VolatileSlice};

const CONFIG: u32 = 7;
/// The BAR with the doorbell pages.
const DOORBELLS: u32 = 2;
/// VFIO_PCI_MSIX_IRQ_INDEX.
const MSIX: u32 = 2;
/// VFIO_IRQ_SET_DATA_EVENTFD and VFIO_IRQ_SET_ACTION_TRIGGER.
const TRIGGER_EVENTFD: u32 = 4 | 32;

/// The function behind a socket. Accesses become messages. When the daemon has gone, reads return all ones, as on a bus
/// without the device.
pub struct RemoteFunction {
    client: Mutex<Client>,
    /// Doorbell pages that are mapped.
    doorbells: Option<Doorbells>,
    _interrupts: Forwarder,
}

/// The mapped part of BAR 2.
struct Doorbells {
    memory: MmapRegion,
    /// First byte in the BAR.
    offset: u64,
}

impl Doorbells {
    /// Maps the doorbell pages that the device exports.
    fn map(client: &Client) -> Result<Self> {
        let region = client.region(DOORBELLS).context("there is no BAR 2")?;
        let file = region.file_offset.as_ref().context("no file for BAR 2")?;
        let [area] = region.sparse_areas[..] else { bail!("{} areas", region.sparse_areas.len()) };
        let file = FileOffset::new(file.file().try_clone()?, file.start() + area.offset);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let memory = MmapRegion::build(Some(file), usize::try_from(area.size)?, access, libc::MAP_SHARED)?;
        Ok(Self { memory, offset: area.offset })
    }

    /// Stores or loads a word in the mapped part. Returns `false` if the offset is outside.
    fn access(&self, bar: usize, offset: u64, access: impl FnOnce(VolatileSlice<'_>, usize) -> bool) -> bool {
        let at = offset.checked_sub(self.offset).and_then(|at| usize::try_from(at).ok());
        at.filter(|_| region(bar) == DOORBELLS).is_some_and(|at| access(self.memory.as_volatile_slice(), at))
    }
}

impl std::fmt::Debug for RemoteFunction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteFunction").finish_non_exhaustive()
    }
}

impl Drop for RemoteFunction {
    /// Closing the socket does not suffice: a child process that is being started has a copy of it until it executes
    /// its program, and the device would stay occupied until then.
    fn drop(&mut self) {
        let _ = self.client.get_mut().shutdown();
    }
}

impl RemoteFunction {
    /// Connects to a device and gives it all of `memory`, from [`MEMORY_BASE`] on. The second result receives its
    /// interrupts.
    ///
    /// # Errors
    /// No process listens at `socket`, or the device refuses the memory or the interrupts.
    pub fn connect(socket: &Path, memory: &File) -> Result<(Arc<Self>, Arc<Irqs>)> {
        Self::connect_as(socket, memory, false)
    }

    /// Same as [`connect`], with the exported doorbell pages of the device mapped.
    ///
    /// # Errors
    /// As for [`connect`], or the device exports no pages.
    pub fn connect_mapped(socket: &Path, memory: &File) -> Result<(Arc<Self>, Arc<Irqs>)> {
        Self::connect_as(socket, memory, true)
    }

    fn connect_as(socket: &Path, memory: &File, maps: bool) -> Result<(Arc<Self>, Arc<Irqs>)> {
        let bytes = memory.metadata().context("guest memory")?.len();
        let mut client = Client::new(socket).with_context(|| format!("cannot connect to {}", socket.display()))?;
        client.dma_map(0, MEMORY_BASE, bytes, memory.as_raw_fd()).context("the device refuses the memory")?;
        let irqs = Irqs::new();
        let interrupts = Forwarder::start(&mut client, &irqs)?;
        let doorbells = maps.then(|| Doorbells::map(&client)).transpose().context("doorbell pages")?;
        Ok((Arc::new(Self { client: Mutex::new(client), doorbells, _interrupts: interrupts }), irqs))
    }

    fn read(&self, region: u32, offset: u64, data: &mut [u8]) {
        if let Err(error) = self.client.lock().region_read(region, offset, data) {
            log::debug!("region {region}: cannot read: {error}");
            data.fill(0xff);
        }
    }

    fn write(&self, region: u32, offset: u64, data: &[u8]) {
        if let Err(error) = self.client.lock().region_write(region, offset, data) {
            log::debug!("region {region}: cannot write: {error}");
        }
    }
}

impl PciFunction for RemoteFunction {
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
        self.write(CONFIG, offset as u64, data);
    }

    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]) {
        let loads =
            |doorbells: &Doorbells| doorbells.access(bar, offset, |memory, at| memory.read_slice(data, at).is_ok());
        if !self.doorbells.as_ref().is_some_and(loads) {
            self.read(region(bar), offset, data);
        }
    }

    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]) -> Deferred {
        let word = data.first_chunk().map(|word| u32::from_le_bytes(*word));
        let stores = |doorbells: &Doorbells| {
            doorbells.access(bar, offset, |memory, at| {
                word.is_some_and(|word| memory.store(word, at, Ordering::SeqCst).is_ok())
            })
        };
        if !self.doorbells.as_ref().is_some_and(stores) {
            self.write(region(bar), offset, data);
        }
        Deferred::Nothing
    }

    fn run_deferred(&self) {}

    fn msix(&self) -> Option<MsixPlace> {
        Some(MsixPlace { capability: 0x40, vectors: 3, bar: 0, table: 0, pending: 0x2000 })
    }

    fn reset(&self) {
        if let Err(error) = self.client.lock().reset() {
            log::debug!("cannot reset: {error}");
        }
    }
}

/// Returns the region of a BAR. Numbers that are no BAR give a number that no region has.
fn region(bar: usize) -> u32 {
    u32::try_from(bar).unwrap_or(u32::MAX)
}

/// A thread that forwards a device's interrupts to an [`Irqs`].
struct Forwarder {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Forwarder {
    fn start(client: &mut Client, irqs: &Arc<Irqs>) -> Result<Self> {
        let event = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let (events, stop): ([OwnedFd; 3], _) = ([event()?, event()?, event()?], Arc::new(event()?));
        client
            .set_irqs(MSIX, TRIGGER_EVENTFD, 0, 3, &events.each_ref().map(AsRawFd::as_raw_fd))
            .context("the device refuses the interrupts")?;
        let (irqs, stopping) = (Arc::clone(irqs), Arc::clone(&stop));
        let thread = std::thread::spawn(move || forward(&events, &stopping, &irqs));
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn forward(events: &[OwnedFd; 3], stop: &OwnedFd, irqs: &Irqs) {
    let [a, b, c] = events;
    loop {
        let mut ready = [a, b, c, stop].map(|event| PollFd::from_borrowed_fd(event.as_fd(), PollFlags::IN));
        if rustix::event::poll(&mut ready, None).is_err_and(|error| error != rustix::io::Errno::INTR) {
            return;
        }
        for (vector, event) in (0..).zip(events) {
            (0..take(event)).for_each(|_| irqs.msix(vector));
        }
        if take(stop) > 0 {
            return;
        }
    }
}

/// Returns the counter of an eventfd, and resets it to 0.
fn take(event: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    rustix::io::read(event, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
}
