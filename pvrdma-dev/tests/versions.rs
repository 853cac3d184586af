//! Each version of the interface, with the driver of that version.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod common;

use std::sync::Arc;

use common::{Process, VERSIONS, connect, gid};
use pvrdma_dev::{
    DeviceConfig,
    testing::{AddressHandle, Driver, GuestMemory, ProbeOptions, RecvWr, SendWr, TestDevice, access, status},
};
use pvrdma_rxe::{Rxe, RxeConfig};

const QKEY: u32 = 0x1111_1111;

/// Conformance 74: two guests with a device of each version, with a driver of that version and with the newest one,
/// exchange messages on a connection and by datagrams.
#[test]
fn ping_pong() {
    for (version, roce) in VERSIONS {
        for driver_version in [version, 20] {
            let backend = Arc::new(Rxe::new(RxeConfig::default()).unwrap());
            let [(_test_a, a), (_test_b, b)] = [1, 2].map(|host| {
                let config = DeviceConfig::new("version").with_version(version).with_roce(roce);
                let test = TestDevice::of_host(host, &*backend, config, GuestMemory::new(16 << 20));
                let options = ProbeOptions { driver_version, ..ProbeOptions::default() };
                let driver = Driver::probe_with(test.function(), &test.memory, &test.irqs, options).unwrap();
                assert_eq!(driver.version(), version);
                driver.bind_gid(0, gid(host)).unwrap();
                (test, driver)
            });
            play(&a, &b);
        }
    }
}

fn play(driver_a: &Driver, driver_b: &Driver) {
    let [mut a, mut b] = [driver_a, driver_b].map(|driver| Process::new(driver, true, 64));
    let [(memory_a, mr_a), (memory_b, mr_b)] =
        [&a, &b].map(|process| process.driver.registered_buffer(&process.pd, 8192, access::ALL).unwrap());
    let (mut qp_a, mut qp_b) = (a.rc(), b.rc());
    connect(&mut qp_a, 1, &mut qp_b, 2);
    let (mut ud_a, mut ud_b) = (a.ud(), b.ud());
    ud_a.start_datagrams(QKEY).unwrap();
    ud_b.start_datagrams(QKEY).unwrap();
    for round in 0..50 {
        memory_a.fill_pattern(round);
        qp_b.post_recv(&[RecvWr::new(1, &[memory_b.sge(&mr_b, 0, 4096)])]).unwrap();
        qp_a.post_send(&[SendWr::send(2, &[memory_a.sge(&mr_a, 0, 3000)])]).unwrap();
        let (sent, received) = (a.cq.wait(), b.cq.wait());
        assert_eq!((sent.status, received.status, received.byte_len), (status::SUCCESS, status::SUCCESS, 3000));
        assert_eq!((sent.qp, received.qp), (qp_a.handle.into(), qp_b.handle.into()));
        assert_eq!(memory_b.read(0, 3000), memory_a.read(0, 3000));

        ud_a.post_recv(&[RecvWr::new(3, &[memory_a.sge(&mr_a, 4096, 4096)])]).unwrap();
        let to = AddressHandle::new(b.pd.handle, gid(1));
        ud_b.post_send(&[SendWr::datagram(4, &[memory_b.sge(&mr_b, 0, 1000)], &to, ud_a.qpn, QKEY)]).unwrap();
        let (sent, received) = (b.cq.wait(), a.cq.wait());
        assert_eq!((sent.status, received.status, received.byte_len), (status::SUCCESS, status::SUCCESS, 1040));
        assert_eq!(received.src_qp, ud_b.qpn);
        assert_eq!(memory_a.read(4096 + 40, 1000), memory_b.read(0, 1000));
    }
}
