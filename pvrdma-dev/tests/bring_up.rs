//! From power-on to a working device and back, in the order of the kernel driver.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod common;

use common::{VERSIONS, gid, rxe_device, rxe_device_with};
use pvrdma_dev::{
    DeviceConfig,
    testing::{Driver, ProbeError, ProbeOptions, QpInit, access, qp_type, register},
};
use pvrdma_pci_function::PciFunction;

/// Conformance 3, 5, 7, 8, 9: the probe of the driver, and the commands that follow it while the RDMA core registers
/// the device (spec §3.3).
#[test]
fn probe_and_first_commands() {
    let test = rxe_device();
    let driver = test.driver();
    assert_eq!(driver.version(), 20);
    let caps = driver.dsr_bytes()[72..].to_vec();
    assert_eq!(driver.unquiesce(), 0);
    let port = driver.query_port().unwrap();
    assert_eq!(port[0], 4, "ACTIVE");
    assert!(u32::from_le_bytes(port[12..16].try_into().unwrap()) <= driver.cap_u32(192));
    driver.bind_gid(0, gid(1)).unwrap();
    assert_eq!(driver.query_pkey(0), Ok(0xffff));

    // ib_mad.
    let pd = driver.create_pd(None).unwrap();
    let mr = driver.dma_mr(&pd).unwrap();
    let cq = driver.create_cq(None, 1024).unwrap();
    cq.arm();
    let mut qp = driver.create_qp(&QpInit::gsi(&pd, &cq)).unwrap();
    assert_eq!(qp.qpn, 1);
    qp.start_datagrams(0x8001_0000).unwrap();
    let buffers = driver.buffer(512 * 512, 0, Default::default());
    for i in 0..512 {
        let sge = buffers.dma_sge(mr.lkey, usize::try_from(i).unwrap() * 512, 296);
        qp.post_recv(&[pvrdma_dev::testing::RecvWr::new(i, &[sge])]).unwrap();
    }
    assert!(qp.post_recv(&[pvrdma_dev::testing::RecvWr::new(512, &[])]).is_err(), "the ring is full");
    assert_eq!(caps, driver.dsr_bytes()[72..], "capabilities never change");

    qp.destroy().unwrap();
    cq.destroy().unwrap();
    mr.destroy().unwrap();
    pd.destroy().unwrap();
    driver.unbind_gid(0, gid(1)).unwrap();
    driver.remove();
}

/// Conformance 10, 11, 71: loading and unloading twenty times returns all memory, and nothing is written afterwards. A
/// probe also works without a removal before it, as after a crash.
#[test]
fn load_and_unload() {
    let test = rxe_device();
    let free = test.memory.free_pages();
    for round in 0..20 {
        let driver = test.driver();
        let context = driver.open().unwrap();
        let pd = driver.create_pd(Some(&context)).unwrap();
        let (buffer, mr) = driver.registered_buffer(&pd, 10_000, access::ALL).unwrap();
        let cq = driver.create_cq(Some(&context), 100).unwrap();
        let qp = driver.create_qp(&QpInit::rc(&pd, &cq)).unwrap();
        qp.destroy().unwrap();
        cq.destroy().unwrap();
        mr.destroy().unwrap();
        buffer.free();
        if round % 2 == 0 {
            pd.destroy().unwrap();
            context.close().unwrap();
        }
        if round % 3 == 2 {
            driver.forget();
        } else {
            driver.remove();
        }
    }
    assert_eq!(test.memory.free_pages(), free);
    let status = test.device.status();
    test.driver().remove();
    assert_eq!(test.device.status().objects, status.objects);
}

/// Conformance 8: activation and commands without a shared region are refused without any other effect.
#[test]
fn not_without_handshake() {
    let test = rxe_device();
    let driver = test.driver();
    let pci = driver.pci().clone();
    driver.remove();
    pci.set_bus_master(true);
    for (register, value) in [(register::CTL, 0), (register::REQUEST, 0), (register::CTL, 1), (register::CTL, 77)] {
        pci.set_register(register, value);
        assert_ne!(pci.register(register::ERR), 0);
    }
    pci.set_register(register::CTL, 2);
    assert_eq!(pci.register(register::ERR), 0);
    pci.set_register(register::DSRLOW, 0);
    pci.set_register(register::DSRHIGH, 0x1234);
    pci.set_register(register::CTL, 0);
    assert_ne!(pci.register(register::ERR), 0, "an address outside of memory is refused");
    assert_eq!(test.irqs.counts()[1..], [0, 0]);
}

/// Conformance 74: each version is probed with the GID type that its driver requires.
#[test]
fn versions() {
    for (version, roce) in VERSIONS {
        let config = DeviceConfig::new("v").with_version(version).with_roce(roce);
        let test = rxe_device_with(config);
        let driver = test.driver();
        assert_eq!(driver.version(), version);
        let context = driver.open().unwrap();
        let pd = driver.create_pd(Some(&context)).unwrap();
        let cq = driver.create_cq(Some(&context), 16).unwrap();
        let init = QpInit { qp_type: qp_type::RC, ..QpInit::rc(&pd, &cq) };
        let qp = driver.create_qp(&init).unwrap();
        assert!(version >= 20 || qp.qpn < driver.cap_u32(76));
        driver.remove();
    }
}

/// Conformance 14, 15: with the legacy interrupt line, commands complete through ICR, and there are no other
/// interrupts.
#[test]
fn legacy_interrupt() {
    let config = DeviceConfig::new("intx").with_intx(true);
    let test = rxe_device_with(config);
    let options = ProbeOptions { msix: false, ..ProbeOptions::default() };
    let driver = Driver::probe_with(test.function(), &test.memory, &test.irqs, options).unwrap();
    for _ in 0..3 {
        driver.query_port().unwrap();
        assert_eq!(driver.pci().register(register::ICR), 0);
    }
    assert_eq!((test.irqs.line().1, test.irqs.counts()), (3, [0; 3]));
    driver.remove();
}

/// A function reset clears everything, including bus mastering; the next probe works.
#[test]
fn function_reset() {
    let test = rxe_device();
    let driver = test.driver();
    driver.create_pd(None).unwrap();
    test.device.reset();
    assert_eq!(driver.pci().config(4) & 6, 0);
    driver.pci().set_register(register::REQUEST, 0);
    assert_ne!(driver.pci().register(register::ERR), 0);
    driver.forget();
    test.driver().query_port().unwrap();
    let small = ProbeOptions { event_ring_pages: 1, ..ProbeOptions::default() };
    let probe = Driver::probe_with(test.function(), &test.memory, &test.irqs, small);
    assert_eq!(probe.unwrap_err(), ProbeError::GidTypes(0), "event rings without data pages (CVE-2021-3607)");
}
