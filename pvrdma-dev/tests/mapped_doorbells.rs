//! Doorbell pages that are memory: what rings tell in place of doorbells, and what is inferred in place of requests to
//! arm.
#![expect(clippy::unwrap_used, reason = "what goes wrong ends the test")]

mod common;

use std::sync::Arc;

use common::{connect, gid, mock_device, rxe_member};
use pvrdma_dev::testing::{
    Cq, Driver, GuestMemory, MappedPages, MockBackend, MockDevice, Qp, QpInit, RecvWr, SendWr, TestDevice, access,
    status,
};
use pvrdma_dev::{ObjectKind, PciFunction};
use pvrdma_rxe::{Rxe, RxeConfig};
use pvrdma_verbs::{Backend, Completion, WcOpcode, WcStatus};

const MICROSECOND: u64 = 1_000;

fn counter<B: Backend + 'static>(test: &TestDevice<B>, name: &str) -> u64 {
    test.device.status().counters.iter().find(|counter| counter.name == name).unwrap().value
}

/// A driver whose user doorbells are stores to memory.
fn mapped<B: Backend + 'static>(test: &TestDevice<B>) -> (Arc<MappedPages>, Driver) {
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

/// For N posts and polls in steady state no doorbell of a process comes as a message, and stores are noticed once for a
/// context and once for each time that the page was taken away.
#[test]
fn steady_state_takes_no_message() {
    const MESSAGES: u64 = 2_000;
    let backend = Rxe::new(RxeConfig::default()).unwrap();
    let mut ends: Vec<_> = [1, 2]
        .map(|host| {
            let memory = GuestMemory::new(128 << 20);
            let test = TestDevice::new(&backend, TestDevice::<Rxe>::config(host), memory);
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
        // The watcher goes to sleep now and then, between a post and its look at the latest.
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

/// The kernel's page and what is on it stay as they are: doorbells trap and arming is exact.
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

/// Until its page is touched a process rings and arms by messages, as with a client that maps nothing. From the touch
/// on its rings are watched, what it made before and after alike.
#[test]
fn a_process_is_watched_from_its_first_touch_on() {
    let (test, mock, pages, driver) = mock();
    let context = driver.open().unwrap();
    let pd = driver.create_pd(Some(&context)).unwrap();
    let cq = driver.create_cq(Some(&context), 16).unwrap();
    let mut qp = driver.create_qp(&QpInit::rc(&pd, &cq)).unwrap();
    let contexts = || test.device.inspect_objects(ObjectKind::Context)[0]["doorbells"].clone();
    assert_eq!(contexts(), "trapped");
    // As a message, behind the page's back.
    test.device.bar_write(2, u64::from(pd.uar) * 4096 + 4, &(cq.handle | 1 << 30).to_le_bytes());
    mock.complete_send(qp.handle, &success(qp.handle)).unwrap();
    assert_eq!(driver.notifications(), [cq.handle], "armed exactly");
    mock.complete_send(qp.handle, &success(qp.handle)).unwrap();
    pages.advance(1_000_000_000);
    assert_eq!(pages.pass().due, None, "and only once");

    qp.post_send(&[SendWr::send(1, &[])]).unwrap();
    assert_eq!((pages.faults(), mock.notified(qp.handle)), (1, (0, 0)));
    assert_eq!(pages.pass().moved, 1);
    assert_eq!((contexts(), mock.notified(qp.handle)), ("mapped".into(), (1, 0)));
    // What lay in the queue unconsumed at that moment is announced.
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

/// An adapter may leave its queue to a guest that polls. It is told when polls are not heard any more.
#[test]
fn an_adapter_does_not_wait_for_polls_that_nobody_hears() {
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

/// A consumer that arms and sleeps is woken by what it does not consume, from the third time on at once; one that
/// consumes is left alone.
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
    assert!(driver.notifications().is_empty(), "it became a poller");
}

/// A watcher that sleeps until what was due then is woken for what is due earlier, and only for that.
#[test]
fn a_sleeping_watcher_is_woken_for_what_is_due() {
    let (_test, mock, pages, driver) = mock();
    let (cq, qp) = process(&driver);
    cq.arm();
    pages.pass();
    mock.complete_send(qp.handle, &success(qp.handle)).unwrap();
    assert_eq!(pages.wakes(), 0, "it is awake");
    let due = pages.idle().due.unwrap();
    mock.complete_send(qp.handle, &success(qp.handle)).unwrap();
    assert_eq!(pages.wakes(), 0, "it looks in time");
    pages.advance(due - pages.now());
    pages.pass();
    assert_eq!(driver.notifications(), [cq.handle]);
    pages.advance(1_000_000_000);
    pages.pass();
    assert_eq!(pages.idle().due, None);
    mock.complete_send(qp.handle, &success(qp.handle)).unwrap();
    assert_eq!(driver.notifications(), [cq.handle], "it is overdue, nobody needs to look");
    assert_eq!(pages.wakes(), 1, "but for whether that was of use");
}

/// A watcher that rests while somebody polls is woken by a completion, once: who polls is likely to post then. One that
/// is awake, or sleeps because a store would wake it, is not.
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
    // Nothing is due any more, and the queue is one that is looked at late.
    pages.advance(1_000_000_000);
    for awake in [MappedPages::pass, MappedPages::idle] {
        awake(&pages);
        completes();
        assert_eq!((pages.wakes(), awake(&pages).completed), (2, false));
        cq.wait();
    }
}

/// A page is taken from its last process before the next one has it: the next store is noticed, although nobody went to
/// sleep between them.
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

/// What has ended is not looked at, and holds nothing back.
#[test]
fn what_has_ended_is_not_watched() {
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
    // A reset ends everything, and a new driver begins anew.
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

/// A watcher that is there changes nothing for guests whose pages are not mapped.
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
