//! Doorbell pages that are memory: rings are polled instead of doorbells, and armings are inferred.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod common;

use std::sync::Arc;

use common::{connect, gid, mock_device, rxe_member};
use pvrdma_dev::{
    ObjectKind,
    testing::{
        Cq, Driver, GuestMemory, MappedPages, MockBackend, MockDevice, Qp, QpInit, RecvWr, SendWr, TestDevice, access,
        status,
    },
};
use pvrdma_pci_function::PciFunction;
use pvrdma_rxe::{Rxe, RxeConfig};
use pvrdma_verbs::Backend;
use pvrdma_verbs_types::{Completion, WcOpcode, WcStatus};

const MICROSECOND: u64 = 1_000;

fn counter<B: Backend<Hca: 'static>>(test: &TestDevice<B>, name: &str) -> u64 {
    test.device.status().counters.iter().find(|counter| counter.name == name).unwrap().value
}

/// A driver of processes whose doorbells are stores to memory.
fn mapped<B: Backend<Hca: 'static>>(test: &TestDevice<B>) -> (Arc<MappedPages>, Driver) {
    let pages = MappedPages::new(&test.device);
    let driver = Driver::probe(Arc::clone(&pages) as Arc<dyn PciFunction>, &test.memory, &test.irqs).unwrap();
    (pages, driver)
}

/// A process with a CQ and an RC QP.
fn process(driver: &Driver) -> (Cq, Qp) {
    let context = driver.open().unwrap();
    let pd = driver.create_pd(Some(&context)).unwrap();
    let cq = driver.create_cq(Some(&context), 16).unwrap();
    let qp = driver.create_qp(&QpInit::rc(&pd, &cq)).unwrap();
    (cq, qp)
}

fn mock() -> (TestDevice<MockBackend>, Arc<MockDevice>, Arc<MappedPages>, Driver) {
    let (test, mock) = mock_device();
    let (pages, driver) = mapped(&test);
    (test, mock, pages, driver)
}

fn success(qp: u32) -> Completion {
    Completion::new(qp, 1, WcOpcode::Send, WcStatus::Success)
}

/// Posts and polls in a steady state cause no doorbell messages. Stores cause one fault for each context, and one for
/// each time that the page was revoked.
#[test]
fn steady_state_takes_no_message() {
    const MESSAGES: u64 = 2_000;
    let backend = Rxe::new(RxeConfig::default()).unwrap();
    let mut ends: Vec<_> = [1, 2]
        .map(|host| {
            let memory = GuestMemory::new(128 << 20);
            let test = TestDevice::of_host(host, &backend, TestDevice::<Rxe>::config(host), memory);
            let (pages, driver) = mapped(&test);
            driver.bind_gid(0, gid(host)).unwrap();
            let context = driver.open().unwrap();
            let pd = driver.create_pd(Some(&context)).unwrap();
            let cq = driver.create_cq(Some(&context), 64).unwrap();
            let qp = driver.create_qp(&QpInit::rc(&pd, &cq)).unwrap();
            let (buffer, mr) = driver.registered_buffer(&pd, 8192, access::ALL).unwrap();
            (test, pages, driver, cq, qp, buffer, mr)
        })
        .into();
    let [a, b] = &mut ends[..] else { unreachable!() };
    connect(&mut a.4, 1, &mut b.4, 2);
    for round in 0..MESSAGES {
        b.4.post_recv(&[RecvWr::new(round, &[b.5.sge(&b.6, 0, 64)])]).unwrap();
        b.1.pass();
        a.3.arm();
        a.4.post_send(&[SendWr::send(round, &[a.5.sge(&a.6, 0, 64)])]).unwrap();
        // The watcher goes to sleep now and then; the latest moment is between a post and the watcher's poll.
        if round % 97 == 0 {
            a.1.idle()
        } else {
            a.1.pass()
        };
        for end in [&mut *a, &mut *b] {
            let cqe = end.3.wait();
            assert_eq!((cqe.wr_id, cqe.status), (round, status::SUCCESS));
            assert_eq!(end.3.poll(), None);
        }
    }
    for (test, pages, ..) in [&*a, &*b] {
        assert_eq!(counter(test, "doorbells_of_processes"), 0);
        assert_eq!(counter(test, "doorbells_mapped"), 1);
        assert!(pages.faults() <= pages.arms() + 1, "{} faults, {} arms", pages.faults(), pages.arms());
        assert!(counter(test, "doorbells_found") >= MESSAGES);
    }
}

/// The kernel's page and its queues are not affected: doorbells trap, and arming is exact.
#[test]
fn the_kernel_is_not_inferred() {
    let (test, mock, pages, driver) = mock();
    let pd = driver.create_pd(None).unwrap();
    let cq = driver.create_cq(None, 16).unwrap();
    let mut qp = driver.create_qp(&QpInit::rc(&pd, &cq)).unwrap();
    qp.post_send(&[SendWr::send(1, &[])]).unwrap();
    assert_eq!(mock.notified(qp.handle), (1, 0));
    mock.complete_send(qp.handle, &success(qp.handle)).unwrap();
    pages.advance(1_000_000_000);
    assert_eq!(pages.idle().due, None);
    assert!(driver.notifications().is_empty(), "it did not arm");
    cq.arm();
    mock.complete_send(qp.handle, &success(qp.handle)).unwrap();
    assert_eq!(driver.notifications(), [cq.handle]);
    assert_eq!((pages.faults(), counter(&test, "notifications_inferred")), (0, 0));
}

/// Until a process touches its page, it rings and arms by messages, like a client that maps nothing. From the first
/// touch on, all its rings are polled, whether created before or after.
#[test]
fn a_process_is_watched_from_its_first_touch_on() {
    let (test, mock, pages, driver) = mock();
    let context = driver.open().unwrap();
    let pd = driver.create_pd(Some(&context)).unwrap();
    let cq = driver.create_cq(Some(&context), 16).unwrap();
    let mut qp = driver.create_qp(&QpInit::rc(&pd, &cq)).unwrap();
    let contexts = || test.device.inspect_objects(ObjectKind::Context)[0]["doorbells"].clone();
    assert_eq!(contexts(), "trapped");
    // By a message, without a store to the page.
    let _ = test.device.bar_write(2, u64::from(pd.uar) * 4096 + 4, &(cq.handle | 1 << 30).to_le_bytes());
    mock.complete_send(qp.handle, &success(qp.handle)).unwrap();
    assert_eq!(driver.notifications(), [cq.handle], "armed exactly");
    mock.complete_send(qp.handle, &success(qp.handle)).unwrap();
    pages.advance(1_000_000_000);
    assert_eq!(pages.pass().due, None, "and only once");

    qp.post_send(&[SendWr::send(1, &[])]).unwrap();
    assert_eq!((pages.faults(), mock.notified(qp.handle)), (1, (0, 0)));
    assert_eq!(pages.pass().moved, 1);
    assert_eq!((contexts(), mock.notified(qp.handle)), ("mapped".into(), (1, 0)));
    // Completions in the queue at that moment are announced.
    pages.advance(20 * MICROSECOND);
    pages.pass();
    assert_eq!(driver.notifications(), [cq.handle]);

    let mut srq = driver.create_srq(&pd, 16, 1, 0).unwrap();
    let mut later = driver.create_qp(&QpInit::rc(&pd, &cq)).unwrap();
    srq.post(&[RecvWr::new(1, &[])]).unwrap();
    later.post_recv(&[RecvWr::new(1, &[])]).unwrap();
    assert_eq!((pages.faults(), pages.pass().moved), (1, 2));
    assert_eq!((mock.srq_notified(srq.handle), mock.notified(later.handle)), (1, (0, 1)));
    assert_eq!(pages.pass().moved, 0, "a doorbell is rung once");
    assert_eq!(counter(&test, "doorbells_of_processes"), 1);
}

/// An adapter may leave a queue to a guest that polls it. The adapter is told when the device can no longer see the
/// polls.
#[test]
fn an_adapter_does_not_wait_for_polls_that_are_not_seen() {
    let (_test, mock, pages, driver) = mock();
    let (_cq, mut qp) = process(&driver);
    let _another = process(&driver);
    assert_eq!(mock.cqs_armed(), 0);
    qp.post_send(&[SendWr::send(1, &[])]).unwrap();
    pages.pass();
    assert_eq!(mock.cqs_armed(), 1);
    qp.post_send(&[SendWr::send(2, &[])]).unwrap();
    pages.idle();
    qp.post_send(&[SendWr::send(3, &[])]).unwrap();
    pages.pass();
    assert_eq!(mock.cqs_armed(), 1, "they are not heard since then");
}

/// A sleeping consumer is woken for completions that it does not consume, from the third time on without a delay. A
/// consumer that keeps consuming gets no events.
#[test]
fn a_sleeper_is_woken_without_having_armed() {
    let (test, mock, pages, driver) = mock();
    let (mut cq, qp) = process(&driver);
    cq.arm();
    pages.pass();
    for round in 0..8 {
        mock.complete_send(qp.handle, &success(qp.handle)).unwrap();
        if round < 2 {
            assert!(driver.notifications().is_empty());
            let delay = [20, 4_000][round] * MICROSECOND;
            assert!(pages.pass().due.unwrap() <= pages.now() + delay);
            pages.advance(delay - 1);
            pages.pass();
            assert!(driver.notifications().is_empty());
            pages.advance(1);
            pages.pass();
        }
        assert_eq!(driver.notifications(), [cq.handle], "round {round}");
        cq.arm();
        assert!(cq.poll().is_some() && cq.poll().is_none());
        pages.advance(MICROSECOND);
        pages.pass();
    }
    assert_eq!(counter(&test, "notifications_inferred"), 8);
    assert_eq!(counter(&test, "notifications_useful"), 2);
    // In time: nothing to announce.
    for _ in 0..64 {
        mock.complete_send(qp.handle, &success(qp.handle)).unwrap();
        let _ = driver.notifications();
        cq.wait();
        pages.advance(MICROSECOND);
        pages.pass();
    }
    for _ in 0..64 {
        mock.complete_send(qp.handle, &success(qp.handle)).unwrap();
        cq.wait();
        pages.advance(MICROSECOND);
        pages.pass();
    }
    assert!(driver.notifications().is_empty(), "a process that polls is not notified");
}

/// A sleeping watcher is woken if work becomes due before its own deadline, and only then.
#[test]
fn a_sleeping_watcher_is_woken_for_due_work() {
    let (_test, mock, pages, driver) = mock();
    let (cq, qp) = process(&driver);
    cq.arm();
    pages.pass();
    mock.complete_send(qp.handle, &success(qp.handle)).unwrap();
    assert_eq!(pages.wakes(), 0, "a watcher that polls needs no wake-up");
    let due = pages.idle().due.unwrap();
    mock.complete_send(qp.handle, &success(qp.handle)).unwrap();
    assert_eq!(pages.wakes(), 0, "the watcher polls in time without a wake-up");
    pages.advance(due - pages.now());
    pages.pass();
    assert_eq!(driver.notifications(), [cq.handle]);
    pages.advance(1_000_000_000);
    pages.pass();
    assert_eq!(pages.idle().due, None);
    mock.complete_send(qp.handle, &success(qp.handle)).unwrap();
    assert_eq!(driver.notifications(), [cq.handle], "an overdue queue is announced without a poll of its ring");
    assert_eq!(pages.wakes(), 1, "one wake-up, to judge the notification");
}

/// A watcher that rests while a guest polls is woken once by a completion, because the guest is likely to post then. A
/// watcher that is awake is not woken, and neither is one that a store would wake.
#[test]
fn a_resting_watcher_is_woken_by_a_completion() {
    let (_test, mock, pages, driver) = mock();
    let (mut cq, qp) = process(&driver);
    cq.arm();
    let completes = || mock.complete_send(qp.handle, &success(qp.handle)).unwrap();
    assert!(!pages.rest().completed);
    completes();
    completes();
    assert_eq!((pages.wakes(), pages.rest().completed, pages.rest().completed), (1, true, false));
    completes();
    assert_eq!((pages.wakes(), pages.pass().completed, pages.pass().completed), (2, true, false));
    for _ in 0..3 {
        cq.wait();
    }
    // No event is due any more, and announcements for this queue are delayed.
    pages.advance(1_000_000_000);
    for awake in [MappedPages::pass, MappedPages::idle] {
        awake(&pages);
        completes();
        assert_eq!((pages.wakes(), awake(&pages).completed), (2, false));
        cq.wait();
    }
}

/// Before a page goes to another process, it is revoked, so that the next store is noticed even if the watcher did not
/// sleep in between.
#[test]
fn the_next_process_finds_its_page_renewed() {
    let (test, mock, pages, driver) = mock();
    let context = driver.open().unwrap();
    let uar = context.uar;
    driver.pci().doorbell(uar, 0, 1 << 30);
    pages.pass();
    assert_eq!(pages.faults(), 1);
    context.close().unwrap();
    let (cq, mut qp) = process(&driver);
    assert_eq!(cq.uar, uar);
    assert_eq!(test.device.inspect_objects(ObjectKind::Context)[0]["doorbells"], "trapped");
    qp.post_send(&[SendWr::send(1, &[])]).unwrap();
    assert_eq!((pages.faults(), pages.pass().moved), (2, 1));
    assert_eq!(mock.notified(qp.handle), (1, 0));
}

/// Destroyed objects are not polled, and their memory is released.
#[test]
fn destroyed_objects_are_not_watched() {
    let (test, _mock, pages, driver) = mock();
    let (cq, mut qp) = process(&driver);
    let before = test.device.status().kept;
    qp.post_send(&[SendWr::send(1, &[])]).unwrap();
    pages.pass();
    qp.destroy().unwrap();
    cq.destroy().unwrap();
    assert!(test.device.status().kept.used_bytes < before.used_bytes);
    let end = pages.idle();
    assert_eq!((end.moved, end.due), (0, None));
    // A reset ends everything, and a new driver starts from the beginning.
    let (_cq, mut qp) = process(&driver);
    qp.post_send(&[SendWr::send(1, &[])]).unwrap();
    pages.pass();
    test.device.reset();
    assert_eq!(pages.idle().moved, 0);
    let driver = Driver::probe(Arc::clone(&pages) as Arc<dyn PciFunction>, &test.memory, &test.irqs).unwrap();
    let (_cq, mut qp) = process(&driver);
    qp.post_send(&[SendWr::send(1, &[])]).unwrap();
    assert_eq!(pages.pass().moved, 1);
}

/// A watcher does not affect guests whose pages are not mapped.
#[test]
fn nothing_changes_without_a_touch() {
    let (test, driver) = rxe_member(&Rxe::new(RxeConfig::default()).unwrap(), 1, GuestMemory::new(64 << 20));
    let pages = MappedPages::new(&test.device);
    let (mut cq, mut qp) = process(&driver);
    let peer = qp.qpn;
    qp.connect(&pvrdma_dev::testing::Path::to(gid(1), peer)).unwrap();
    cq.arm();
    qp.post_recv(&[RecvWr::new(2, &[])]).unwrap();
    qp.post_send(&[SendWr::send(1, &[])]).unwrap();
    assert_eq!(driver.wait_notification(), [cq.handle]);
    cq.wait_many(2);
    assert_eq!((pages.pass().moved, pages.pass().due, pages.window().start), (0, None, 1));
    assert!(counter(&test, "doorbells_of_processes") >= 3);
}
