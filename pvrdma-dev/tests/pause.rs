//! A paused device: it does not access the guest's memory, and loses no event of the pause.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{Process, connect, mock_device_with, rxe_pair_with};
use pvrdma_dev::{
    DeviceConfig, PvrdmaDevice,
    testing::{
        Driver, GuestMemory, MEMORY_BASE, MappedPages, MockBackend, QpInit, RecvWr, SendWr, TestDevice, access,
        register, status,
    },
};
use pvrdma_pci_function::PciFunction;
use pvrdma_verbs::{Backend, PauseHca};
use pvrdma_verbs_types::{Completion, WcOpcode, WcStatus};

/// Error number of a device that is busy.
const EBUSY: u32 = 16;

/// A paused device, whose memory must not change.
struct Pause<'a, B: Backend<Hca: PauseHca>> {
    test: &'a TestDevice<B>,
    before: Vec<u8>,
}

fn contents(memory: &GuestMemory) -> Vec<u8> {
    memory.read_vec(MEMORY_BASE, usize::try_from(memory.end() - MEMORY_BASE).unwrap())
}

impl<'a, B: Backend<Hca: PauseHca + 'static>> Pause<'a, B> {
    fn begin(test: &'a TestDevice<B>) -> Self {
        assert!(test.device.pause());
        Self { test, before: contents(&test.memory) }
    }

    fn end(self) {
        assert!(contents(&self.test.memory) == self.before, "a paused device has written to memory");
        assert!(self.test.device.resume());
    }
}

fn mock_with(config: DeviceConfig) -> (TestDevice<MockBackend>, Arc<pvrdma_dev::testing::MockDevice>) {
    mock_device_with(config, GuestMemory::new(4 << 20))
}

fn success(qp: u32) -> Completion {
    Completion::new(qp, 1, WcOpcode::Send, WcStatus::Success)
}

/// A queue that is armed in a pause announces the next completion.
#[test]
fn arming_in_a_pause() {
    for posted_doorbells in [false, true] {
        let (test, mock) = mock_with(TestDevice::<MockBackend>::config(1).with_posted_doorbells(posted_doorbells));
        let driver = test.driver();
        let process = Process::new(&driver, true, 16);
        let qp = process.rc();
        let pause = Pause::begin(&test);
        // An access to memory would fail now, and end the queue.
        test.memory.space().revocation().store(true, Ordering::SeqCst);
        process.cq.arm();
        test.memory.space().revocation().store(false, Ordering::SeqCst);
        pause.end();
        assert!(driver.notifications().is_empty());
        mock.complete_send(qp.handle, &success(qp.handle)).unwrap();
        assert_eq!(driver.notifications(), [process.cq.handle]);
        mock.complete_send(qp.handle, &success(qp.handle)).unwrap();
        assert!(driver.notifications().is_empty(), "armed once");
    }
}

/// The guest was paused between arming its queue and polling it. It finds the completion by itself, and programs that
/// count notifications must not get one for it.
#[test]
fn a_completion_that_came_before_arming_is_not_announced() {
    let (test, mock) = mock_with(TestDevice::<MockBackend>::config(1));
    let driver = test.driver();
    let process = Process::new(&driver, true, 16);
    let qp = process.rc();
    mock.complete_send(qp.handle, &success(qp.handle)).unwrap();
    process.cq.arm();
    Pause::begin(&test).end();
    assert!(driver.notifications().is_empty(), "no completion has come since");
    mock.complete_send(qp.handle, &success(qp.handle)).unwrap();
    assert_eq!(driver.notifications(), [process.cq.handle], "still armed");
}

/// The doorbell was in transit when the device was paused: a completion precedes it.
#[test]
fn arming_that_comes_too_late() {
    let (test, mock) = mock_with(TestDevice::<MockBackend>::config(1).with_posted_doorbells(true));
    let driver = test.driver();
    let process = Process::new(&driver, true, 16);
    let qp = process.rc();
    mock.complete_send(qp.handle, &success(qp.handle)).unwrap();
    let pause = Pause::begin(&test);
    process.cq.arm();
    let raised = test.irqs.count(2);
    pause.end();
    assert_eq!(driver.notifications(), [process.cq.handle]);
    assert!(test.irqs.count(2) > raised);
}

#[test]
fn events_wait_for_the_end_of_a_pause() {
    let (test, _) = mock_with(TestDevice::<MockBackend>::config(1));
    let driver = test.driver();
    let pause = Pause::begin(&test);
    // A smaller MTU of the uplink is announced by a port event.
    assert!(test.device.set_uplink_mtu(Some(1000)));
    // A doorbell tries waiting events again.
    driver.pci().doorbell(0, 0, 0);
    assert!(driver.async_events().is_empty());
    let raised = test.irqs.count(1);
    pause.end();
    assert_eq!(driver.async_events().len(), 1);
    assert!(test.irqs.count(1) > raised);
}

/// Commands would access memory. They are refused; whatever ends objects is not.
#[test]
fn commands_in_a_pause() {
    let (test, _) = mock_with(TestDevice::<MockBackend>::config(1));
    let driver = test.driver();
    let process = Process::new(&driver, true, 16);
    let pause = Pause::begin(&test);
    driver.pci().set_register(register::REQUEST, 0);
    assert_eq!(driver.pci().register(register::ERR), EBUSY);
    driver.pci().set_register(register::CTL, 0);
    assert_eq!(driver.pci().register(register::ERR), EBUSY, "ACTIVATE");
    assert_eq!(driver.pci().register(register::VERSION), 20);
    pause.end();
    process.cq.destroy().unwrap();
    // A reset in a pause ends all objects. No driver can start before the end of the pause.
    let pause = Pause::begin(&test);
    test.device.reset();
    assert_eq!(test.device.status().objects.pds, 0);
    let probed = Driver::probe(test.function(), &test.memory, &test.irqs);
    assert!(probed.is_err());
    drop(pause);
    assert!(test.device.is_paused());
    assert!(test.device.resume());
    test.memory.free_all();
    test.driver().query_port().unwrap();
}

#[test]
fn pauses_do_not_nest() {
    let (test, _) = mock_with(TestDevice::<MockBackend>::config(1));
    assert!(!test.device.resume() && !test.device.is_paused());
    let driver = test.driver();
    assert!(test.device.pause() && !test.device.pause() && test.device.is_paused());
    let raised = test.irqs.counts();
    assert!(test.device.resume() && !test.device.resume() && !test.device.is_paused());
    // The event rings are announced once, whether there is anything in them or not.
    assert_eq!(test.irqs.counts(), [raised[0], raised[1] + 1, raised[2] + 1]);
    driver.query_port().unwrap();
}

/// Stores to a doorbell page that is memory are found after the pause, and completion queues infer as before, also for
/// a page that became memory, or ceased to be, in the pause.
#[test]
fn mapped_doorbells_in_a_pause() {
    for trapped in [false, true] {
        let (test, mock) = mock_with(TestDevice::<MockBackend>::config(1));
        let pages = MappedPages::new(&test.device);
        let driver = Driver::probe(Arc::clone(&pages) as Arc<dyn PciFunction>, &test.memory, &test.irqs).unwrap();
        let process = Process::new(&driver, true, 16);
        let mut qp = process.rc();
        if !trapped {
            qp.post_send(&[SendWr::send(1, &[])]).unwrap();
            assert_eq!(pages.pass().moved, 1);
        }
        let notified = mock.notified(qp.handle).0;
        qp.publish_send(&[SendWr::send(2, &[])]).unwrap();
        mock.complete_send(qp.handle, &success(qp.handle)).unwrap();
        pages.advance(1_000_000_000);
        let pause = Pause::begin(&test);
        qp.ring_send();
        let (wakes, outcome) = (pages.wakes(), pages.pass());
        assert_eq!((outcome.moved, outcome.due, mock.notified(qp.handle).0), (0, None, notified));
        pause.end();
        assert!(pages.wakes() > wakes, "the watcher may sleep");
        assert_eq!((pages.pass().moved, mock.notified(qp.handle).0), (1, notified + 1), "trapped before: {trapped}");
        pages.advance(1_000_000_000);
        pages.pass();
        assert_eq!(driver.notifications(), [process.cq.handle], "trapped before: {trapped}");
    }
}

/// A page traps again in a pause: arming that it may have hidden is made up for.
#[test]
fn a_page_that_traps_again_in_a_pause() {
    let (test, mock) = mock_with(TestDevice::<MockBackend>::config(1));
    let pages = MappedPages::new(&test.device);
    let driver = Driver::probe(Arc::clone(&pages) as Arc<dyn PciFunction>, &test.memory, &test.irqs).unwrap();
    let process = Process::new(&driver, true, 16);
    let mut qp = process.rc();
    qp.post_send(&[SendWr::send(1, &[])]).unwrap();
    pages.pass();
    mock.complete_send(qp.handle, &success(qp.handle)).unwrap();
    let pause = Pause::begin(&test);
    let mapped: &dyn pvrdma_dev::MappedDoorbells = &*test.device;
    mapped.pages_trapped(&[process.pd.uar], pages.now());
    pause.end();
    assert_eq!(driver.notifications(), [process.cq.handle]);
}

/// Two guests exchange messages both ways, each notified of its completions, while their devices are paused again and
/// again, one or both at a time. Each completion comes once and in order, and no wake-up is lost. An access to the
/// memory of a paused device fails, and would end a queue.
#[test]
fn pauses_under_traffic() {
    const MESSAGES: u64 = 2_000;
    const CYCLES: usize = 200;
    let pair = rxe_pair_with(GuestMemory::new(128 << 20));
    let [(test_a, driver_a), (test_b, driver_b)] = &pair;
    let [process_a, process_b] = [driver_a, driver_b].map(|driver| Process::new(driver, true, 256));
    let [mut qp_a, mut qp_b] = [(driver_a, &process_a), (driver_b, &process_b)]
        .map(|(driver, process)| driver.create_qp(&QpInit::rc(&process.pd, &process.cq)).unwrap());
    connect(&mut qp_a, 1, &mut qp_b, 2);
    // Commands are refused in a pause, so they come first.
    let guests = [(test_a, process_a, qp_a), (test_b, process_b, qp_b)].map(|(test, process, qp)| {
        let memory = process.driver.registered_buffer(&process.pd, 8192, access::ALL).unwrap();
        (test, process, qp, memory)
    });
    std::thread::scope(|scope| {
        let guests = guests.map(|(test, mut process, mut qp, (buffer, mr))| {
            scope.spawn(move || {
                for id in 0..MESSAGES {
                    qp.post_recv(&[RecvWr::new(id, &[buffer.sge(&mr, 4096, 64)])]).unwrap();
                    qp.post_send(&[SendWr::send(MESSAGES + id, &[buffer.sge(&mr, 0, 64)])]).unwrap();
                    let mut missing = [true; 2];
                    while missing.contains(&true) {
                        let raised = test.irqs.count(2);
                        process.cq.arm();
                        let mut found = false;
                        while let Some(cqe) = process.cq.poll() {
                            assert_eq!((cqe.wr_id % MESSAGES, cqe.status), (id, status::SUCCESS));
                            let kind = usize::from(cqe.wr_id >= MESSAGES);
                            assert!(std::mem::take(&mut missing[kind]), "twice");
                            found = true;
                        }
                        if !found {
                            assert!(test.irqs.wait_beyond(2, raised), "slept forever");
                        }
                        process.driver.notifications();
                    }
                }
            })
        });
        let mut cycles = 0;
        while cycles < CYCLES || guests.iter().any(|guest| !guest.is_finished()) {
            let order = [[test_a, test_b], [test_b, test_a]][cycles % 2];
            let paused = &order[..1 + cycles / 2 % 2];
            let flags: Vec<_> = paused.iter().map(|test| pause_and_revoke(&test.device, &test.memory)).collect();
            (0..20).for_each(|_| std::thread::yield_now());
            for (test, flag) in paused.iter().zip(flags) {
                flag.store(false, Ordering::SeqCst);
                assert!(test.device.resume());
            }
            cycles += 1;
        }
    });
}

/// Pauses a device, and makes all accesses of devices to its memory fail.
fn pause_and_revoke<H: PauseHca + 'static>(device: &PvrdmaDevice<H>, memory: &GuestMemory) -> Arc<AtomicBool> {
    assert!(device.pause());
    let revoked = memory.space().revocation();
    revoked.store(true, Ordering::SeqCst);
    revoked
}
