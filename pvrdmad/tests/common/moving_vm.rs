//! A VM with one device function whose VMM migrates it, with the messages of Cloud Hypervisor in their order.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use parking_lot::{Mutex, RwLock, RwLockWriteGuard};
use pvrdma_dev::testing::{Driver, GuestMemory, Irqs, MEMORY_BASE};
use pvrdma_pci_function::{Bar, Deferred, InterruptSink, MsixPlace, PciFunction};
use pvrdma_vfio_user_server::message::Command;
use rustix::event::{PollFd, PollFlags};

use super::migratable::{RESUMING, RUNNING, STOP, STOP_COPY};
use super::{Raw, access, eventfd, memfd, take_signals, words};

const PAGE: u64 = 4096;
const CONFIG: u32 = 7;
const MSIX: u32 = 2;
/// VFIO_IRQ_SET_DATA_EVENTFD and VFIO_IRQ_SET_ACTION_TRIGGER.
const TRIGGER_EVENTFD: u32 = 4 | 32;
const RW: u32 = 3;

/// The function of a VM, wherever it is. The VM's processors stand while a [`Paused`] of it exists.
pub struct MovingVm {
    place: RwLock<Mutex<Raw>>,
    vectors: Vec<OwnedFd>,
    memory: File,
}

/// A VM whose processors stand.
pub struct Paused<'a> {
    vm: &'a MovingVm,
    place: RwLockWriteGuard<'a, Mutex<Raw>>,
}

impl MovingVm {
    /// Connects a VM to a device. `vectors`: MSI-X vectors of the function.
    pub fn start(socket: &Path, bytes: u64, vectors: usize) -> Arc<Self> {
        let mut client = hello(socket);
        let vectors: Vec<_> = (0..vectors).map(|_| eventfd()).collect();
        let memory = memfd("guest", bytes);
        client.map(MEMORY_BASE, bytes, 0, RW, Some(&memory)).ok();
        set_irqs(&mut client, &vectors);
        Arc::new(Self { place: RwLock::new(Mutex::new(client)), vectors, memory })
    }

    /// Binds the driver to the function.
    pub fn probe(self: &Arc<Self>) -> Driver {
        let irqs = Irqs::new();
        let (vm, forwarded) = (Arc::clone(self), Arc::clone(&irqs));
        // Ends with the process of the test.
        thread::spawn(move || {
            loop {
                let mut ready: Vec<_> =
                    vm.vectors.iter().map(|event| PollFd::from_borrowed_fd(event.as_fd(), PollFlags::IN)).collect();
                let _ = rustix::event::poll(&mut ready, None);
                for (vector, event) in (0..).zip(&vm.vectors) {
                    (0..take_signals(event)).for_each(|_| forwarded.msix(vector));
                }
            }
        });
        let memory = GuestMemory::in_file(self.memory.try_clone().unwrap());
        Driver::probe(Arc::clone(self) as _, &memory, &irqs).unwrap()
    }

    fn bytes(&self) -> u64 {
        self.memory.metadata().unwrap().len()
    }

    /// Starts the log, and copies all memory.
    pub fn begin(&self) -> Vec<u8> {
        let place = self.place.read();
        place.lock().start_log(&[(MEMORY_BASE, self.bytes())]).ok();
        let mut copy = vec![0; usize::try_from(self.bytes()).unwrap()];
        self.memory.read_exact_at(&mut copy, 0).unwrap();
        copy
    }

    /// Copies the pages that were written since the last time. Returns their number.
    pub fn copy_round(&self, copy: &mut [u8]) -> usize {
        self.copy_pages(&mut self.place.read().lock(), copy)
    }

    fn copy_pages(&self, client: &mut Raw, copy: &mut [u8]) -> usize {
        let pages = client.written_pages(MEMORY_BASE, self.bytes());
        for page in &pages {
            let at = usize::try_from(page * PAGE).unwrap();
            self.memory.read_exact_at(&mut copy[at..at + 4096], page * PAGE).unwrap();
        }
        pages.len()
    }

    /// Returns `true` if a page of the copy is that of the guest.
    pub fn is_copied(&self, copy: &[u8], address: u64) -> bool {
        let (at, mut page) = (usize::try_from(address - MEMORY_BASE).unwrap(), [0; 4096]);
        self.memory.read_exact_at(&mut page, at as u64).unwrap();
        copy[at..at + 4096] == page
    }

    /// Stops the processors.
    pub fn pause(&self) -> Paused<'_> {
        Paused { vm: self, place: self.place.write() }
    }

    fn call(&self, call: impl FnOnce(&mut Raw)) {
        call(&mut self.place.read().lock());
    }
}

impl<'a> Paused<'a> {
    fn client(&mut self) -> &mut Raw {
        self.place.get_mut()
    }

    /// Stops the device and returns its state.
    pub fn save(&mut self) -> Vec<u8> {
        let client = self.client();
        client.set_state(STOP).ok();
        client.set_state(STOP_COPY).ok();
        let state = client.read_all_data(1000);
        client.set_state(STOP).ok();
        state
    }

    /// Copies the last written pages.
    pub fn last_round(&mut self, copy: &mut [u8]) {
        let vm = self.vm;
        vm.copy_pages(self.client(), copy);
    }

    /// Restores a state at another device. Returns the error of the last step. The VM's processors still stand.
    pub fn restore(&self, socket: &Path, state: &[u8]) -> Result<Raw, u32> {
        let mut client = hello(socket);
        client.set_state(RESUMING).ok();
        state.chunks(1 << 20).for_each(|part| _ = client.write_data(part).ok());
        client.write(CONFIG, 4, &[6, 0]);
        set_irqs(&mut client, &self.vm.vectors);
        client.map(MEMORY_BASE, self.vm.bytes(), 0, RW, Some(&self.vm.memory)).ok();
        match client.set_state(RUNNING).header.error {
            0 => Ok(client),
            error => Err(error),
        }
    }

    /// Continues at the source.
    pub fn resume(mut self) {
        self.client().set_state(RUNNING).ok();
        self.client().stop_log().ok();
    }

    /// Continues with another device. The source is dropped.
    pub fn continue_at(mut self, client: Raw) {
        *self.client() = client;
    }
}

/// Connects, and asks for all that a VMM wants to know of a device.
fn hello(socket: &Path) -> Raw {
    let mut client = Raw::connect(socket);
    client.negotiate();
    client.call(Command::DEVICE_GET_INFO, &words(&[16, 0, 0, 0]), &[]).ok();
    for region in 0..9 {
        client.call(Command::DEVICE_GET_REGION_INFO, &super::region_info_body(region, 32), &[]).ok();
    }
    client
}

fn set_irqs(client: &mut Raw, vectors: &[OwnedFd]) {
    let fds: Vec<_> = vectors.iter().map(AsFd::as_fd).collect();
    client.set_irqs(MSIX, TRIGGER_EVENTFD, 0, u32::try_from(fds.len()).unwrap(), &fds).ok();
}

impl PciFunction for MovingVm {
    fn bars(&self) -> [Option<Bar>; 6] {
        [None; 6]
    }

    fn config_size(&self) -> usize {
        256
    }

    fn config_read(&self, offset: usize, data: &mut [u8]) {
        self.call(|client| data.copy_from_slice(&read(client, CONFIG, offset as u64, data.len())));
    }

    fn config_write(&self, offset: usize, data: &[u8]) {
        self.call(|client| client.write(CONFIG, offset as u64, data));
    }

    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]) {
        let bar = u32::try_from(bar).unwrap();
        self.call(|client| data.copy_from_slice(&read(client, bar, offset, data.len())));
    }

    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]) -> Deferred {
        let bar = u32::try_from(bar).unwrap();
        self.call(|client| client.write(bar, offset, data));
        Deferred::Nothing
    }

    fn run_deferred(&self) {}

    fn msix(&self) -> Option<MsixPlace> {
        Some(MsixPlace { capability: 0x40, vectors: 3, bar: 0, table: 0, pending: 0x2000 })
    }

    fn reset(&self) {
        self.call(|client| _ = client.call(Command::DEVICE_RESET, &[], &[]).ok());
    }
}

fn read(client: &mut Raw, region: u32, offset: u64, count: usize) -> Vec<u8> {
    let body = access(region, offset, u32::try_from(count).unwrap());
    client.call(Command::REGION_READ, &body, &[]).ok().split_off(16)
}
