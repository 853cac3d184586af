//! A guest that moves from one device to another, on an adapter that the test controls.

mod fields;
mod hostile;
mod world;

use pvrdma_verbs::{AsyncEvent, QpEvent, QueuePair};
use pvrdma_verbs_types::{Completion, WcOpcode, WcStatus};
use serde_json::Value;

use super::SaveError;
use crate::abi::ring::eqe;
use crate::device::PvrdmaDevice;
use crate::inspect::ObjectKind;
use crate::objects::GSI_HANDLE;
use crate::stats::Phase;
use crate::testing::{AsyncEntry, MockDevice, MockHca, QpInit, SendWr, register};
use world::{Populated, World, records};

/// Kinds of objects whose description is the same before and after.
const SHOWN: [ObjectKind; 9] = [
    ObjectKind::Context,
    ObjectKind::Pd,
    ObjectKind::Mr,
    ObjectKind::Cq,
    ObjectKind::Srq,
    ObjectKind::Qp,
    ObjectKind::Traffic,
    ObjectKind::Gid,
    ObjectKind::Ring,
];

/// Describes the objects of a device, without the differences that a move makes: the mock adapter saves only the state
/// of a queue pair, and queues that the guest has destroyed have no handle.
fn shown(world: &Populated) -> Vec<Value> {
    let device: &PvrdmaDevice<MockHca> = &world.test.device;
    let mut shown: Vec<_> = SHOWN.iter().map(|&kind| device.inspect_objects(kind)).collect();
    for qp in shown.iter_mut().filter_map(Value::as_array_mut).flatten().filter_map(Value::as_object_mut) {
        qp.remove("attrs");
        if qp.contains_key("send_ring") && qp.get("handle") == Some(&world.orphan.into()) {
            qp.retain(|key, _| !["send_cq", "recv_cq", "srq"].contains(&key.as_str()));
        }
    }
    shown
}

/// The description of a restored device is that of the saved one, and its own state is the same stream again.
#[test]
fn a_restored_device_is_the_saved_one() {
    let mut world = Populated::new();
    let (before, saved) = (shown(&world), world.save());
    let budget = world.test.device.core().budget.used();
    world.move_on(&saved).unwrap();
    let after = shown(&world);
    for (kind, (before, after)) in SHOWN.iter().zip(before.iter().zip(&after)) {
        assert_eq!(before, after, "{kind}");
        assert!(before.as_array().is_some_and(|list| !list.is_empty()), "{kind}");
    }
    assert_eq!(records(&saved), records(&world.save()));
    // A dead completion queue has no list of pages any more.
    assert!(world.test.device.core().budget.used() <= budget);
}

/// Objects that are created after the move get the handles and numbers that they would have got before it.
#[test]
fn the_next_handles_are_those_of_the_saved_device() {
    let next = |world: &Populated| {
        let driver = &world.driver;
        let context = driver.open().unwrap();
        let pd = driver.create_pd(Some(&context)).unwrap();
        let cq = driver.create_cq(Some(&context), 8).unwrap();
        let srq = driver.create_srq(&pd, 8, 1, 0).unwrap();
        let (_buffer, mr) = driver.registered_buffer(&pd, 100, 1).unwrap();
        let qp = driver.create_qp(&QpInit::rc(&pd, &cq)).unwrap();
        [context.handle, pd.handle, cq.handle, srq.handle, mr.handle, mr.lkey, qp.handle, qp.qpn]
    };
    let mut moved = Populated::new();
    let saved = moved.save();
    moved.move_on(&saved).unwrap();
    moved.resume();
    assert_eq!(next(&moved), next(&Populated::new()));
    // The first handle after a reset of the driver, too.
    let after_reset = |world: &Populated| {
        let objects = &world.test.device.core().objects;
        world.driver.pci().set_register(register::CTL, 2);
        objects.qps.vacancy()
    };
    assert_eq!(after_reset(&moved), after_reset(&Populated::new()));
}

/// Requests, receives and completions continue where they were, each once.
#[test]
fn rings_go_on_where_they_were() {
    let mut world = Populated::new();
    let saved = world.save();
    world.move_on(&saved).unwrap();
    world.resume();
    let (hca, qp) = (world.hca(), world.rc.handle);
    let popped = |hca: &MockDevice| hca.pop_send(qp).unwrap().map(|work| work.wr_id);
    assert_eq!([popped(&hca), popped(&hca), popped(&hca)], [Some(12), Some(13), None]);
    // One of the two requests that were taken before was retired before.
    for _ in 0..3 {
        hca.retire(qp);
    }
    assert_eq!(world.rc.send_ring().cons_head(), world.rc.send_ring().prod_tail());
    assert_eq!(hca.pop_recv(qp).unwrap().map(|work| work.wr_id), Some(21));
    assert_eq!(hca.pop_shared(world.srq.handle).unwrap().map(|work| work.wr_id), Some(31));
    let waiting: Vec<u64> = std::iter::from_fn(|| world.cq.poll()).map(|cqe| cqe.wr_id).collect();
    assert_eq!(waiting, [1, 2]);
    let completion = Completion::new(qp, 3, WcOpcode::Send, WcStatus::Success);
    let seen = world.driver.notifications().len();
    hca.complete_send(qp, &completion).unwrap();
    assert_eq!(world.cq.poll().map(|cqe| cqe.wr_id), Some(3));
    assert!(seen > 0);
    // The broken ring stays broken.
    assert!(hca.pop_send(world.broken.handle).is_err());
    // A QP whose completion queue is gone works, and completes to nothing.
    let core = world.test.device.core();
    let orphan = core.objects.qps.get(world.orphan).unwrap();
    assert!(hca.complete_send(world.orphan, &completion).is_err());
    assert_eq!(orphan.verbs.qpn().get() & 0xffff, world.orphan);
}

/// The handle of the GSI QP is not one that the table assigns.
#[test]
fn an_event_of_the_gsi_qp_waits_for_room_across_a_move() {
    let mut world = Populated::new();
    // The ring is full.
    world.hca().event(AsyncEvent::Qp(QpEvent::Fatal, GSI_HANDLE));
    let saved = world.save();
    world.move_on(&saved).unwrap();
    world.resume();
    let is_in = |events: Vec<AsyncEntry>| events.iter().any(|event| event.info == GSI_HANDLE);
    assert!(!is_in(world.driver.async_events()));
    // An access of the guest tries waiting events again.
    world.driver.create_pd(None).unwrap();
    assert!(is_in(world.driver.async_events()));
}

/// A process whose doorbell page is memory posts and arms unnoticed. After a move to a device whose doorbells trap, its
/// posts are found, and it is notified once of each completion of which it was not notified before.
#[test]
fn a_process_whose_page_is_memory_moves() {
    /// When the guest arms its queue, and when a request completes.
    #[derive(Clone, Copy, PartialEq, Debug)]
    enum Case {
        Armed,
        Completed,
        Notified,
        ArmedInThePause,
    }
    for case in [Case::Armed, Case::Completed, Case::Notified, Case::ArmedInThePause] {
        let mut world = World::new();
        let pages = world.map_pages();
        let driver = world.probe();
        let context = driver.open().unwrap();
        let pd = driver.create_pd(Some(&context)).unwrap();
        let cq = driver.create_cq(Some(&context), 16).unwrap();
        let mut qp = driver.create_qp(&QpInit::rc(&pd, &cq)).unwrap();
        let completion = Completion::new(qp.handle, 1, WcOpcode::Send, WcStatus::Success);
        if case == Case::ArmedInThePause {
            world.test.device.pause();
        }
        cq.arm();
        pages.pass();
        if matches!(case, Case::Completed | Case::Notified) {
            world.hca().complete_send(qp.handle, &completion).unwrap();
        }
        if case == Case::Notified {
            pages.advance(1_000_000);
            pages.pass();
            assert_eq!(driver.notifications(), [cq.handle]);
        }
        qp.post_send(&[SendWr::send(1, &[])]).unwrap();
        assert_eq!((pages.faults(), world.hca().notified(qp.handle)), (1, (0, 0)), "{case:?}");
        let saved = world.save();
        world.move_on(&saved).unwrap();
        world.resume();
        assert_eq!(world.hca().pop_send(qp.handle).unwrap().map(|work| work.wr_id), Some(1), "{case:?}");
        let once = vec![cq.handle];
        assert_eq!(driver.notifications(), if case == Case::Completed { once.clone() } else { vec![] }, "{case:?}");
        if case == Case::Completed {
            cq.arm();
        }
        world.hca().complete_send(qp.handle, &completion).unwrap();
        assert_eq!(driver.notifications(), once, "{case:?}");
    }
}

/// Events that waited for room come after those in the ring, each once, and both vectors are raised.
#[test]
fn events_that_wait_come_in_their_order() {
    let mut world = Populated::new();
    let counts = world.test.irqs.counts();
    let saved = world.save();
    world.move_on(&saved).unwrap();
    world.resume();
    let after = world.test.irqs.counts();
    assert_eq!(after[0], counts[0], "a response is announced once");
    assert!(after[1] > counts[1] && after[2] > counts[2]);
    let mut events = Vec::new();
    let mut notifications = Vec::new();
    loop {
        let (some, more) = (world.driver.async_events(), world.driver.notifications());
        if some.is_empty() && more.is_empty() {
            break;
        }
        events.extend(some.iter().filter(|event| event.kind == eqe::QP_FATAL).map(|event| event.info));
        notifications.extend(more);
        // Any access of the guest makes the device look for room.
        world.rc.ring_send();
    }
    let count = u32::try_from(events.len()).unwrap();
    assert_eq!(events, (2..count + 2).collect::<Vec<_>>());
    assert!(events.len() > 512 && notifications.len() > 1024);
    // One of them did not fit the ring when the first round was posted, and is not listed twice.
    let (first, rest) = notifications[notifications.len() - world::NOTIFICATIONS..].split_first().unwrap();
    let all = 0..u32::try_from(world::NOTIFICATIONS).unwrap();
    assert_eq!(rest, all.filter(|handle| handle != first).collect::<Vec<_>>());
}

/// A device in reset, and one between the handshake and its activation.
#[test]
fn devices_without_a_running_driver() {
    let mut world = World::new();
    let saved = world.save();
    world.move_on(&saved).unwrap();
    assert_eq!(records(&saved), records(&world.save()));
    world.resume();
    world.probe().query_port().unwrap();

    let mut world = World::new();
    let driver = world.probe();
    let [low, high] = [driver.dsr() & 0xffff_ffff, driver.dsr() >> 32].map(|half| u32::try_from(half).unwrap());
    driver.pci().set_register(register::DSRLOW, low);
    driver.pci().set_register(register::DSRHIGH, high);
    let saved = world.save();
    world.move_on(&saved).unwrap();
    assert_eq!(world.test.device.status().phase, Phase::Handshake);
    assert_eq!(records(&saved), records(&world.save()));
    world.resume();
    driver.pci().set_register(register::IMR, 0);
    driver.pci().set_register(register::CTL, 0);
    driver.query_port().unwrap();
}

#[test]
fn a_device_that_runs_is_not_saved() {
    let world = Populated::new();
    world.resume();
    assert!(matches!(world.test.device.save(&mut Vec::new()), Err(SaveError::NotPaused)));
}

/// A state that is longer than the device may keep is not written.
#[test]
fn the_size_of_a_state_is_bounded() {
    let world = Populated::new();
    world.test.device.pause();
    let length = world.save().len() as u64;
    world.test.device.core().budget.set_limit(length - 1);
    assert!(matches!(world.test.device.save(&mut Vec::new()), Err(SaveError::Stream(_))));
}

/// An idle device with a driver and its QP 1 is small.
#[test]
fn the_state_of_an_idle_driver_is_small() {
    let world = World::new();
    let driver = world.probe();
    let pd = driver.create_pd(None).unwrap();
    let cq = driver.create_cq(None, 512).unwrap();
    let _gsi = driver.create_qp(&QpInit::gsi(&pd, &cq)).unwrap();
    world.test.device.pause();
    let length = world.save().len();
    assert!(length <= 4 << 10, "{length}");
}

/// The memory of a paused device, and the state that was saved, may already be elsewhere.
#[test]
fn a_paused_device_fails_when_it_resumes() {
    let world = World::new();
    let driver = world.probe();
    let produced = driver.async_ring().prod_tail();
    let saved = world.save();
    world.test.device.fail();
    assert_eq!(driver.async_ring().prod_tail(), produced);
    let mut again = Vec::new();
    world.test.device.save(&mut again).unwrap();
    assert_eq!(records(&again), records(&saved));
    world.resume();
    assert_eq!(world.test.device.status().recovery.map(|recovery| recovery.told), Some(true));
    assert_ne!(driver.async_ring().prod_tail(), produced);
}

/// The next process that recovers the device after a crash gets its outline as soon as it is restored.
#[test]
fn a_restored_device_has_its_outline_before_it_resumes() {
    let mut world = World::new();
    let _driver = world.probe();
    let outline = world.test.device.read_outline();
    assert_ne!((outline.interrupt_mask, outline.shared_region), (u32::MAX, 0));
    let saved = world.save();
    let successor = World::new();
    successor.test.device.restore(&mut &saved[..]).unwrap();
    assert_eq!(successor.test.device.read_outline(), outline);
    world.move_on(&saved).unwrap();
    assert_eq!(world.test.device.read_outline(), outline);
}
