//! A guest with a device on the mock adapter that can move to another device.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use pvrdma_pci_function::PciFunction;
use pvrdma_saved_state::Reader;
use pvrdma_verbs::{AsyncEvent, QpEvent, testing::gid};
use pvrdma_verbs_types::{Completion, WcOpcode, WcStatus};

use crate::saved::RestoreError;
use crate::testing::{
    Context, Cq, Driver, FastMr, GuestMemory, MappedPages, MockBackend, MockDevice, MovingFunction, Mr, Pd, Qp, QpInit,
    RecvWr, Request, SendWr, Srq, TestDevice, command_id,
};

/// Number of events posted: more than the ring of 512 entries has room for.
const EVENTS: u32 = 600;
/// Number of notifications posted at the end, when the ring of 1024 entries is full.
pub(super) const NOTIFICATIONS: usize = 1100;

/// Returns the records of a stream, without its header, which has the time.
pub(super) fn records(stream: &[u8]) -> Vec<(u16, Vec<u8>)> {
    let mut input = stream;
    let mut reader = Reader::new(&mut input, u64::MAX).unwrap();
    let mut records = Vec::new();
    while let Some(record) = reader.next().unwrap() {
        records.push((record.kind, record.body.to_vec()));
    }
    records
}

/// A device with its guest.
pub(super) struct World {
    pub(super) test: TestDevice<MockBackend>,
    pub(super) backend: MockBackend,
    function: Arc<MovingFunction>,
}

impl World {
    pub(super) fn new() -> Self {
        let backend = MockBackend::new();
        let config = TestDevice::<MockBackend>::config(1);
        let test = TestDevice::new(&backend, config, GuestMemory::new(16 << 20));
        let function = MovingFunction::new(test.function());
        Self { test, backend, function }
    }

    /// Probes the device.
    pub(super) fn probe(&self) -> Driver {
        let function: Arc<dyn PciFunction> = Arc::<MovingFunction>::clone(&self.function);
        Driver::probe(function, &self.test.memory, &self.test.irqs).unwrap()
    }

    pub(super) fn hca(&self) -> Arc<MockDevice> {
        self.backend.device()
    }

    /// Makes the doorbell pages of the device memory, until it moves on.
    pub(super) fn map_pages(&self) -> Arc<MappedPages> {
        let pages = MappedPages::new(&self.test.device);
        self.function.move_to(Arc::clone(&pages) as _);
        pages
    }

    /// Pauses the device and returns its state.
    pub(super) fn save(&self) -> Vec<u8> {
        let mut saved = Vec::new();
        self.test.device.pause();
        self.test.device.save(&mut saved).unwrap();
        saved
    }

    /// Restores a state in a new device, which takes the place of the old one in any case.
    pub(super) fn move_on(&mut self, saved: &[u8]) -> Result<(), RestoreError> {
        let backend = MockBackend::new();
        let config = TestDevice::<MockBackend>::config(1);
        let successor = self.test.successor(&backend, config, self.test.memory.another_space());
        (self.test, self.backend) = (successor, backend);
        self.function.move_to(self.test.function());
        let mut input = saved;
        self.test.device.restore(&mut input)?;
        assert!(input.is_empty(), "{} bytes are left", input.len());
        self.test.device.finish_restore()
    }

    pub(super) fn resume(&self) {
        self.test.device.resume();
    }
}

/// A guest with objects of all kinds, in many states.
pub(super) struct Populated {
    world: World,
    pub(super) driver: Driver,
    /// Queue of a process.
    pub(super) cq: Cq,
    /// A connected QP: four requests published, two taken, one of them retired; two receives, one taken.
    pub(super) rc: Qp,
    pub(super) srq: Srq,
    /// A QP whose send ring is broken.
    pub(super) broken: Qp,
    /// Handle of a QP whose completion queues and shared receive queue are gone.
    pub(super) orphan: u32,
    /// Objects that only have to exist.
    #[expect(clippy::type_complexity, reason = "only kept")]
    _kept: (Vec<Context>, Vec<Pd>, Vec<Cq>, Vec<Qp>, Vec<Mr>, FastMr),
}

impl Deref for Populated {
    type Target = World;

    fn deref(&self) -> &World {
        &self.world
    }
}

impl DerefMut for Populated {
    fn deref_mut(&mut self) -> &mut World {
        &mut self.world
    }
}

impl Populated {
    pub(super) fn new() -> Self {
        let world = World::new();
        let (driver, hca) = (world.probe(), world.hca());
        driver.bind_gid(0, gid(1)).unwrap();
        let bind = Request::new(command_id::CREATE_BIND).u32(16, 1024).u32(20, 7).u32(24, 3);
        driver.execute(&bind.set(28, &gid(3).0).u8(44, driver.gid_type())).unwrap();
        // Each table has a gap, and a next handle that is not the first free one.
        let contexts = [(); 3].map(|()| driver.open().unwrap());
        let [first, process, last] = contexts;
        first.close().unwrap();
        let (kernel, pd) = (driver.create_pd(None).unwrap(), driver.create_pd(Some(&process)).unwrap());
        driver.create_pd(None).unwrap().destroy().unwrap();
        let kernel_cq = driver.create_cq(None, 64).unwrap();
        let cq = driver.create_cq(Some(&process), 64).unwrap();
        let small = driver.create_cq(Some(&process), 2).unwrap();
        let gone = driver.create_cq(Some(&process), 2).unwrap();
        let mut srq = driver.create_srq(&pd, 16, 2, 3).unwrap();
        let ended = driver.create_srq(&pd, 16, 2, 0).unwrap();
        let (_buffer, mr) = driver.registered_buffer(&pd, 20_000, 7).unwrap();
        let (dma, fast) = (driver.dma_mr(&kernel).unwrap(), driver.fast_mr(&kernel, 9).unwrap());

        let gsi = driver.create_qp(&QpInit::gsi(&kernel, &kernel_cq)).unwrap();
        let ud = driver.create_qp(&QpInit::ud(&pd, &cq)).unwrap();
        let mut rc = driver.create_qp(&QpInit { signal_all: true, ..QpInit::rc(&pd, &cq) }).unwrap();
        rc.to_init(7).unwrap();
        rc.publish_send(&[10, 11, 12, 13].map(|id| SendWr::send(id, &[]))).unwrap();
        rc.publish_recv(&[20, 21].map(|id| RecvWr::new(id, &[]))).unwrap();
        for _ in 0..2 {
            hca.pop_send(rc.handle).unwrap().unwrap();
        }
        hca.retire(rc.handle);
        hca.pop_recv(rc.handle).unwrap().unwrap();
        let shared = driver.create_qp(&QpInit { srq: Some(&srq), ..QpInit::rc(&pd, &cq) }).unwrap();
        srq.post(&[30, 31].map(|id| RecvWr::new(id, &[]))).unwrap();
        hca.pop_shared(srq.handle).unwrap().unwrap();

        let broken = driver.create_qp(&QpInit::rc(&pd, &cq)).unwrap();
        broken.send_ring().set_prod_tail(65);
        hca.pop_send(broken.handle).unwrap_err();
        let overrun = driver.create_qp(&QpInit::rc(&pd, &small)).unwrap();
        let done = |qp: &Qp, id| Completion::new(qp.handle, id, WcOpcode::Send, WcStatus::Success);
        while hca.complete_send(overrun.handle, &done(&overrun, 0)).is_ok() {}
        let orphan = driver.create_qp(&QpInit { srq: Some(&ended), ..QpInit::rc(&pd, &gone) }).unwrap();
        gone.destroy().unwrap();
        ended.destroy().unwrap();

        cq.arm();
        for id in [1, 2] {
            hca.complete_send(rc.handle, &done(&rc, id)).unwrap();
        }
        cq.arm_solicited();
        kernel_cq.arm();
        for handle in 2..EVENTS {
            hca.event(AsyncEvent::Qp(QpEvent::Fatal, handle));
        }
        let core = world.test.device.core();
        for handle in (0..1024).chain(0..u32::try_from(NOTIFICATIONS).unwrap()) {
            core.hub.notify_cq(&core.memory.view(), handle);
        }
        let orphan = orphan.handle;
        let kept = (
            vec![process, last],
            vec![kernel, pd],
            vec![kernel_cq, small],
            vec![gsi, ud, shared, overrun],
            vec![mr, dma],
            fast,
        );
        Self { world, driver, cq, rc, srq, broken, orphan, _kept: kept }
    }
}
