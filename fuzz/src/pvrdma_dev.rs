//! Shared parts of the targets of `pvrdma-dev`: devices over the software adapter, on one thread and in virtual time,
//! so that the same input always has the same effect.

use std::sync::Arc;
use std::time::Duration;

use arbitrary::Arbitrary;
use pvrdma_dev::{
    DeviceConfig, Limits, PvrdmaDevice,
    testing::{Driver, GuestMemory, Irqs, MEMORY_BASE},
};
use pvrdma_link::{Clock, ManualClock};
use pvrdma_packet::MacAddr;
use pvrdma_pci_function::PciFunction;
use pvrdma_rxe::{Rxe, RxeConfig, RxeHca, VlanMode};
pub use pvrdma_verbs::testing::gid;

/// Maximum number of queue pair runs that one step may cause. The rings hold far less work.
const MAX_RUNS: usize = 2000;

/// Bytes in a page.
pub const PAGE: u64 = 4096;

/// The adapter of all devices, and its clock.
pub struct World {
    rxe: Rxe,
    clock: Arc<ManualClock>,
}

impl Default for World {
    fn default() -> Self {
        let clock = Arc::new(ManualClock::default());
        let config = RxeConfig::default()
            .with_workers(0)
            // Small limits, so that even transfers of a few pages need several runs.
            .with_inline_bytes(6000)
            .with_inline_requests(3)
            .with_worker_bytes(6000)
            .with_worker_requests(3)
            .with_clock(Arc::clone(&clock) as Arc<dyn Clock>)
            // Guests choose VLANs as well.
            .with_vlan(VlanMode::Trunk);
        Self { rxe: Rxe::new(config).unwrap(), clock }
    }
}

impl World {
    /// Runs all work that doorbells and posts have caused.
    pub fn settle(&self) {
        let runs = self.rxe.run_ready();
        assert!(runs < MAX_RUNS, "{runs} runs for one step");
    }

    /// Advances time to the next timer, at most by `at_most`.
    pub fn pass(&self, at_most: Duration) {
        let now = self.clock.now();
        let next = self.rxe.next_deadline().map_or(now, |deadline| deadline.max(now));
        self.clock.advance((next - now).min(at_most));
        self.settle();
    }

    /// A device whose guest has this much memory, in four parts.
    pub fn guest(&self, host: u8, bytes: usize) -> Guest {
        let memory = GuestMemory::in_parts(bytes, 4);
        let irqs = Irqs::new();
        let limits = Limits::default()
            .with_verbs(Limits::default().verbs.with_max_cqe(64).with_max_qp_wr(64))
            .with_max_uar(8)
            .with_max_srq_wr(64);
        let station = self.rxe.station(MacAddr([0x52, 0x54, 0, 0, 0, host]));
        // Tests both ways of arming.
        let posted_doorbells = host.is_multiple_of(2);
        let config = DeviceConfig::new("fuzz").with_limits(limits).with_posted_doorbells(posted_doorbells);
        let device = PvrdmaDevice::new(config, Arc::clone(memory.space()), irqs.clone(), &station).unwrap();
        Guest { memory, irqs, device }
    }
}

/// A device and its guest's memory.
pub struct Guest {
    /// Memory as the guest's processors see it.
    pub memory: Arc<GuestMemory>,
    /// Interrupts so far.
    pub irqs: Arc<Irqs>,
    /// The function.
    pub device: Arc<PvrdmaDevice<RxeHca>>,
}

impl Guest {
    /// Probes as the driver does, which must work whatever happened to the device before.
    pub fn probe(&self) -> Driver {
        let function = Arc::clone(&self.device) as Arc<dyn PciFunction>;
        Driver::probe(function, &self.memory, &self.irqs).expect("a device that was misused can be probed again")
    }

    /// All of memory.
    pub fn snapshot(&self) -> Vec<u8> {
        let len = (self.memory.end() - MEMORY_BASE) as usize;
        self.memory.read_vec(MEMORY_BASE, len)
    }

    /// Ends the device. No resources of the guest remain, and neither memory nor interrupts change afterwards.
    pub fn end(&self, world: &World) {
        self.device.reset();
        let (memory, interrupts) = (self.snapshot(), self.irqs.counts());
        for page in 0..2 {
            for (at, value) in [(0, 0xc000_0000_u32), (4, 0xe000_0000), (8, 0x4000_0000)] {
                for handle in 0..4_u32 {
                    let _ = self.device.bar_write(2, page * PAGE + at, &(value | handle).to_le_bytes());
                }
            }
        }
        let _ = self.device.bar_write(1, 0x10, &[0; 4]);
        self.device.run_deferred();
        world.pass(Duration::from_secs(60));
        let status = self.device.status();
        assert_eq!((status.objects, status.kept.used_bytes), Default::default());
        assert!(self.snapshot() == memory, "memory was written after a reset");
        assert_eq!((self.irqs.counts(), self.irqs.strange()), (interrupts, 0));
    }
}

/// A number as it occurs in handles, sizes and masks.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Word {
    /// Small.
    Small(u8),
    /// A power of two, one less or one more.
    Bit(u8, i8),
    /// Anything.
    Any(u32),
}

impl Word {
    /// The number.
    pub fn get(self) -> u32 {
        match self {
            Self::Small(value) => u32::from(value % 40),
            Self::Bit(bit, off) => (1_u32 << (bit % 32)).wrapping_add_signed(i32::from(off % 2)),
            Self::Any(value) => value,
        }
    }
}

/// A bus address.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Address {
    /// A page of memory.
    Page(u16),
    /// In a page.
    In(u16, u16),
    /// At the end of memory.
    End(u8),
    /// Anything.
    Any(u64),
}

impl Address {
    /// Returns the address, in a memory of `pages` pages.
    pub fn get(self, pages: u64) -> u64 {
        match self {
            Self::Page(page) => MEMORY_BASE + u64::from(page) % pages * PAGE,
            Self::In(page, at) => MEMORY_BASE + u64::from(page) % pages * PAGE + u64::from(at) % PAGE,
            Self::End(back) => MEMORY_BASE + pages * PAGE - u64::from(back),
            Self::Any(address) => address,
        }
    }
}

/// Writes as much as lies in memory.
pub fn poke(memory: &GuestMemory, address: u64, bytes: &[u8]) {
    if (MEMORY_BASE..memory.end()).contains(&address) {
        let room = (memory.end() - address) as usize;
        memory.write(address, &bytes[..bytes.len().min(room)]);
    }
}
