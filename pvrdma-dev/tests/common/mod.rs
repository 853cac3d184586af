//! Devices for tests.
#![allow(dead_code, unreachable_pub, clippy::allow_attributes, reason = "each test uses some of it")]

use std::sync::Arc;

use pvrdma_dev::testing::{Context, Cq, Driver, GuestMemory, Irqs, Path, Pd, Qp, QpInit, StubBackend, StubDevice};
use pvrdma_dev::{DeviceConfig, PciFunction, PvrdmaDevice};
use pvrdma_rxe::{Rxe, RxeConfig};
use pvrdma_verbs::{Backend, Gid, GidType, MacAddr};

/// An IPv4-mapped GID.
pub fn gid(host: u8) -> Gid {
    let mut gid = Gid::default();
    gid.0[10..12].fill(0xff);
    gid.0[12..].copy_from_slice(&[10, 0, 0, host]);
    gid
}

/// Every version of the interface, with each addressing that its driver takes.
pub const VERSIONS: [(u32, GidType); 6] = [
    (17, GidType::RoceV1),
    (18, GidType::RoceV1),
    (18, GidType::RoceV2),
    (19, GidType::RoceV2),
    (20, GidType::RoceV1),
    (20, GidType::RoceV2),
];

/// A device with its guest's memory.
pub struct Bed<B: Backend> {
    pub memory: Arc<GuestMemory>,
    pub irqs: Arc<Irqs>,
    pub device: Arc<PvrdmaDevice<B>>,
    pub backend: Arc<B>,
}

impl<B: Backend + 'static> Bed<B> {
    pub fn new(backend: Arc<B>, config: DeviceConfig, bytes: usize) -> Self {
        Self::on(backend, config, GuestMemory::new(bytes))
    }

    pub fn on(backend: Arc<B>, config: DeviceConfig, memory: Arc<GuestMemory>) -> Self {
        let irqs = Irqs::new();
        let device = PvrdmaDevice::new(config, memory.space().clone(), irqs.clone(), &*backend).unwrap();
        Self { memory, irqs, device, backend }
    }

    pub fn function(&self) -> Arc<dyn PciFunction> {
        self.device.clone()
    }

    pub fn driver(&self) -> Driver {
        Driver::probe(self.function(), &self.memory, &self.irqs).unwrap()
    }
}

impl Bed<Rxe> {
    pub fn rxe() -> Self {
        Self::with_config(DeviceConfig::new("test", MacAddr([0x52, 0x54, 0, 0, 0, 1])))
    }

    pub fn with_config(config: DeviceConfig) -> Self {
        Self::new(Arc::new(Rxe::new(RxeConfig::default()).unwrap()), config, 64 << 20)
    }

    /// Two devices that reach each other, with GIDs 1 and 2 bound.
    pub fn pair() -> [(Self, Driver); 2] {
        Self::pair_with(GuestMemory::new(128 << 20))
    }

    /// The same, with this memory for the second guest.
    pub fn pair_with(memory: Arc<GuestMemory>) -> [(Self, Driver); 2] {
        let backend = Arc::new(Rxe::new(RxeConfig::default()).unwrap());
        [(1, GuestMemory::new(128 << 20)), (2, memory)].map(|(host, memory)| Self::member(&backend, host, memory))
    }

    /// A device of several that reach each other, with the GID of its host bound.
    pub fn member(backend: &Arc<Rxe>, host: u8, memory: Arc<GuestMemory>) -> (Self, Driver) {
        let config = DeviceConfig::new(format!("vm{host}"), MacAddr([0x52, 0x54, 0, 0, 0, host]));
        let bed = Self::on(backend.clone(), config, memory);
        let driver = bed.driver();
        driver.bind_gid(0, gid(host)).unwrap();
        (bed, driver)
    }
}

impl Bed<StubBackend> {
    pub fn stub() -> (Self, Arc<StubDevice>) {
        let config = DeviceConfig::new("stub", MacAddr([0x52, 0x54, 0, 0, 0, 1]));
        let bed = Self::new(Arc::new(StubBackend::new()), config, 64 << 20);
        let stub = bed.backend.device();
        (bed, stub)
    }
}

/// What a process has before it makes queue pairs.
pub struct Process {
    pub driver: Driver,
    pub context: Option<Context>,
    pub pd: Pd,
    pub cq: Cq,
}

impl Process {
    /// A process, or the kernel.
    pub fn new(driver: &Driver, user: bool, entries: u32) -> Self {
        let context = user.then(|| driver.open().unwrap());
        let pd = driver.create_pd(context.as_ref()).unwrap();
        let cq = driver.create_cq(context.as_ref(), entries).unwrap();
        Self { driver: driver.clone(), context, pd, cq }
    }

    pub fn rc(&self) -> Qp {
        self.driver.create_qp(&QpInit::rc(&self.pd, &self.cq)).unwrap()
    }

    pub fn ud(&self) -> Qp {
        self.driver.create_qp(&QpInit::ud(&self.pd, &self.cq)).unwrap()
    }
}

/// Connects two QPs of the devices with these hosts.
pub fn connect(a: &mut Qp, host_a: u8, b: &mut Qp, host_b: u8) {
    a.connect(&Path::to(gid(host_b), b.qpn)).unwrap();
    b.connect(&Path::to(gid(host_a), a.qpn)).unwrap();
}
