//! Life cycle and registers, as a driver sees them.

use pvrdma_guest_memory::{Backing, DmaRange, PAGE_SIZE, PinPolicy};
use pvrdma_verbs::{AsyncEvent, PortEvent};
use vm_memory::FileOffset;
use vm_memory::mmap::MmapRegion;
use vmm_sys_util::tempfile::TempFile;

use super::*;
use crate::abi::cmd::{self as abi, Opcode};
use crate::abi::dsr::{CAPS_OFFSET, Caps, SharedRegion};
use crate::abi::layout::GuestLayout;
use crate::abi::regs::offset;
use crate::config::DeviceConfig;
use crate::test_rig::{BASE, FREE, PAGES, Rig, config, page};

/// Conformance 3.
#[test]
fn the_version_is_the_configured_one_before_and_after_a_reset() {
    for version in 17..=20 {
        let rig = Rig::version(version);
        assert_eq!(rig.read(offset::VERSION), version);
        rig.ctl(ctl::RESET);
        assert_eq!(rig.read(offset::VERSION), version);
    }
}

/// Conformance 4, 49: any access is survived, and BAR 2 reads as zeros.
#[test]
fn odd_accesses_do_nothing() {
    let rig = Rig::up();
    for bar in 0..7 {
        for at in (0..0x2004).step_by(2).chain([u64::MAX - 3, u64::MAX]) {
            for len in [0, 1, 2, 4, 8, 9] {
                let mut data = vec![0xee; len];
                rig.device.bar_read(bar, at, &mut data);
                if bar != 1 || len != 4 {
                    assert!(data.iter().all(|&byte| byte == 0));
                }
                if bar != 1 || len != 4 {
                    rig.device.bar_write(bar, at, &vec![0xff; len]);
                }
            }
        }
    }
    assert_eq!(rig.ctl(ctl::ACTIVATE), 0, "it is still active");
    assert_eq!((rig.read(offset::DSR_LOW), rig.read(offset::CTL), rig.read(0x28)), (0, 0, 0));
}

#[test]
fn the_ethernet_address_can_be_read() {
    let rig = Rig::new(config());
    assert_eq!((rig.read(offset::MAC_LOW), rig.read(offset::MAC_HIGH)), (0x0000_5452, 0x0100));
    rig.write(offset::MAC_HIGH, 5);
    assert_eq!(rig.read(offset::MAC_HIGH), 5);
}

/// Conformance 5, 7.
#[test]
fn the_handshake_writes_the_capabilities_and_nothing_else() {
    let rig = Rig::enabled(config());
    let region = rig.region();
    let mut bytes = [0; SharedRegion::SIZE];
    region.encode(&mut bytes);
    rig.poke(BASE, &[0x5a; 4096]);
    rig.poke(BASE, &bytes[..72]);
    rig.write(offset::DSR_LOW, u32::try_from(BASE).unwrap());
    assert_eq!(rig.peek(BASE + CAPS_OFFSET, Caps::SIZE), [0x5a; Caps::SIZE], "DSRLOW alone does nothing");
    rig.write(offset::DSR_HIGH, 0);
    let after = rig.peek(BASE, 4096);
    assert_eq!(after[..72], bytes[..72]);
    assert_eq!(after[280..], [0x5a; 4096 - 280]);
    let caps = Caps::decode(&after[72..]);
    assert_eq!((caps.gid_types, caps.mode, caps.phys_port_cnt, caps.max_uar), (2, 0, 1, 1024));
    rig.write(offset::IMR, 0);
    assert_eq!(rig.ctl(ctl::ACTIVATE), 0);
    rig.create_pd(0);
    assert_eq!(rig.peek(BASE, 280), after[..280]);
}

/// Conformance 8, 9.
#[test]
fn the_order_of_the_life_cycle() {
    let rig = Rig::enabled(config());
    assert_eq!(rig.read(offset::ERR), 0);
    assert_ne!(rig.ctl(ctl::ACTIVATE), 0);
    assert_ne!(rig.ctl(ctl::UNQUIESCE), 0);
    assert_ne!(rig.request(), 0);
    rig.show(&rig.region());
    assert_ne!(rig.request(), 0);
    assert_eq!(rig.ctl(ctl::ACTIVATE), 0);
    assert_eq!(rig.ctl(ctl::ACTIVATE), 0);
    assert_eq!(rig.ctl(ctl::UNQUIESCE), 0);
    assert_ne!(rig.ctl(7), 0);
    assert_eq!(rig.device.status().phase, Phase::Active);
    assert_eq!(rig.ctl(ctl::RESET), 0);
    assert_ne!(rig.ctl(ctl::ACTIVATE), 0);
}

/// Conformance 8: shared regions that cannot be.
#[test]
fn bad_shared_regions_are_refused_and_leave_nothing() {
    let rig = Rig::enabled(config());
    let end = page(PAGES);
    let good = rig.region();
    let change = |change: &dyn Fn(&mut SharedRegion)| {
        let mut region = good;
        change(&mut region);
        rig.show(&region);
        assert_eq!(rig.shown().caps, Caps::default(), "{region:x?}");
        assert_ne!(rig.ctl(ctl::ACTIVATE), 0, "{region:x?}");
        assert_ne!(rig.request(), 0);
    };
    for count in [0, 1, 513, u32::MAX] {
        change(&|region| region.async_ring_pages.num_pages = count);
        change(&|region| region.cq_ring_pages.num_pages = count);
    }
    for bad in [0, 4, end, end - 8, u64::MAX, u64::MAX - 7] {
        change(&|region| region.cmd_slot_dma = bad);
        change(&|region| region.resp_slot_dma = bad);
        change(&|region| region.async_ring_pages.pdir_dma = bad);
        change(&|region| region.cq_ring_pages.pdir_dma = bad);
    }
    change(&|region| {
        region.driver_version = 0;
        region.cmd_slot_dma = 0;
        region.resp_slot_dma = 0;
    });
    for bad in [0, 4, BASE + 4, end, end - 272, u64::MAX - 7] {
        rig.show_at(bad);
        assert_ne!(rig.ctl(ctl::ACTIVATE), 0);
    }
    rig.bring_up();
    let status = rig.device.status();
    assert_eq!(status.counters.iter().find(|counter| counter.name == "handshakes").unwrap().value, 1);
}

/// A ring whose data pages are not memory.
#[test]
fn event_rings_must_be_in_memory() {
    let rig = Rig::enabled(config());
    let region = rig.region();
    rig.poke(region.cq_ring_pages.pdir_dma + PAGE_SIZE + 24, &0xffff_f000_u64.to_le_bytes());
    rig.show(&region);
    assert_ne!(rig.ctl(ctl::ACTIVATE), 0);
}

/// Conformance 10, 11, 37: with a reset every object goes, nothing is written any more, and it all works again.
#[test]
fn reset_and_a_new_handshake_end_everything() {
    for end in ["reset", "handshake", "function"] {
        let rig = Rig::up();
        let context = rig.open(1);
        let pd = rig.create_pd(context);
        let cq = rig.create_cq(context);
        rig.create_mr(pd);
        rig.create_srq(pd);
        rig.create_qp(pd, cq);
        let bind = abi::CreateBind { vlan: 0xfff, index: 3, new_gid: [9; 16], gid_type: 2 };
        rig.run(Opcode::CREATE_BIND, &bind).unwrap();
        rig.ring(0, 4, cq | 1 << 30);
        rig.books.take();
        match end {
            "reset" => rig.write(offset::CTL, ctl::RESET),
            "handshake" => rig.show(&rig.region()),
            _ => rig.device.reset(),
        }
        let mut calls = rig.books.take();
        calls.sort();
        assert_eq!(calls, ["destroy MR 0x101", "destroy QP 2", "destroy SRQ 0", "unbind 3"], "{end}");
        assert_eq!(rig.device.status().objects, Default::default());
        assert_eq!(rig.device.status().page_list_extents, 0);
        assert_eq!(rig.read(offset::IMR), u32::MAX);
        rig.write(offset::IMR, 0);

        rig.sink.take();
        for at in FREE..FREE + 32 {
            rig.poke(page(at), &[0xc7; 4096]);
        }
        let before = rig.peek(BASE, usize::try_from(PAGES * PAGE_SIZE).unwrap());
        rig.memory.set_enabled(true);
        let event = AsyncEvent::Port(PortEvent::Active);
        rig.books.events.lock().as_ref().unwrap().event(&rig.memory.view(), event);
        rig.ring(0, 4, cq | 1 << 30);
        rig.ring(0, 0, 2 | 1 << 30);
        rig.device.run_deferred();
        assert_eq!(rig.peek(BASE, before.len()), before);
        assert!(rig.sink.take().is_empty() && rig.books.take().is_empty());

        if end == "function" {
            assert_eq!(rig.device.status().phase, Phase::Reset);
            rig.set_bus_master(true);
            rig.device.config_write(0x42, &0x8002_u16.to_le_bytes());
        }
        rig.bring_up();
        let context = rig.open(1);
        rig.create_pd(context);
    }
}

/// Conformance 12.
#[test]
fn without_bus_mastering_nothing_is_reached() {
    let rig = Rig::up();
    let pd = rig.create_pd(0);
    let cq = rig.create_cq(0);
    let (qp, _) = rig.create_qp(pd, cq);
    rig.set_bus_master(false);
    assert!(!rig.memory.is_enabled());
    rig.place(Opcode::CREATE_PD, &abi::CreatePd::default());
    assert_ne!(rig.request(), 0);
    rig.books.take();
    rig.ring(0, 0, qp | 1 << 30);
    rig.device.run_deferred();
    assert!(rig.books.take().is_empty() && rig.sink.take().is_empty());
    rig.set_bus_master(true);
    rig.create_pd(0);
    rig.ring(0, 0, qp | 1 << 30);
    rig.device.run_deferred();
    assert_eq!(rig.books.take(), ["QP 2 send"]);

    rig.set_bus_master(false);
    rig.show(&rig.region());
    assert_eq!(rig.shown().caps, Caps::default(), "no DMA, so no handshake");
    assert_ne!(rig.ctl(ctl::ACTIVATE), 0);
}

/// Conformance 13, 15: a masked device executes its commands all the same.
#[test]
fn masked_commands_complete_silently() {
    let rig = Rig::up();
    rig.write(offset::IMR, u32::MAX);
    rig.place(Opcode::CREATE_PD, &abi::CreatePd::default());
    assert_eq!(rig.request(), 0);
    rig.write(offset::IMR, 0);
    assert!(rig.sink.take().is_empty());
    rig.create_pd(0);
}

/// Conformance 14.
#[test]
fn a_command_with_the_legacy_interrupt() {
    let rig = Rig::new(DeviceConfig { intx: true, ..config() });
    rig.set_bus_master(true);
    rig.bring_up();
    rig.place(Opcode::CREATE_PD, &abi::CreatePd::default());
    assert_eq!(rig.request(), 0);
    assert_eq!(rig.sink.take(), ["intx true"]);
    assert_eq!((rig.read(offset::ICR), rig.read(offset::ICR)), (1, 0));
    assert_eq!(rig.sink.take(), ["intx false"]);
    rig.place(Opcode::DESTROY_PD, &abi::DestroyPd { pd_handle: 0 });
    assert_eq!(rig.request(), 0);
    assert!(rig.sink.take().is_empty());
}

#[test]
fn events_before_activation_are_not_written() {
    let rig = Rig::enabled(config());
    rig.show(&rig.region());
    rig.write(offset::IMR, 0);
    let event = AsyncEvent::Port(PortEvent::Active);
    rig.books.events.lock().as_ref().unwrap().event(&rig.memory.view(), event);
    assert!(rig.sink.take().is_empty());
    assert_eq!(rig.ctl(ctl::ACTIVATE), 0);
    rig.books.events.lock().as_ref().unwrap().event(&rig.memory.view(), event);
    assert_eq!(rig.sink.take(), ["msix 1"]);
}

/// Reserve-all: while some of the guest's memory cannot be locked, the device does not start.
#[test]
fn activation_needs_resident_memory() {
    let rig = Rig::with_policy(config(), PinPolicy::All);
    rig.set_bus_master(true);
    // Pages behind the end of their file cannot be faulted in.
    let file = TempFile::new().unwrap().into_file();
    file.set_len(0x2000).unwrap();
    let offset = FileOffset::new(file.try_clone().unwrap(), 0);
    let mapping = Arc::new(MmapRegion::from_file(offset, 0x2000).unwrap());
    file.set_len(0).unwrap();
    let backing = Some(Backing { mapping, offset: 0 });
    rig.memory.map(DmaRange { iova: 1 << 40, len: 0x2000, writable: true, backing }).unwrap();
    rig.show(&rig.region());
    assert_ne!(rig.ctl(ctl::ACTIVATE), 0);
    assert_ne!(rig.request(), 0);
    assert_eq!(rig.device.status().phase, Phase::Handshake);
    rig.memory.unmap(1 << 40, 0x2000).unwrap();
    assert_eq!(rig.ctl(ctl::ACTIVATE), 0);
}
