//! Doorbell pages that are memory while their process polls and trap otherwise. The test drives the watcher step by
//! step.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod common;

use std::sync::{Arc, Mutex};

use common::{connect, gid, mock_device};
use pvrdma_dev::{
    DoorbellMode, ObjectKind, Pause, Processors, WindowPolicy,
    testing::{
        Context, Cq, Driver, GuestMemory, MockBackend, MockDevice, Moment, Qp, QpInit, RecvWr, SendWr, TestDevice,
        WindowPages, access, status, wait_for,
    },
};
use pvrdma_pci_function::PciFunction;
use pvrdma_rxe::{Rxe, RxeConfig};
use pvrdma_verbs::{Backend, testing::LogLines};
use pvrdma_verbs_types::{Completion, WcOpcode, WcStatus};

const MICROSECOND: u64 = 1_000;
const MILLISECOND: u64 = 1_000_000;

fn policy(mode: DoorbellMode) -> WindowPolicy {
    WindowPolicy::choose(mode, Processors { available: 2, virtual_processors: 1, watchers: 1 }).unwrap()
}

fn counter<B: Backend<Hca: 'static>>(test: &TestDevice<B>, name: &str) -> u64 {
    test.device.status().counters.iter().find(|counter| counter.name == name).unwrap().value
}

/// A guest with a process, over a mock adapter that the test controls.
struct Guest {
    test: TestDevice<MockBackend>,
    mock: Arc<MockDevice>,
    pages: Arc<WindowPages>,
    driver: Driver,
    context: Context,
    cq: Cq,
    qp: Qp,
}

impl Guest {
    fn new(mode: DoorbellMode) -> Self {
        let (test, mock) = mock_device();
        let pages = WindowPages::new(&test.device, policy(mode));
        let driver = Driver::probe(Arc::clone(&pages) as Arc<dyn PciFunction>, &test.memory, &test.irqs).unwrap();
        let (context, cq, qp) = process(&driver);
        Self { test, mock, pages, driver, context, cq, qp }
    }

    fn counter(&self, name: &str) -> u64 {
        counter(&self.test, name)
    }

    /// Returns the counts of refusals by the kernel: to map a page, and to unmap it.
    fn refused(&self) -> (u64, u64) {
        (self.counter("doorbells_map_refused"), self.counter("doorbells_unmap_refused"))
    }

    fn is_mapped(&self) -> bool {
        let shown = self.test.device.inspect_objects(ObjectKind::Context)[0]["doorbells"].clone();
        let mapped = !self.pages.mapped().is_empty();
        assert_eq!(shown, if mapped { "mapped" } else { "trapped" });
        mapped
    }

    /// Polls until the page is memory.
    fn heat(&self) {
        while self.pages.mapped().is_empty() {
            self.cq.ring_poll();
            self.pages.turn();
        }
    }

    fn complete(&self) {
        let success = Completion::new(self.qp.handle, 1, WcOpcode::Send, WcStatus::Success);
        self.mock.complete_send(self.qp.handle, &success).unwrap();
    }

    fn post(&mut self) {
        self.qp.post_send(&[SendWr::send(1, &[])]).unwrap();
    }
}

/// A process with a CQ and an RC QP.
fn process(driver: &Driver) -> (Context, Cq, Qp) {
    let context = driver.open().unwrap();
    let pd = driver.create_pd(Some(&context)).unwrap();
    let cq = driver.create_cq(Some(&context), 16).unwrap();
    let qp = driver.create_qp(&QpInit::rc(&pd, &cq)).unwrap();
    (context, cq, qp)
}

/// A page becomes memory once its process polls often enough. Posts are then found by the watcher. The page traps again
/// when there are none.
#[test]
fn a_page_is_memory_while_its_process_is_busy() {
    let mut guest = Guest::new(DoorbellMode::Auto);
    assert_eq!(guest.pages.turn(), Pause::Forever);
    for _ in 0..64 {
        guest.cq.ring_poll();
        assert_eq!(guest.pages.turn(), Pause::Forever);
    }
    assert!(!guest.is_mapped());
    guest.cq.ring_poll();
    assert_eq!((guest.pages.turn(), guest.is_mapped()), (Pause::None, true));

    let messages = guest.counter("doorbells_of_processes");
    assert_eq!(messages, 65);
    for round in 1..=20 {
        guest.post();
        assert_eq!(guest.mock.notified(guest.qp.handle).0, round - 1, "no thread has looked");
        assert_eq!(guest.pages.turn(), Pause::None, "there was work");
        assert_eq!(guest.mock.notified(guest.qp.handle).0, round);
        while guest.mock.pop_send(guest.qp.handle).unwrap().is_some() {}
        for _ in 0..100 {
            guest.cq.ring_poll();
        }
        guest.pages.advance(40 * MICROSECOND);
    }
    assert_eq!(guest.counter("doorbells_of_processes"), messages, "no doorbell of it was heard");

    guest.pages.settle();
    assert!(!guest.is_mapped());
    guest.post();
    assert_eq!(guest.mock.notified(guest.qp.handle).0, 21, "the doorbell traps again");
    assert_eq!(guest.counter("doorbells_of_processes"), messages + 1);
    assert_eq!((guest.counter("doorbells_mapped"), guest.counter("doorbells_unmapped")), (1, 1));
    assert_eq!(guest.pages.turn(), Pause::Forever);
}

/// A post at any moment is passed on without a further post: around each step between trapping and memory, and in the
/// middle of the watcher's work.
#[test]
fn no_post_is_lost_in_any_order() {
    for moment in Moment::ALL {
        for turns in 0..4 {
            let guest = Guest::new(DoorbellMode::Mapped);
            let Guest { mock, pages, cq, qp, .. } = guest;
            let (handle, qp) = (qp.handle, Arc::new(Mutex::new(qp)));
            let post = {
                let qp = Arc::clone(&qp);
                move || qp.lock().unwrap().post_send(&[SendWr::send(1, &[])]).unwrap()
            };
            let posts = Arc::new(Mutex::new(0));
            let count = {
                let (posts, mock) = (Arc::clone(&posts), Arc::clone(&mock));
                // Notifications up to this moment are not caused by this post.
                move || *posts.lock().unwrap() = mock.notified(handle).0 + 1
            };
            pages.at(moment, move || {
                count();
                post();
            });
            cq.ring_poll();
            for _ in 0..turns {
                pages.turn();
            }
            pages.settle();
            assert!(pages.maps() > 0 && pages.mapped().is_empty());
            let (wanted, passed) = (*posts.lock().unwrap(), mock.notified(handle).0);
            assert!(wanted > 0 && passed >= wanted, "{moment:?}: a posted element goes unnoticed");
        }
    }
    // Between the watcher's looks, too.
    for when in 0..200 {
        let mut guest = Guest::new(DoorbellMode::Mapped);
        guest.cq.ring_poll();
        let mut passed = None;
        for turn in 0..400 {
            if turn == when {
                passed = Some(guest.mock.notified(guest.qp.handle).0);
                guest.post();
            }
            if let Pause::Until(_) = guest.pages.turn() {
                guest.pages.advance(800 * MICROSECOND);
            }
        }
        guest.pages.settle();
        assert!(guest.mock.notified(guest.qp.handle).0 > passed.unwrap(), "turn {when}");
    }
}

/// A consumer that arms at any moment and then sleeps is woken by a completion at any later moment: either by the
/// arming itself, or by the watcher's substitute for it.
#[test]
fn no_sleeper_is_forgotten_in_any_order() {
    for (arm, complete) in (0..90).step_by(3).flat_map(|arm| (arm..96).step_by(5).map(move |complete| (arm, complete)))
    {
        let guest = Guest::new(DoorbellMode::Mapped);
        guest.cq.ring_poll();
        let mut notified = 0;
        for turn in 0..120 {
            if turn == arm {
                drop(guest.driver.notifications());
                guest.cq.arm();
            }
            if turn == complete {
                guest.complete();
            }
            guest.pages.turn();
            guest.pages.advance(1_500 * MICROSECOND);
            if turn >= complete {
                notified += guest.driver.notifications().len();
            }
        }
        guest.pages.settle();
        notified += guest.driver.notifications().len();
        assert!(notified > 0, "armed at {arm}, completed at {complete}: it sleeps forever");
        assert!(notified <= 2, "one more at most, for the page that trapped again: {notified}");
    }
}

/// The substitute for an arming that was lost is used once: one event for the next completion, none without a
/// completion.
#[test]
fn arming_is_exact_again_after_one_event() {
    let guest = Guest::new(DoorbellMode::Auto);
    guest.heat();
    guest.cq.arm();
    guest.pages.settle();
    assert!(!guest.is_mapped() && guest.driver.notifications().is_empty(), "nothing has completed");
    guest.complete();
    assert_eq!(guest.driver.notifications(), [guest.cq.handle], "as it was armed, although no thread was woken");
    guest.complete();
    assert!(guest.driver.notifications().is_empty(), "once");
    guest.pages.advance(1_000 * MILLISECOND);
    assert_eq!(guest.pages.turn(), Pause::Forever, "and nothing is inferred any more");
    guest.cq.arm();
    guest.complete();
    assert_eq!(guest.driver.notifications(), [guest.cq.handle]);
    assert_eq!(guest.counter("notifications_inferred"), 0);
    // A process that has armed is no poller.
    for _ in 0..1_000 {
        guest.cq.ring_poll();
        guest.pages.turn();
    }
    assert!(!guest.is_mapped());
    guest.pages.advance(100 * MILLISECOND);
    guest.heat();
}

/// Completions that are not yet announced when the page traps again are announced then, because the consumer may have
/// armed the queue.
#[test]
fn unannounced_completions_are_announced_when_the_page_traps() {
    let guest = Guest::new(DoorbellMode::Auto);
    guest.heat();
    guest.cq.arm();
    // The page is revoked half a millisecond before the completion would be announced.
    guest.pages.advance(1_500 * MICROSECOND);
    guest.pages.turn();
    guest.complete();
    guest.pages.advance(500 * MICROSECOND);
    assert!(guest.is_mapped());
    guest.pages.turn();
    assert!(!guest.is_mapped());
    assert_eq!(guest.driver.notifications(), [guest.cq.handle]);
    assert_eq!(guest.counter("notifications_inferred"), 0);
}

/// Conformance 49: the next process with a page does not see the former one's stores, and its doorbells trap at first.
#[test]
fn a_second_process_never_sees_the_stores_of_the_first() {
    let guest = Guest::new(DoorbellMode::Auto);
    guest.heat();
    let (page, secret) = (guest.context.uar, 0x5ec2_e755_u32.to_le_bytes());
    let read = |offset: u64| {
        let mut data = [0xff; 4];
        guest.pages.bar_read(2, u64::from(page) * 4096 + offset, &mut data);
        data
    };
    let words: Vec<u64> = (0..4096).step_by(4).collect();
    for &offset in &words {
        let _ = guest.pages.bar_write(2, u64::from(page) * 4096 + offset, &secret);
    }
    assert!(words.iter().all(|&offset| read(offset) == secret), "the stores went to the mapped page");
    guest.context.clone().close().unwrap();
    let (context, cq, mut qp) = process(&guest.driver);
    assert_eq!(context.uar, page);
    assert!(!guest.is_mapped(), "the next store comes as a message");
    assert!(words.iter().all(|&offset| read(offset) == [0; 4]));
    qp.post_send(&[SendWr::send(1, &[])]).unwrap();
    assert_eq!(guest.mock.notified(qp.handle).0, 1);
    while guest.pages.mapped().is_empty() {
        cq.ring_poll();
        guest.pages.turn();
    }
    assert!(
        guest.is_mapped() && words.iter().all(|&offset| read(offset) == [0; 4]),
        "the next process sees zeros in the mapped page"
    );
}

/// A process that ends while its page is becoming memory leaves nothing to the next one.
#[test]
fn a_page_whose_process_has_gone_is_not_mapped() {
    let guest = Guest::new(DoorbellMode::Mapped);
    guest.cq.ring_poll();
    guest.context.clone().close().unwrap();
    assert_eq!((guest.pages.turn(), guest.pages.maps()), (Pause::Forever, 0));
    // A reset ends all processes at once. Their pages trap again when they are idle.
    let (_context, cq, _qp) = process(&guest.driver);
    cq.ring_poll();
    guest.pages.turn();
    assert_eq!(guest.pages.mapped().len(), 1);
    guest.test.device.reset();
    guest.pages.settle();
    assert!(guest.pages.mapped().is_empty());
    let driver =
        Driver::probe(Arc::clone(&guest.pages) as Arc<dyn PciFunction>, &guest.test.memory, &guest.test.irqs).unwrap();
    let (_context, _cq, mut qp) = process(&driver);
    qp.post_send(&[SendWr::send(1, &[])]).unwrap();
    assert_eq!(guest.mock.notified(qp.handle).0, 1);
}

/// Where the kernel refuses to map a page, doorbells trap as before and arming is exact. A page that the kernel refuses
/// to unmap is watched for its next owner.
#[test]
fn a_system_that_refuses_costs_speed_only() {
    let mut guest = Guest::new(DoorbellMode::Mapped);
    let log = LogLines::watch();
    guest.pages.refuse(true);
    guest.cq.ring_poll();
    guest.pages.turn();
    assert!(!guest.is_mapped());
    assert_eq!(guest.refused(), (1, 0), "the operator sees it");
    log.assert_limited("doorbell page 1 cannot be memory: as the test wants");
    drop(guest.driver.notifications());
    guest.post();
    assert_eq!(guest.mock.notified(guest.qp.handle).0, 1);
    guest.pages.settle();

    guest.pages.refuse(false);
    guest.pages.advance(1_000 * MILLISECOND);
    guest.cq.ring_poll();
    guest.pages.turn();
    assert!(guest.is_mapped());
    guest.pages.refuse(true);
    for _ in 0..1_000 {
        guest.pages.turn();
        guest.pages.advance(200 * MICROSECOND);
    }
    assert!(guest.is_mapped(), "no thread could take it");
    let (_, stayed) = guest.refused();
    assert!(stayed > 0, "the operator sees that, too");
    log.assert_limited("doorbell page 1 cannot be made to trap: as the test wants");
    guest.context.clone().close().unwrap();
    let (_context, _cq, mut qp) = process(&guest.driver);
    assert_eq!(guest.refused(), (1, stayed + 1), "the page was not taken from its last process");
    guest.pages.turn();
    qp.post_send(&[SendWr::send(1, &[])]).unwrap();
    assert_eq!(guest.mock.notified(qp.handle).0, 0, "no thread is woken");
    guest.pages.turn();
    assert_eq!(guest.mock.notified(qp.handle).0, 1, "it was found");
    guest.pages.refuse(false);
    guest.pages.settle();
    assert!(!guest.is_mapped());
}

/// After a refusal, a page is not mapped again with each doorbell, because every attempt polls all rings and arms all
/// queues.
#[test]
fn a_refused_mapping_is_not_retried_at_once() {
    for mode in [DoorbellMode::Auto, DoorbellMode::Mapped] {
        let guest = Guest::new(mode);
        guest.pages.refuse(true);
        for round in 1..=3 {
            for doorbell in 0..10_000 {
                guest.cq.ring_poll();
                if mode == DoorbellMode::Mapped && doorbell % 100 == 0 {
                    guest.cq.arm();
                }
                guest.pages.turn();
                guest.pages.advance(MICROSECOND);
            }
            assert_eq!(guest.refused(), (round, 0), "{mode:?}");
            guest.pages.advance(1_000 * MILLISECOND);
        }
        // Later the kernel permits it, and the page becomes memory.
        guest.pages.refuse(false);
        guest.heat();
        assert!(guest.is_mapped());
    }
}

/// Ends the watching thread, also when the test fails; otherwise the test would wait for the thread.
struct Watched(Arc<WindowPages>);

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.watcher().stop();
    }
}

/// A watching thread, processes that poll and processes that sleep, with pages that are mapped and unmapped: every
/// message arrives.
#[test]
fn a_thread_watches() {
    const MESSAGES: u64 = 400;
    let backend = Rxe::new(RxeConfig::default()).unwrap();
    // The policy of a machine without a spare processor does not spin, so the test is short on a busy machine.
    let crowded = Processors { available: 1, virtual_processors: 1, watchers: 1 };
    let policy = WindowPolicy::choose(DoorbellMode::Mapped, crowded).unwrap();
    let mut ends: Vec<_> = [1, 2]
        .map(|host| {
            let memory = GuestMemory::new(128 << 20);
            let test = TestDevice::of_host(host, &backend, TestDevice::<Rxe>::config(host), memory);
            let pages = WindowPages::new(&test.device, policy);
            let function = Arc::clone(&pages) as Arc<dyn PciFunction>;
            let driver = Driver::probe(function, &test.memory, &test.irqs).unwrap();
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
    std::thread::scope(|scope| {
        let _watched = [Watched(Arc::clone(&a.1)), Watched(Arc::clone(&b.1))];
        for pages in [&a.1, &b.1].map(Arc::clone) {
            // Time advances with each poll of the watcher, so that pages change often however slow the threads are.
            scope.spawn(move || pages.watcher().run(pages.device()));
        }
        for round in 0..MESSAGES {
            // Waits for a mapped page, because a thread that starts late would watch nothing.
            if round % 64 == 0 {
                wait_for("page that is memory", || {
                    assert_eq!(a.3.poll(), None);
                    (!a.1.mapped().is_empty()).then_some(())
                });
            }
            b.4.post_recv(&[RecvWr::new(round, &[b.5.sge(&b.6, 0, 64)])]).unwrap();
            // Now and then the sender sleeps until it is notified.
            let sleeps = round % 8 == 0;
            if sleeps {
                drop(a.2.notifications());
                a.3.arm();
            }
            a.4.post_send(&[SendWr::send(round, &[a.5.sge(&a.6, 0, 64)])]).unwrap();
            if sleeps {
                // An announcement may be due half a second later. Time advances in growing steps: steps of equal
                // length would take too many polls on a busy machine.
                let mut step = 7 * MICROSECOND;
                wait_for("notification", || {
                    [&a.1, &b.1].iter().for_each(|pages| pages.advance(step));
                    step = (step * 2).min(MILLISECOND);
                    (!a.2.notifications().is_empty()).then_some(())
                });
            }
            for end in [&mut *a, &mut *b] {
                let cqe = wait_for("completion", || {
                    end.1.advance(7 * MICROSECOND);
                    end.3.poll()
                });
                assert_eq!((cqe.wr_id, cqe.status), (round, status::SUCCESS));
                assert_eq!(end.3.poll(), None);
            }
            // Sometimes there is no activity for a while.
            if round % 64 == 63 {
                wait_for("page that traps", || {
                    a.1.advance(MILLISECOND);
                    a.1.mapped().is_empty().then_some(())
                });
            }
        }
    });
    assert!(a.1.maps() > 1 && a.1.silent() > 0, "{} {}", a.1.maps(), a.1.silent());
    assert!(counter(&a.0, "doorbells_found") > 0 && counter(&a.0, "doorbells_of_processes") > 0);
}
