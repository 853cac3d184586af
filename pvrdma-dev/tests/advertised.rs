//! A guest can create as many objects of each kind as its device advertises.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod common;

use std::sync::Arc;

use common::{Process, gid};
use pvrdma_dev::{
    Limits,
    testing::{Driver, GuestMemory, Placement, QpInit, TestDevice, access},
};
use pvrdma_link::{ManualClock, memory};
use pvrdma_rxe::{PortConfig, Rxe, RxeConfig, RxeStation};

/// Offsets of the limits in the capabilities.
const MAX_QP: u64 = 76;
const MAX_CQ: u64 = 96;
const MAX_MR: u64 = 104;
const MAX_PD: u64 = 108;
const MAX_SRQ: u64 = 176;
const KINDS: [u64; 5] = [MAX_QP, MAX_CQ, MAX_MR, MAX_PD, MAX_SRQ];

/// A device with a port, which makes a queue pair as expensive as possible. The guest's kernel has a protection domain
/// and a completion queue.
struct Connected {
    device: TestDevice<Rxe>,
    driver: Driver,
    kernel: Process,
    _station: RxeStation,
}

impl Connected {
    fn new(limits: Limits) -> Self {
        let rxe = RxeConfig::default().with_workers(0).with_clock(Arc::new(ManualClock::default()));
        let rxe = Rxe::new(rxe).unwrap();
        let uplink = Arc::new(memory::pair(2).unwrap().0);
        let config = TestDevice::<Rxe>::config(1).with_limits(limits);
        let station = rxe.station(TestDevice::<Rxe>::mac(1));
        station.plug(PortConfig::new(uplink, 4500)).unwrap();
        let device = TestDevice::new(&rxe, config, GuestMemory::new(1 << 30));
        let driver = device.driver();
        driver.bind_gid(0, gid(1)).unwrap();
        let kernel = Process::new(&driver, false, 1024);
        Self { device, driver, kernel, _station: station }
    }

    /// Creates objects of a kind until there are `count`, including the kernel's own. Returns `None` if one was
    /// refused.
    fn make(&self, kind: u64, count: u32) -> Option<()> {
        let Self { device, driver, kernel, .. } = self;
        let count = |made: u32| 0..count - made;
        match kind {
            // Two numbers are reserved.
            MAX_QP => {
                let rings = QpInit { max_send_wr: 256, max_recv_wr: 256, ..QpInit::rc(&kernel.pd, &kernel.cq) };
                let init = QpInit { max_send_sge: 16, max_recv_sge: 16, ..rings };
                let qps: Option<Vec<_>> = count(2).map(|_| driver.create_qp(&init).ok()).collect();
                qps.map(drop)
            }
            MAX_CQ => count(1).map(|_| driver.create_cq(None, 1024).ok()).collect::<Option<Vec<_>>>().map(drop),
            MAX_MR => {
                let pages = device.memory.alloc(128, Placement::Scattered);
                let make = |_| driver.reg_mr_pages(&kernel.pd, 0, 128 << 12, &pages, access::ALL).ok();
                count(0).map(make).collect::<Option<Vec<_>>>().map(drop)
            }
            MAX_PD => count(1).map(|_| driver.create_pd(None).ok()).collect::<Option<Vec<_>>>().map(drop),
            _ => {
                let make = |_| driver.create_srq(&kernel.pd, 256, 16, 0).ok();
                count(0).map(make).collect::<Option<Vec<_>>>().map(drop)
            }
        }
    }
}

/// A device with a low memory limit advertises few objects, and all of them can be created.
#[test]
fn advertised_objects_can_be_created() {
    for kind in KINDS {
        let limits = Limits::default().with_max_memory(24 << 20);
        let connected = Connected::new(limits);
        let count = connected.driver.cap_u32(kind);
        println!("{count} of the capability at {kind}");
        assert!(kind != MAX_QP || (100..16_384).contains(&count), "{count} queue pairs");
        assert!(connected.make(kind, count).is_some(), "{count} of the capability at {kind}");
        assert_eq!(connected.device.device.status().kept.refused, 0);
    }
}

/// With the default limits, memory suffices for all advertised objects.
#[test]
fn the_default_memory_pays_for_the_default_counts() {
    let Limits { verbs, max_memory, .. } = Limits::default();
    let connected = Connected::new(Limits::default());
    let kept = || connected.device.device.status().kept.used_bytes;
    let counts = [verbs.max_qp, verbs.max_cq, verbs.max_mr, verbs.max_pd, verbs.max_srq];
    for (kind, count) in KINDS.into_iter().zip(counts) {
        assert_eq!(connected.driver.cap_u32(kind), count, "the capability at {kind}");
        // Eight more than the kernel has.
        let made = match kind {
            MAX_QP => 2,
            MAX_CQ | MAX_PD => 1,
            _ => 0,
        };
        let before = kept();
        connected.make(kind, made + 8).unwrap();
        let each = (kept() - before).div_ceil(8);
        println!("{each} bytes for each of {count} of the capability at {kind}");
        let all = each * u64::from(count);
        assert!(all <= max_memory - before, "{all} bytes for {count} of the capability at {kind}");
    }
}
