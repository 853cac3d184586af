//! Devices for tests.
#![allow(dead_code, unreachable_pub, clippy::allow_attributes, reason = "each test uses some of it")]

use std::sync::Arc;

use pvrdma_dev::{
    DeviceConfig,
    testing::{Context, Cq, Driver, GuestMemory, MockBackend, MockDevice, Path, Pd, Qp, QpInit, TestDevice},
};
use pvrdma_rxe::{Rxe, RxeConfig};
pub use pvrdma_verbs::testing::gid;
use pvrdma_verbs_types::GidType;

/// Every version of the interface, with each GID type that its driver accepts.
pub const VERSIONS: [(u32, GidType); 6] = [
    (17, GidType::RoceV1),
    (18, GidType::RoceV1),
    (18, GidType::RoceV2),
    (19, GidType::RoceV2),
    (20, GidType::RoceV1),
    (20, GidType::RoceV2),
];

/// Returns a device on the software adapter.
pub fn rxe_device() -> TestDevice<Rxe> {
    rxe_device_with(TestDevice::<Rxe>::config(1))
}

/// Returns a device of this configuration on a software adapter of its own.
pub fn rxe_device_with(config: DeviceConfig) -> TestDevice<Rxe> {
    TestDevice::new(&Rxe::new(RxeConfig::default()).unwrap(), config, GuestMemory::new(64 << 20))
}

/// Returns two devices that reach each other, with GIDs 1 and 2 bound.
pub fn rxe_pair() -> [(TestDevice<Rxe>, Driver); 2] {
    rxe_pair_with(GuestMemory::new(128 << 20))
}

/// Same as [`rxe_pair`], with this memory for the second guest.
pub fn rxe_pair_with(memory: Arc<GuestMemory>) -> [(TestDevice<Rxe>, Driver); 2] {
    let backend = Rxe::new(RxeConfig::default()).unwrap();
    [(1, GuestMemory::new(128 << 20)), (2, memory)].map(|(host, memory)| rxe_member(&backend, host, memory))
}

/// Returns one of several devices that reach each other, with the GID of its host bound.
pub fn rxe_member(backend: &Rxe, host: u8, memory: Arc<GuestMemory>) -> (TestDevice<Rxe>, Driver) {
    let test = TestDevice::of_host(host, backend, TestDevice::<Rxe>::config(host), memory);
    let driver = test.driver();
    driver.bind_gid(0, gid(host)).unwrap();
    (test, driver)
}

/// Returns a device on a mock adapter that the test controls.
pub fn mock_device() -> (TestDevice<MockBackend>, Arc<MockDevice>) {
    mock_device_with(TestDevice::<MockBackend>::config(1), GuestMemory::new(64 << 20))
}

/// Same as [`mock_device`], with this configuration and memory.
pub fn mock_device_with(config: DeviceConfig, memory: Arc<GuestMemory>) -> (TestDevice<MockBackend>, Arc<MockDevice>) {
    let backend = MockBackend::new();
    (TestDevice::new(&backend, config, memory), backend.device())
}

/// Objects that a process has before it creates queue pairs.
pub struct Process {
    pub driver: Driver,
    pub context: Option<Context>,
    pub pd: Pd,
    pub cq: Cq,
}

impl Process {
    /// Creates the objects of a process, or of the kernel.
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
