//! Driver core: commands, events, removal.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use pvrdma_verbs_types::Gid;

use super::command::{CommandError, REQUEST_SIZE, RESPONSE_SIZE, Request, Response, command_id};
use super::probe::ProbeOptions;
use super::{Buffer, Directory, DriverRing, GuestMemory, Irqs, PciAccess, Placement, register, wait_for};

/// Size of the device shared region in bytes.
const DSR_SIZE: usize = 280;

/// An entry of the asynchronous event ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AsyncEntry {
    /// Type of event (spec §10).
    pub kind: u32,
    /// Handle or port.
    pub info: u32,
}

#[derive(Debug)]
pub(super) struct EventRing {
    ring: DriverRing,
    pages: Vec<u64>,
    pub(super) directory: Directory,
    /// Held while entries are taken: an interrupt has one handler at a time.
    handler: Mutex<()>,
}

impl EventRing {
    pub(super) fn new(memory: &Arc<GuestMemory>, count: usize, element: u64) -> Self {
        let pages = memory.alloc(count, Placement::Scattered);
        let directory = memory.directory(&pages);
        let nominal = (count as u64 - 1) * 4096 / element;
        let ring = DriverRing::new(memory, pages[0] + 8, &pages[1..], element, nominal as u32);
        Self { ring, pages, directory, handler: Mutex::default() }
    }

    /// Takes all entries.
    fn take(&self) -> Vec<Vec<u8>> {
        let _handler = self.handler.lock();
        self.ring.drain()
    }

    fn free(&self, memory: &GuestMemory) {
        memory.free(&self.pages);
        memory.free_directory(&self.directory);
    }
}

/// State shared by all objects of a driver.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) pci: PciAccess,
    pub(super) memory: Arc<GuestMemory>,
    pub(super) irqs: Arc<Irqs>,
    pub(super) options: ProbeOptions,
    pub(super) version: u32,
    pub(super) uar_base: u64,
    pub(super) dsr: u64,
    pub(super) slots: [u64; 2],
    pub(super) asynchronous: EventRing,
    pub(super) notifications: EventRing,
    /// Held during a command: only one runs at a time.
    pub(super) command: Mutex<()>,
    /// UAR pages in use.
    pub(super) uars: Mutex<Vec<bool>>,
    pub(super) next_va: AtomicU64,
}

/// A bound driver. Clones share its state.
#[derive(Clone, Debug)]
pub struct Driver(pub(super) Arc<Shared>);

impl Driver {
    /// Returns the function.
    pub fn pci(&self) -> &PciAccess {
        &self.0.pci
    }

    /// Returns the guest memory.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.0.memory
    }

    /// Returns the interrupts.
    pub fn irqs(&self) -> &Arc<Irqs> {
        &self.0.irqs
    }

    /// Returns the value of VERSION.
    pub fn version(&self) -> u32 {
        self.0.version
    }

    /// Returns the bus address of the device shared region.
    pub fn dsr(&self) -> u64 {
        self.0.dsr
    }

    /// Returns the current content of the device shared region.
    pub fn dsr_bytes(&self) -> Vec<u8> {
        self.0.memory.read_vec(self.0.dsr, DSR_SIZE)
    }

    /// Returns the bus addresses of the request and response slots.
    pub fn slots(&self) -> [u64; 2] {
        self.0.slots
    }

    /// Returns the address of BAR 2.
    pub fn uar_base(&self) -> u64 {
        self.0.uar_base
    }

    /// Returns a capability (offset in `pvrdma_device_caps`, spec §2.4).
    pub fn cap_u8(&self, at: u64) -> u8 {
        self.0.memory.read_vec(self.0.dsr + 72 + at, 1)[0]
    }

    /// Returns a capability.
    pub fn cap_u32(&self, at: u64) -> u32 {
        self.0.memory.load(self.0.dsr + 72 + at)
    }

    /// Returns the GID type in the capabilities.
    pub fn gid_type(&self) -> u8 {
        self.cap_u8(203)
    }

    /// Copies a request to the slot, writes REQUEST and returns ERR, without any other check.
    pub fn submit(&self, bytes: &[u8; REQUEST_SIZE]) -> u32 {
        self.0.memory.write(self.0.slots[0], bytes);
        self.pci().set_register(register::REQUEST, 0);
        self.pci().register(register::ERR)
    }

    /// Executes a command as the driver does. A refused command and one that the driver does not wait for must raise no
    /// interrupt, any other exactly one (spec §4.5).
    ///
    /// # Errors
    /// The command failed.
    pub fn execute(&self, request: &Request) -> Result<Response, CommandError> {
        let _one = self.0.command.lock();
        let seen = self.0.irqs.count(0);
        let error = self.submit(request.bytes());
        if error != 0 {
            assert_eq!(self.0.irqs.count(0), seen, "a refused command must not raise vector 0");
            return Err(CommandError::Refused(error));
        }
        if !request.is_waited() {
            assert_eq!(self.0.irqs.count(0), seen, "no thread waits for command {}", request.id());
            return Ok(Response([0; RESPONSE_SIZE]));
        }
        if self.0.options.msix {
            if !self.0.irqs.wait_beyond(0, seen) {
                return Err(CommandError::Timeout);
            }
            assert_eq!(self.0.irqs.count(0), seen + 1, "one interrupt per command");
        } else {
            if !self.0.irqs.wait_line() {
                return Err(CommandError::Timeout);
            }
            assert_eq!(self.pci().register(register::ICR), 1, "the driver takes only the exact value 1");
            assert!(!self.0.irqs.line().0, "reading ICR takes the line back");
        }
        let mut response = [0; RESPONSE_SIZE];
        self.0.memory.read(self.0.slots[1], &mut response);
        Response(response).check(request)
    }

    /// CTL=UNQUIESCE, as when the network interface comes up. Returns ERR.
    pub fn unquiesce(&self) -> u32 {
        self.pci().set_register(register::CTL, 1);
        self.pci().register(register::ERR)
    }

    /// QUERY_PORT: the 48 bytes of `pvrdma_port_attr` (spec §12.1).
    ///
    /// # Errors
    /// The command failed.
    pub fn query_port(&self) -> Result<[u8; 48], CommandError> {
        Ok(self.execute(&Request::new(command_id::QUERY_PORT).u8(16, 1))?.bytes(16))
    }

    /// QUERY_PKEY.
    ///
    /// # Errors
    /// The command failed.
    pub fn query_pkey(&self, index: u8) -> Result<u16, CommandError> {
        Ok(self.execute(&Request::new(command_id::QUERY_PKEY).u8(16, 1).u8(17, index))?.u16(16))
    }

    /// CREATE_BIND with the device's GID type.
    ///
    /// # Errors
    /// The command failed.
    pub fn bind_gid(&self, index: u32, gid: Gid) -> Result<(), CommandError> {
        let request = Request::new(command_id::CREATE_BIND).u32(16, 1024).u32(20, 0xfff).u32(24, index);
        self.execute(&request.set(28, &gid.0).u8(44, self.gid_type())).map(drop)
    }

    /// DESTROY_BIND.
    ///
    /// # Errors
    /// The command failed.
    pub fn unbind_gid(&self, index: u32, gid: Gid) -> Result<(), CommandError> {
        self.execute(&Request::new(command_id::DESTROY_BIND).u32(16, index).set(20, &gid.0)).map(drop)
    }

    /// Allocates a buffer that starts `offset` bytes into its first page.
    pub fn buffer(&self, len: usize, offset: usize, placement: Placement) -> Buffer {
        let count = (offset % 4096 + len).div_ceil(4096).max(1);
        let pages = self.0.memory.alloc(count, placement);
        let va = self.0.next_va.fetch_add((count as u64 + 1) * 4096, Ordering::Relaxed);
        Buffer::new(Arc::clone(&self.0.memory), pages, va + (offset % 4096) as u64, len)
    }

    /// Allocates a contiguous buffer of `len` bytes whose virtual address is the one that this process has for it, for
    /// adapters that register no other addresses.
    pub fn buffer_in_place(&self, len: usize) -> Buffer {
        let pages = self.0.memory.alloc(len.div_ceil(4096).max(1), Placement::Contiguous);
        let va = self.0.memory.process_address(pages[0]);
        Buffer::new(Arc::clone(&self.0.memory), pages, va, len)
    }

    /// Returns the asynchronous event ring.
    pub fn async_ring(&self) -> &DriverRing {
        &self.0.asynchronous.ring
    }

    /// Returns the CQ notification ring.
    pub fn notification_ring(&self) -> &DriverRing {
        &self.0.notifications.ring
    }

    /// Takes all entries of the asynchronous event ring, as vector 1's handler does.
    pub fn async_events(&self) -> Vec<AsyncEntry> {
        let word = |entry: &[u8], at: usize| u32::from_le_bytes(entry[at..at + 4].try_into().unwrap());
        let entries = self.0.asynchronous.take();
        entries.iter().map(|entry| AsyncEntry { kind: word(entry, 0), info: word(entry, 4) }).collect()
    }

    /// Takes CQ handles from the notification ring, as vector 2's handler does.
    pub fn notifications(&self) -> Vec<u32> {
        let entries = self.0.notifications.take();
        entries.iter().map(|entry| u32::from_le_bytes(entry[..4].try_into().unwrap())).collect()
    }

    /// Waits for vector 1 and takes the events it announces.
    pub fn wait_async_event(&self) -> Vec<AsyncEntry> {
        wait_for("asynchronous event", || Some(self.async_events()).filter(|events| !events.is_empty()))
    }

    /// Waits for vector 2 and takes the notifications it announces.
    pub fn wait_notification(&self) -> Vec<u32> {
        wait_for("completion notification", || Some(self.notifications()).filter(|handles| !handles.is_empty()))
    }

    /// Removes the driver after all objects were destroyed: masks interrupts, disables MSI-X, writes RESET without
    /// checking the result, and frees the memory immediately.
    pub fn remove(self) {
        self.pci().set_register(register::IMR, u32::MAX);
        self.pci().set_msix(false);
        self.pci().set_register(register::CTL, 2);
        self.forget();
        self.pci().set_bus_master(false);
    }

    /// Frees the driver's memory without telling the device, as a failed probe does.
    pub fn forget(&self) {
        let Shared { memory, dsr, slots, asynchronous, notifications, .. } = &*self.0;
        memory.free(&[*dsr, slots[0], slots[1]]);
        asynchronous.free(memory);
        notifications.free(memory);
    }
}
