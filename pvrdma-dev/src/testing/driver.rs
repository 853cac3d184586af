//! The driver proper: probe, commands, events, removal.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use rdma_backend::Gid;
use thiserror::Error;

use super::command::{CommandError, REQUEST_SIZE, RESPONSE_SIZE, Request, Response, command_id};
use super::{Buffer, Directory, DriverRing, GuestMemory, Irqs, PciAccess, Placement, register, wait_for};
use crate::pci_function::PciFunction;

/// Octets of the device shared region.
const DSR_SIZE: usize = 280;

/// Why a probe failed (spec §2.2, in the driver's order).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ProbeError {
    /// Not a version that this driver knows.
    #[error("device version {0}")]
    Version(u32),
    /// Not RoCE.
    #[error("device mode {0}")]
    Mode(u8),
    /// Neither exactly RoCE v1 nor exactly v2.
    #[error("GID types {0:#x}")]
    GidTypes(u8),
    /// Not a power of two.
    #[error("{0} UAR pages")]
    Uars(u32),
    /// ERR after ACTIVATE.
    #[error("activation failed, ERR is {0:#x}")]
    Activate(u32),
}

/// What a probe can do differently.
#[derive(Clone, Copy, Debug)]
pub struct ProbeOptions {
    /// Version that the driver claims.
    pub driver_version: u32,
    /// Use MSI-X; otherwise the legacy line.
    pub msix: bool,
    /// Pages of each event ring, ring state included.
    pub event_ring_pages: usize,
}

impl Default for ProbeOptions {
    fn default() -> Self {
        Self { driver_version: 20, msix: true, event_ring_pages: 4 }
    }
}

/// An entry of the asynchronous event ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AsyncEntry {
    /// Type of event (spec §10).
    pub kind: u32,
    /// Handle or port.
    pub info: u32,
}

#[derive(Debug)]
struct EventRing {
    ring: DriverRing,
    pages: Vec<u64>,
    directory: Directory,
}

impl EventRing {
    fn new(memory: &Arc<GuestMemory>, count: usize, element: u64) -> Self {
        let pages = memory.alloc(count, Placement::Scattered);
        let directory = memory.directory(&pages);
        let nominal = (count as u64 - 1) * 4096 / element;
        let ring = DriverRing::new(memory, pages[0] + 8, &pages[1..], element, nominal as u32);
        Self { ring, pages, directory }
    }

    fn free(&self, memory: &GuestMemory) {
        memory.free(&self.pages);
        memory.free_directory(&self.directory);
    }
}

/// What all objects of a driver share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) pci: PciAccess,
    pub(super) memory: Arc<GuestMemory>,
    irqs: Arc<Irqs>,
    options: ProbeOptions,
    version: u32,
    uar_base: u64,
    dsr: u64,
    slots: [u64; 2],
    asynchronous: EventRing,
    notifications: EventRing,
    /// One command at a time.
    command: Mutex<()>,
    /// UAR pages in use.
    uars: Mutex<Vec<bool>>,
    next_va: AtomicU64,
}

/// A bound driver. Clones are the same driver.
#[derive(Clone, Debug)]
pub struct Driver(pub(super) Arc<Shared>);

impl Driver {
    /// What the kernel driver's probe does.
    ///
    /// # Errors
    /// What its probe would fail for.
    pub fn probe(
        function: Arc<dyn PciFunction>,
        memory: &Arc<GuestMemory>,
        irqs: &Arc<Irqs>,
    ) -> Result<Self, ProbeError> {
        Self::probe_with(function, memory, irqs, ProbeOptions::default())
    }

    /// A probe that does some things differently.
    ///
    /// # Errors
    /// As for [`Self::probe`].
    pub fn probe_with(
        function: Arc<dyn PciFunction>,
        memory: &Arc<GuestMemory>,
        irqs: &Arc<Irqs>,
        options: ProbeOptions,
    ) -> Result<Self, ProbeError> {
        let pci = PciAccess(function);
        let uar_base = pci.enable();
        let version = pci.register(register::VERSION);
        if version < 17 {
            return Err(ProbeError::Version(version));
        }
        let dsr = memory.alloc_page();
        let slots = [memory.alloc_page(), memory.alloc_page()];
        let asynchronous = EventRing::new(memory, options.event_ring_pages, 8);
        let notifications = EventRing::new(memory, options.event_ring_pages, 4);
        let shared = Shared {
            pci,
            memory: Arc::clone(memory),
            irqs: Arc::clone(irqs),
            options,
            version,
            uar_base,
            dsr,
            slots,
            asynchronous,
            notifications,
            command: Mutex::new(()),
            uars: Mutex::new(vec![true]),
            next_va: AtomicU64::new(0x7f00_0000_0000),
        };
        let driver = Self(Arc::new(shared));
        driver.handshake();
        if let Err(error) = driver.check_caps() {
            driver.forget();
            return Err(error);
        }
        driver.pci().set_msix(options.msix);
        driver.pci().set_register(register::IMR, 0);
        driver.pci().set_register(register::CTL, 0);
        match driver.pci().register(register::ERR) {
            0 => Ok(driver),
            error => {
                driver.pci().set_register(register::IMR, u32::MAX);
                driver.forget();
                Err(ProbeError::Activate(error))
            }
        }
    }

    fn handshake(&self) {
        let Shared { memory, dsr, slots, asynchronous, notifications, options, .. } = &*self.0;
        let mut bytes = [0; 72];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &options.driver_version.to_le_bytes());
        put(8, &0x46_u32.to_le_bytes());
        put(16, &slots[0].to_le_bytes());
        put(24, &slots[1].to_le_bytes());
        for (at, ring) in [(32, asynchronous), (48, notifications)] {
            put(at, &(options.event_ring_pages as u32).to_le_bytes());
            put(at + 8, &ring.directory.addr.to_le_bytes());
        }
        let pfn = self.0.uar_base >> 12;
        put(64, &if self.0.version < 19 { u64::from(pfn as u32) } else { pfn }.to_le_bytes());
        memory.write(*dsr, &bytes);
        self.write_dsr_address();
    }

    /// Writes DSRLOW and DSRHIGH, which starts the handshake.
    pub fn write_dsr_address(&self) {
        self.pci().set_register(register::DSRLOW, self.0.dsr as u32);
        self.pci().set_register(register::DSRHIGH, (self.0.dsr >> 32) as u32);
    }

    fn check_caps(&self) -> Result<(), ProbeError> {
        let (mode, gid_types, uars) = (self.cap_u8(200), self.cap_u8(203), self.cap_u32(188));
        if mode != 0 {
            return Err(ProbeError::Mode(mode));
        }
        let supported = match self.0.version {
            17 => gid_types == 1,
            _ => gid_types == 1 || gid_types == 2,
        };
        if !supported {
            return Err(ProbeError::GidTypes(gid_types));
        }
        if !uars.is_power_of_two() {
            return Err(ProbeError::Uars(uars));
        }
        self.0.uars.lock().resize(uars as usize, false);
        Ok(())
    }

    /// The function.
    pub fn pci(&self) -> &PciAccess {
        &self.0.pci
    }

    /// Guest memory.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.0.memory
    }

    /// Interrupts.
    pub fn irqs(&self) -> &Arc<Irqs> {
        &self.0.irqs
    }

    /// What VERSION said.
    pub fn version(&self) -> u32 {
        self.0.version
    }

    /// Bus address of the device shared region.
    pub fn dsr(&self) -> u64 {
        self.0.dsr
    }

    /// The device shared region as it is now.
    pub fn dsr_bytes(&self) -> Vec<u8> {
        self.0.memory.read_vec(self.0.dsr, DSR_SIZE)
    }

    /// Bus addresses of the request and response slots.
    pub fn slots(&self) -> [u64; 2] {
        self.0.slots
    }

    /// Address of BAR 2.
    pub fn uar_base(&self) -> u64 {
        self.0.uar_base
    }

    /// A capability (offset in `pvrdma_device_caps`, spec §2.4).
    pub fn cap_u8(&self, at: u64) -> u8 {
        self.0.memory.read_vec(self.0.dsr + 72 + at, 1)[0]
    }

    /// A capability.
    pub fn cap_u32(&self, at: u64) -> u32 {
        self.0.memory.load(self.0.dsr + 72 + at)
    }

    /// The GID type that the capabilities name.
    pub fn gid_type(&self) -> u8 {
        self.cap_u8(203)
    }

    /// Copies a request to the slot, writes REQUEST and returns ERR, without looking at anything else.
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
            assert_eq!(self.0.irqs.count(0), seen, "nobody waits for command {}", request.id());
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

    /// QUERY_PORT: the 48 octets of `pvrdma_port_attr` (spec §12.1).
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

    /// CREATE_UC, as when a process opens the device. Takes the lowest free UAR page.
    ///
    /// # Errors
    /// The command failed.
    pub fn open(&self) -> Result<Context, CommandError> {
        let uar = {
            let mut uars = self.0.uars.lock();
            let free = uars.iter().position(|used| !used).expect("all UAR pages are in use");
            uars[free] = true;
            free as u32
        };
        let pfn = (self.0.uar_base >> 12) + u64::from(uar);
        match self.execute(&Request::new(command_id::CREATE_UC).u64(16, pfn)) {
            Ok(response) => Ok(Context { driver: self.clone(), handle: response.u32(16), uar }),
            Err(error) => {
                self.0.uars.lock()[uar as usize] = false;
                Err(error)
            }
        }
    }

    /// CREATE_PD of a process, or of the kernel without context.
    ///
    /// # Errors
    /// The command failed.
    pub fn create_pd(&self, context: Option<&Context>) -> Result<Pd, CommandError> {
        let (context, uar) = context.map_or((0, 0), |context| (context.handle, context.uar));
        let response = self.execute(&Request::new(command_id::CREATE_PD).u32(16, context))?;
        Ok(Pd { driver: self.clone(), handle: response.u32(16), context, uar })
    }

    /// Allocates a buffer that starts `offset` octets into its first page.
    pub fn buffer(&self, len: usize, offset: usize, placement: Placement) -> Buffer {
        let count = (offset % 4096 + len).div_ceil(4096).max(1);
        let pages = self.0.memory.alloc(count, placement);
        let va = self.0.next_va.fetch_add((count as u64 + 1) * 4096, Ordering::Relaxed);
        Buffer::new(Arc::clone(&self.0.memory), pages, va + (offset % 4096) as u64, len)
    }

    /// The asynchronous event ring.
    pub fn async_ring(&self) -> &DriverRing {
        &self.0.asynchronous.ring
    }

    /// The CQ notification ring.
    pub fn notification_ring(&self) -> &DriverRing {
        &self.0.notifications.ring
    }

    /// Takes what the asynchronous event ring has, as vector 1's handler does.
    pub fn async_events(&self) -> Vec<AsyncEntry> {
        let word = |entry: &[u8], at: usize| u32::from_le_bytes(entry[at..at + 4].try_into().unwrap());
        let entries = self.0.asynchronous.ring.drain();
        entries.iter().map(|entry| AsyncEntry { kind: word(entry, 0), info: word(entry, 4) }).collect()
    }

    /// Takes CQ handles from the notification ring, as vector 2's handler does.
    pub fn notifications(&self) -> Vec<u32> {
        let entries = self.0.notifications.ring.drain();
        entries.iter().map(|entry| u32::from_le_bytes(entry[..4].try_into().unwrap())).collect()
    }

    /// Waits for a vector 1 and what it announces.
    pub fn wait_async_event(&self) -> Vec<AsyncEntry> {
        wait_for("asynchronous event", || Some(self.async_events()).filter(|events| !events.is_empty()))
    }

    /// Waits for a vector 2 and what it announces.
    pub fn wait_notification(&self) -> Vec<u32> {
        wait_for("completion notification", || Some(self.notifications()).filter(|handles| !handles.is_empty()))
    }

    /// What module removal does after all objects are gone: mask, MSI-X off, RESET without looking, memory freed at once.
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

/// An open device of a process.
#[derive(Clone, Debug)]
pub struct Context {
    driver: Driver,
    /// Its handle.
    pub handle: u32,
    /// Its UAR page.
    pub uar: u32,
}

impl Context {
    /// DESTROY_UC.
    ///
    /// # Errors
    /// The command failed.
    pub fn close(self) -> Result<(), CommandError> {
        let result = self.driver.execute(&Request::new(command_id::DESTROY_UC).u32(16, self.handle));
        self.driver.0.uars.lock()[self.uar as usize] = false;
        result.map(drop)
    }
}

/// A protection domain.
#[derive(Clone, Debug)]
pub struct Pd {
    pub(super) driver: Driver,
    /// Its handle.
    pub handle: u32,
    /// Handle of the context that owns it, 0 for the kernel.
    pub context: u32,
    /// UAR page of its owner.
    pub uar: u32,
}

impl Pd {
    /// Whether it belongs to a process.
    pub const fn is_user(&self) -> bool {
        self.context != 0
    }

    /// DESTROY_PD.
    ///
    /// # Errors
    /// The command failed.
    pub fn destroy(self) -> Result<(), CommandError> {
        self.driver.execute(&Request::new(command_id::DESTROY_PD).u32(16, self.handle)).map(drop)
    }
}
