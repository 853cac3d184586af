//! Registers and life cycle, over a mock adapter that the test controls.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod common;

use std::sync::Arc;

use common::{Process, gid, mock_device, mock_device_with};
use pvrdma_dev::{
    Phase,
    testing::{
        CommandError, Driver, GuestMemory, MEMORY_BASE, MockBackend, MockDevice, QpInit, Request, TestDevice, access,
        command_id, register,
    },
};
use pvrdma_guest_memory::{Backing, DmaRange, PinPolicy};
use pvrdma_pci_function::PciFunction;
use pvrdma_verbs::{AsyncEvent, PortEvent};
use vm_memory::FileOffset;
use vm_memory::mmap::MmapRegion;

const ACTIVATE: u32 = 0;
const UNQUIESCE: u32 = 1;
const RESET: u32 = 2;
const MAC_LOW: u64 = 0x20;
const MAC_HIGH: u64 = 0x24;
/// Bytes of the shared region that the driver writes. The capabilities follow.
const FROM_DRIVER: usize = 72;
/// Bytes of the shared region.
const REGION: usize = 280;

type MockTest = TestDevice<MockBackend>;

/// Writes CTL and reads ERR.
fn ctl(driver: &Driver, value: u32) -> u32 {
    driver.pci().set_register(register::CTL, value);
    driver.pci().register(register::ERR)
}

/// Does the handshake, unmasks and activates, as the probe does. Returns the value of ERR.
fn bring_up(driver: &Driver) -> u32 {
    driver.pci().set_bus_master(true);
    driver.pci().set_msix(true);
    driver.write_dsr_address();
    driver.pci().set_register(register::IMR, 0);
    ctl(driver, ACTIVATE)
}

fn query_port() -> Request {
    Request::new(command_id::QUERY_PORT).u8(16, 1)
}

/// A sign from the adapter.
fn port_event(mock: &MockDevice) {
    mock.event(AsyncEvent::Port(PortEvent::Active));
}

/// All of memory.
fn snapshot(memory: &GuestMemory) -> Vec<u8> {
    memory.read_vec(MEMORY_BASE, usize::try_from(memory.end() - MEMORY_BASE).unwrap())
}

/// Conformance 3.
#[test]
fn the_version_is_the_configured_one_before_and_after_a_reset() {
    for version in 17..=20 {
        let (test, _) = mock_device_with(MockTest::config_of_version(version), GuestMemory::new(1 << 20));
        let driver = test.driver();
        assert_eq!(driver.pci().register(register::VERSION), version);
        ctl(&driver, RESET);
        assert_eq!(driver.pci().register(register::VERSION), version);
    }
}

/// Conformance 4, 49: accesses of any size and offset are harmless, and BAR 2 reads as zeros.
#[test]
fn odd_accesses_do_nothing() {
    let (test, _) = mock_device();
    let driver = test.driver();
    for bar in 0..7 {
        for at in (0..0x2004).step_by(2).chain([u64::MAX - 3, u64::MAX]) {
            for len in [0, 1, 2, 4, 8, 9] {
                let mut data = vec![0xee; len];
                test.device.bar_read(bar, at, &mut data);
                if bar != 1 || len != 4 {
                    assert!(data.iter().all(|&byte| byte == 0));
                    let _ = test.device.bar_write(bar, at, &vec![0xff; len]);
                }
            }
        }
    }
    assert_eq!(ctl(&driver, ACTIVATE), 0, "it is still active");
    let pci = driver.pci();
    assert_eq!((pci.register(register::DSRLOW), pci.register(register::CTL), pci.register(0x28)), (0, 0, 0));
}

#[test]
fn the_ethernet_address_can_be_read() {
    let (test, _) = mock_device();
    let driver = test.driver();
    let pci = driver.pci();
    assert_eq!((pci.register(MAC_LOW), pci.register(MAC_HIGH)), (0x0000_5452, 0x0100));
    pci.set_register(MAC_HIGH, 5);
    assert_eq!(pci.register(MAC_HIGH), 5);
}

/// Conformance 5, 7.
#[test]
fn the_handshake_writes_the_capabilities_and_nothing_else() {
    let (test, _) = mock_device();
    let driver = test.driver();
    let region = driver.dsr_bytes();
    let (pci, memory, dsr) = (driver.pci(), driver.memory(), driver.dsr());
    ctl(&driver, RESET);
    memory.write(dsr, &[0x5a; 4096]);
    memory.write(dsr, &region[..FROM_DRIVER]);
    pci.set_register(register::DSRLOW, u32::try_from(dsr & 0xffff_ffff).unwrap());
    assert_eq!(memory.read_vec(dsr + 72, 208), [0x5a; 208], "DSRLOW alone does nothing");
    pci.set_register(register::DSRHIGH, u32::try_from(dsr >> 32).unwrap());
    let after = memory.read_vec(dsr, 4096);
    assert_eq!(after[..REGION], region);
    assert_eq!(after[REGION..], [0x5a; 4096 - REGION]);
    let caps = (driver.gid_type(), driver.cap_u8(200), driver.cap_u8(199), driver.cap_u32(188));
    assert_eq!(caps, (2, 0, 1, 1024), "GID types, mode, ports, doorbell pages");
    pci.set_register(register::IMR, 0);
    assert_eq!(ctl(&driver, ACTIVATE), 0);
    driver.create_pd(None).unwrap();
    assert_eq!(driver.dsr_bytes(), region);
}

/// Conformance 8, 9.
#[test]
fn the_order_of_the_life_cycle() {
    let (test, _) = mock_device();
    let driver = test.driver();
    test.device.reset();
    driver.pci().set_bus_master(true);
    let request = || driver.submit(query_port().bytes());
    assert_eq!(driver.pci().register(register::ERR), 0);
    assert_ne!(ctl(&driver, ACTIVATE), 0);
    assert_ne!(ctl(&driver, UNQUIESCE), 0);
    assert_ne!(request(), 0);
    driver.write_dsr_address();
    assert_ne!(request(), 0);
    assert_eq!(ctl(&driver, ACTIVATE), 0);
    assert_eq!(ctl(&driver, ACTIVATE), 0);
    assert_eq!(ctl(&driver, UNQUIESCE), 0);
    assert_ne!(ctl(&driver, 7), 0);
    assert_eq!(test.device.status().phase, Phase::Active);
    assert_eq!(ctl(&driver, RESET), 0);
    assert_ne!(ctl(&driver, ACTIVATE), 0);
}

/// Conformance 8: invalid shared regions.
#[test]
fn bad_shared_regions_are_refused_and_leave_nothing() {
    let (test, _) = mock_device();
    let driver = test.driver();
    let (memory, dsr, end) = (driver.memory(), driver.dsr(), driver.memory().end());
    let good = driver.dsr_bytes();
    let refused = |changes: &[(u64, &[u8])]| {
        memory.write(dsr, &good[..FROM_DRIVER]);
        memory.write(dsr + 72, &[0; 208]);
        for (at, value) in changes {
            memory.write(dsr + at, value);
        }
        driver.write_dsr_address();
        assert_eq!(memory.read_vec(dsr + 72, 208), [0; 208], "{changes:x?}");
        assert_ne!(ctl(&driver, ACTIVATE), 0, "{changes:x?}");
        assert_ne!(driver.submit(query_port().bytes()), 0);
    };
    let [command, response, events, notifications] = [16, 24, 32, 48];
    for count in [0_u32, 1, 513, u32::MAX] {
        refused(&[(events, &count.to_le_bytes())]);
        refused(&[(notifications, &count.to_le_bytes())]);
    }
    for bad in [0, 4, end, end - 8, u64::MAX, u64::MAX - 7] {
        for at in [command, response, events + 8, notifications + 8] {
            refused(&[(at, &bad.to_le_bytes())]);
        }
    }
    refused(&[(0, &[0; 4]), (command, &[0; 8]), (response, &[0; 8])]);
    for bad in [0, 4, dsr + 4, end, end - 272, u64::MAX - 7] {
        driver.pci().set_register(register::DSRLOW, u32::try_from(bad & 0xffff_ffff).unwrap());
        driver.pci().set_register(register::DSRHIGH, u32::try_from(bad >> 32).unwrap());
        assert_ne!(ctl(&driver, ACTIVATE), 0, "{bad:#x}");
    }
    memory.write(dsr, &good[..FROM_DRIVER]);
    assert_eq!(bring_up(&driver), 0);
    driver.query_port().unwrap();
    let status = test.device.status();
    let accepted = status.counters.iter().find(|counter| counter.name == "handshakes").unwrap();
    assert_eq!(accepted.value, 2, "two handshakes: that of the probe, and the last one");
}

/// Conformance 10, 11, 37: a reset destroys every object and ends all writes; afterwards the device works again.
#[test]
fn reset_and_a_new_handshake_end_everything() {
    for end in ["reset", "handshake", "function"] {
        let (test, mock) = mock_device_with(MockTest::config(1), GuestMemory::new(2 << 20));
        let driver = test.driver();
        let process = Process::new(&driver, true, 16);
        let (buffer, _mr) = driver.registered_buffer(&process.pd, 8192, access::ALL).unwrap();
        driver.create_srq(&process.pd, 16, 1, 0).unwrap();
        let qp = process.rc();
        driver.bind_gid(3, gid(9)).unwrap();
        process.cq.arm();
        mock.take_calls();
        match end {
            "reset" => driver.pci().set_register(register::CTL, RESET),
            "handshake" => driver.write_dsr_address(),
            _ => test.device.reset(),
        }
        let mut calls = mock.take_calls();
        calls.sort();
        assert_eq!(calls, ["destroy MR 0x101", "destroy QP 2", "destroy SRQ 0", "unbind 3"], "{end}");
        let status = test.device.status();
        assert_eq!((status.objects, status.kept.used_bytes), (Default::default(), 0));
        assert_eq!(driver.pci().register(register::IMR), u32::MAX);
        driver.pci().set_register(register::IMR, 0);

        let raised = test.irqs.counts();
        buffer.fill(0xc7);
        for page in qp.pages() {
            test.memory.write(*page, &[0xc7; 4096]);
        }
        let before = snapshot(&test.memory);
        test.memory.space().set_enabled(true);
        port_event(&mock);
        process.cq.arm();
        qp.ring_send();
        qp.ring_recv();
        assert_eq!(snapshot(&test.memory), before);
        assert_eq!((test.irqs.counts(), mock.notified(qp.handle)), (raised, (0, 0)));
        assert!(mock.take_calls().is_empty());

        if end == "function" {
            assert_eq!(test.device.status().phase, Phase::Reset);
        }
        assert_eq!(bring_up(&driver), 0);
        let context = driver.open().unwrap();
        driver.create_pd(Some(&context)).unwrap();
    }
}

/// Conformance 12.
#[test]
fn without_bus_mastering_nothing_is_reached() {
    let (test, mock) = mock_device();
    let driver = test.driver();
    let process = Process::new(&driver, false, 16);
    let qp = driver.create_qp(&QpInit::rc(&process.pd, &process.cq)).unwrap();
    let raised = test.irqs.counts();
    driver.pci().set_bus_master(false);
    assert!(!test.memory.space().is_enabled());
    assert_ne!(driver.submit(query_port().bytes()), 0);
    qp.ring_send();
    assert_eq!((mock.notified(qp.handle), test.irqs.counts()), ((0, 0), raised));
    // Nothing is written until there is a handshake, either.
    driver.pci().set_bus_master(true);
    assert!(driver.create_pd(None).is_err());
    qp.ring_send();
    assert_eq!((mock.notified(qp.handle), test.irqs.counts()), ((0, 0), raised));
    assert_eq!((test.device.status().phase, test.device.status().objects.qps), (Phase::Reset, 0));
    assert_eq!(bring_up(&driver), 0);
    driver.create_pd(None).unwrap();

    driver.pci().set_bus_master(false);
    test.memory.write(driver.dsr() + 72, &[0; 208]);
    driver.write_dsr_address();
    assert_eq!(driver.dsr_bytes()[72..], [0; 208], "no DMA, so no handshake");
    assert_ne!(ctl(&driver, ACTIVATE), 0);
}

/// Conformance 13, 15: a device with masked interrupts executes commands all the same.
#[test]
fn masked_commands_complete_silently() {
    let (test, _) = mock_device();
    let driver = test.driver();
    let raised = test.irqs.counts();
    driver.pci().set_register(register::IMR, u32::MAX);
    assert_eq!(driver.submit(Request::new(command_id::CREATE_PD).bytes()), 0);
    driver.pci().set_register(register::IMR, 0);
    assert_eq!(test.irqs.counts(), raised);
    assert_eq!(test.device.status().objects.pds, 1);
    driver.create_pd(None).unwrap();
}

/// Events between handshake and activation are not written; later ones are.
#[test]
fn events_before_activation_are_not_written() {
    let (test, mock) = mock_device();
    let driver = test.driver();
    driver.write_dsr_address();
    driver.pci().set_register(register::IMR, 0);
    let tail = driver.async_ring().prod_tail();
    port_event(&mock);
    assert_eq!((driver.async_ring().prod_tail(), test.irqs.count(1)), (tail, 0));
    assert_eq!(ctl(&driver, ACTIVATE), 0);
    port_event(&mock);
    assert_eq!((driver.async_ring().prod_tail(), test.irqs.count(1)), (tail + 1, 1));
}

/// Activation does not populate the guest's memory: for a large guest this takes longer than the writer of the register
/// may wait.
#[test]
fn activation_populates_nothing() {
    let (test, _) = mock_device_with(MockTest::config(1), GuestMemory::with_policy(1 << 20, PinPolicy::All));
    assert_eq!(bring_up(&test.driver()), 0);
    assert_eq!(test.memory.space().pinned_bytes(), 0);
    test.memory.space().finish_pinning().unwrap();
    assert_eq!(test.memory.space().pinned_bytes(), 1 << 20);
}

/// With `pin=all`, the device does not start while some of the guest's memory is known to be missing.
#[test]
fn activation_needs_resident_memory() {
    let (test, _) = mock_device_with(MockTest::config(1), GuestMemory::with_policy(1 << 20, PinPolicy::All));
    let driver = test.driver();
    // Pages beyond the end of their file cannot be populated.
    let file = tempfile::tempfile().unwrap();
    file.set_len(0x2000).unwrap();
    let offset = FileOffset::new(file.try_clone().unwrap(), 0);
    let mapping = Arc::new(MmapRegion::from_file(offset, 0x2000).unwrap());
    file.set_len(0).unwrap();
    let backing = Some(Backing { mapping, offset: 0 });
    test.memory.space().map(DmaRange { iova: 1 << 40, len: 0x2000, writable: true, backing }).unwrap();
    test.memory.space().finish_pinning().unwrap_err();
    assert_ne!(bring_up(&driver), 0);
    assert!(matches!(driver.execute(&query_port()), Err(CommandError::Refused(_))));
    assert_eq!(test.device.status().phase, Phase::Handshake);
    test.memory.space().unmap(1 << 40, 0x2000).unwrap();
    assert_eq!(ctl(&driver, ACTIVATE), 0);
}

/// Section 10: guests with event rings get an event; others query the port.
#[test]
fn a_link_that_changes_is_a_port_event() {
    let (test, _) = mock_device_with(MockTest::config_of_version(20), GuestMemory::new(1 << 20));
    assert!(test.device.set_link(false).unwrap());
    let driver = test.driver();
    let state = || driver.query_port().unwrap()[0];
    assert!(driver.async_events().is_empty() && state() == 1);
    for (up, kind, state_then) in [(true, 9, 4), (false, 10, 1), (true, 9, 4)] {
        assert!(test.device.set_link(up).unwrap() && !test.device.set_link(up).unwrap());
        let events: Vec<_> = driver.async_events().iter().map(|event| (event.kind, event.info)).collect();
        assert_eq!((events, state()), (vec![(kind, 1)], state_then));
    }
}

/// A change of the path MTU has no event of its own. Port-active makes a driver, or a program, query the port.
#[test]
fn a_path_mtu_that_changes_is_a_port_event() {
    let (test, _) = mock_device_with(MockTest::config_of_version(20), GuestMemory::new(1 << 20));
    let driver = test.driver();
    let heard = || driver.async_events().iter().map(|event| (event.kind, event.info)).collect::<Vec<_>>();
    let path_mtu = || driver.query_port().unwrap()[8];
    for (carried, path_mtu_then) in [(Some(1000), 2), (None, 3), (Some(900), 2)] {
        assert!(test.device.set_uplink_mtu(carried) && !test.device.set_uplink_mtu(carried));
        assert_eq!((heard(), path_mtu()), (vec![(9, 1)], path_mtu_then));
    }
    // No port-active event is sent while the port is down.
    test.device.set_link(false).unwrap();
    assert_eq!(heard(), [(10, 1)]);
    assert!(test.device.set_uplink_mtu(None) && heard().is_empty());
}

/// Changed limits apply to the next driver; the present one keeps the limits that it has read.
#[test]
fn a_driver_gets_new_limits_when_it_starts() {
    let (test, _) = mock_device_with(MockTest::config_of_version(20), GuestMemory::new(4 << 20));
    let driver = test.driver();
    let before = driver.cap_u32(96);
    test.device.set_limits(&[("max_cq".to_owned(), 3)].into()).unwrap();
    assert_eq!(driver.cap_u32(96), before);
    let many: Vec<_> = (0..5).map(|_| driver.create_cq(None, 1).unwrap()).collect();
    drop(many);
    driver.remove();
    let driver = test.driver();
    assert_eq!(driver.cap_u32(96), 3);
    let many: Vec<_> = (0..5).map_while(|_| driver.create_cq(None, 1).ok()).collect();
    assert_eq!(many.len(), 3);
}
