//! Pause and resume, and a move to another device, while other threads bring and take frames.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pvrdma_base::locks::{Mutex, RwLock};
use pvrdma_pci_function::PciFunction;

use super::{another, config, save};
use crate::testing::frames::{Flow, GUEST_MAC, PEER_MAC, ethernet, pattern};
use crate::testing::{Driver, DriverConfig, Guest, MEMORY_BASE, RecordingPort, TxPacket, command};
use crate::{Frame, FramePort, PortOffloads, Received, RestoreError, SaveError, Sent, Vmxnet3Device};

/// Sends a packet and receives a frame.
pub(super) fn exchange(driver: &mut Driver<'_>, port: &RecordingPort) {
    driver.send(0, &TxPacket::plain(&Flow::TO_PEER.udp(b"out")));
    assert_eq!((port.take().len(), driver.reap(0)), (1, 1));
    let bytes = Flow::TO_GUEST.udp(b"in");
    assert_eq!(driver.guest.device.receive(&Frame::new(&bytes, false).unwrap()), Received::Delivered);
    assert_eq!(driver.poll(0).len(), 1);
}

#[test]
fn a_device_is_saved_only_while_it_is_paused() {
    let (guest, port) = Guest::recording();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    let refused = guest.device.save_state(&mut Vec::new());
    assert!(matches!(refused, Err(SaveError::NotPaused)), "{refused:?}");
    guest.device.pause();
    guest.device.pause();
    guest.device.save_state(&mut Vec::new()).unwrap();
    assert!(guest.device.status().active, "the driver is still there");
    guest.device.resume_state().unwrap();
    guest.device.resume_state().unwrap();
    exchange(&mut driver, &port);
}

/// An output that fails leaves a device that continues.
#[test]
fn a_save_that_fails_changes_nothing() {
    let (guest, port) = Guest::recording();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    guest.device.pause();
    let mut room = [0; 300];
    let failed = guest.device.save_state(&mut &mut room[..]);
    assert!(matches!(failed, Err(SaveError::Stream(_))), "{failed:?}");
    guest.device.save_state(&mut Vec::new()).unwrap();
    guest.device.resume_state().unwrap();
    exchange(&mut driver, &port);
}

/// Neither a frame nor a register access nor a change of the link reaches memory or raises an interrupt.
#[test]
fn nothing_happens_during_a_pause() {
    let (guest, port) = Guest::recording();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    driver.tx[0].post(&guest.memory, &TxPacket::plain(&Flow::TO_PEER.udp(b"out")));
    let state = save(&guest.device);
    let (memory, interrupts) = (guest.memory.read(MEMORY_BASE, 4 << 20), guest.irqs.total());
    let bytes = Flow::TO_GUEST.udp(b"in");
    assert_eq!(guest.device.receive(&Frame::new(&bytes, false).unwrap()), Received::Inactive);
    guest.device.flush();
    driver.ring(0);
    guest.device.resume_transmit();
    guest.device.set_link(false);
    guest.device.set_link(true);
    driver.acknowledge(u32::MAX);
    for refused in [command::ACTIVATE, command::UPDATE_RX_MODE, command::GET_STATS, command::QUIESCE] {
        assert_eq!(guest.command(refused), 1, "{refused:#x}");
    }
    guest.set_switches(false, true);
    guest.set_switches(true, true);
    guest.device.run_deferred();
    assert!(guest.memory.read(MEMORY_BASE, 4 << 20) == memory, "written during the pause");
    assert_eq!((guest.irqs.total(), port.take().len()), (interrupts, 0));
    // The result of a command has changed, and an operator's counter.
    let (before, after) = (super::records(&state).0, super::records(&save(&guest.device)).0);
    assert!((before.session, before.interrupts) == (after.session, after.interrupts));

    guest.device.resume_state().unwrap();
    assert_eq!((port.take().len(), driver.reap(0)), (1, 1), "the packet leaves without a doorbell");
    assert_eq!(driver.events(), 0, "no event without a change of the link");
    exchange(&mut driver, &port);
}

/// If the link has changed since the last notification of the driver, the driver is notified, by the device and by the
/// one that continues its state.
#[test]
fn a_change_of_the_link_during_a_pause_is_reported_afterwards() {
    let (guest, port) = Guest::recording();
    let driver = Driver::up(&guest, DriverConfig::default());
    guest.device.pause();
    guest.device.set_link(false);
    guest.device.resume_state().unwrap();
    assert_eq!((driver.events(), guest.command(command::GET_LINK)), (4, 0));
    driver.acknowledge(4);
    let state = save(&guest.device);
    let next = another(&guest, guest.memory.of_another_device(), &port);
    next.device.restore_state(&mut &state[..]).unwrap();
    guest.irqs.take(driver.event_vector());
    next.device.resume_state().unwrap();
    let driver = driver.detach().attach(&next);
    assert_eq!((driver.events(), next.command(command::GET_LINK) & 1), (4, 1));
    assert_eq!(guest.irqs.take(driver.event_vector()), 2, "for the end of the pause, and for the event");
}

#[test]
fn a_reset_ends_a_pause() {
    let (guest, port) = Guest::recording();
    Driver::up(&guest, DriverConfig::default());
    guest.device.pause();
    guest.device.reset();
    assert!(matches!(guest.device.save_state(&mut Vec::new()), Err(SaveError::NotPaused)));
    assert!(!guest.device.status().active);
    exchange(&mut Driver::up(&guest, DriverConfig::default()), &port);
}

/// A restored device raises its legacy interrupt line again when the pause ends, and not before.
#[test]
fn the_legacy_line_is_reported_at_the_end() {
    let port = Arc::new(RecordingPort::default());
    let config = crate::Vmxnet3Config { intx: true, ..config() };
    let guest = Guest::new(config.clone(), 16 << 20, Arc::clone(&port) as _);
    let mut driver = Driver::up(&guest, DriverConfig { msix: false, auto_mask: true, ..DriverConfig::default() });
    guest.device.receive(&Frame::new(&Flow::TO_GUEST.udp(b"in"), false).unwrap());
    guest.device.flush();
    assert_eq!(guest.irqs.line(), (true, 1));
    let state = save(&guest.device);
    let memory = guest.memory.of_another_device();
    let next = Guest::with_memory(config, memory, Arc::default(), Arc::clone(&port) as _);
    next.device.restore_state(&mut &state[..]).unwrap();
    assert_eq!(next.irqs.line(), (false, 0), "not before the end of the pause");
    next.device.resume_state().unwrap();
    assert_eq!((next.irqs.line(), next.read(1, 0x38), next.irqs.line()), ((true, 1), 1, (false, 1)));
    driver = driver.detach().attach(&next);
    assert_eq!(driver.poll(0).len(), 1);
}

/// A port that lets other threads run before it takes a frame: a pause may come at this point.
#[derive(Default)]
struct SlowPort(Mutex<Vec<Vec<u8>>>);

impl FramePort for SlowPort {
    fn offloads(&self) -> PortOffloads {
        PortOffloads::default()
    }

    fn send(&self, frame: &Frame<'_>) -> Sent {
        self.0.lock().push(frame.bytes().to_vec());
        std::thread::yield_now();
        Sent::Taken
    }
}

/// A frame with a number.
fn numbered(to: [u8; 6], from: [u8; 6], number: u32) -> Vec<u8> {
    ethernet(to, from, 0x88b5, &[&number.to_be_bytes()[..], &pattern(60)].concat())
}

fn number_of(frame: &[u8]) -> u32 {
    u32::from_be_bytes(*frame[14..].first_chunk().unwrap())
}

/// Tells other threads to end, also when an assertion fails.
struct EndOnDrop<'a>(&'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Devices follow each other while two threads transmit and two threads bring frames. Each packet leaves once, each
/// frame arrives once, both in order, and nothing is written to memory between the end of `pause` and `resume`.
#[test]
fn devices_follow_each_other_under_traffic() {
    const MOVES: u32 = 50;
    let port = Arc::new(SlowPort::default());
    let first = Guest::new(config(), 16 << 20, Arc::clone(&port) as _);
    let device = RwLock::new(Arc::clone(&first.device));
    let (stop, numbers) = (AtomicBool::new(false), Mutex::new(0));
    std::thread::scope(|scope| {
        let transmit = || {
            while !stop.load(Ordering::Acquire) {
                let device: Arc<Vmxnet3Device> = Arc::clone(&device.read());
                device.resume_transmit();
                std::thread::yield_now();
            }
        };
        let receive = || {
            while !stop.load(Ordering::Acquire) {
                let device: Arc<Vmxnet3Device> = Arc::clone(&device.read());
                // The lock orders the frames of both threads.
                let mut number = numbers.lock();
                let bytes = numbered(GUEST_MAC, PEER_MAC, *number);
                let received = device.receive(&Frame::new(&bytes, false).unwrap());
                *number += u32::from(received == Received::Delivered);
                drop(number);
                device.flush();
                std::thread::yield_now();
            }
        };
        scope.spawn(transmit);
        scope.spawn(transmit);
        scope.spawn(receive);
        scope.spawn(receive);
        let _end = EndOnDrop(&stop);
        let (mut guest, mut driver) = (first, None);
        let (mut sent, mut arrived) = (0, 0);
        for _ in 0..MOVES {
            let mut running = match driver.take() {
                None => Driver::up(&guest, DriverConfig::default()),
                Some(detached) => crate::testing::DetachedDriver::attach(detached, &guest),
            };
            let goals = (sent + 20, arrived + 20);
            while sent < goals.0 || arrived < goals.1 {
                running.reap(0);
                if sent < goals.0 && running.tx[0].free() > 0 {
                    running.tx[0].post(&guest.memory, &TxPacket::plain(&numbered(PEER_MAC, GUEST_MAC, sent)));
                    sent += 1;
                }
                for packet in running.poll_some(0, 8) {
                    assert_eq!(number_of(&packet.bytes), arrived);
                    arrived += 1;
                }
            }
            guest.device.pause();
            let memory = guest.memory.read(MEMORY_BASE, 2 << 20);
            let state = save(&guest.device);
            assert!(guest.memory.read(MEMORY_BASE, 2 << 20) == memory, "written during a pause");
            let memory = guest.memory.of_another_device();
            let next = Guest::with_memory(config(), memory, Arc::clone(&guest.irqs), Arc::clone(&port) as _);
            next.device.restore_state(&mut &state[..]).unwrap();
            driver = Some(running.detach());
            *device.write() = Arc::clone(&next.device);
            next.device.resume_state().unwrap();
            guest = next;
        }
        let mut running = driver.take().unwrap().attach(&guest);
        while running.tx[0].free() < 63 {
            running.reap(0);
        }
        let left: Vec<_> = port.0.lock().iter().map(|frame| number_of(frame)).collect();
        assert_eq!(left, (0..sent).collect::<Vec<_>>(), "each packet leaves once and in order");
    });
}

/// A restored session is looked up in the memory map at the end of the pause. A refusal leaves a device that a driver
/// can start.
#[test]
fn memory_that_the_guest_does_not_have_is_refused_at_the_end_of_the_pause() {
    let (guest, port) = Guest::recording();
    let driver = Driver::up(&guest, DriverConfig { rx: super::busy::LAYOUT, ..DriverConfig::default() });
    let [first, second, completions, data] = driver.rx[0].bases();
    let places = [driver.shared, driver.queue_desc, driver.tx[0].ring, driver.tx[0].completions];
    let state = save(&guest.device);
    for missing in places.into_iter().chain([first, second, completions, data]) {
        let memory = guest.memory.without_page(missing);
        let next = another(&guest, memory, &port);
        next.device.restore_state(&mut &state[..]).unwrap();
        let refused = next.device.resume_state();
        assert!(matches!(refused, Err(RestoreError::Memory { .. })), "{missing:#x}: {refused:?}");
        assert!(!next.device.status().active && !next.memory.space().is_enabled());
        next.memory.map_all();
        exchange(&mut Driver::up(&next, DriverConfig::default()), &port);
    }
}

/// With bus mastering off, the session waits until the guest enables it.
#[test]
fn bus_mastering_that_is_off_comes_back_in_the_next_device() {
    let (guest, port) = Guest::recording();
    let mut driver = Driver::up(&guest, DriverConfig::default());
    guest.set_switches(false, true);
    driver.send(0, &TxPacket::plain(&Flow::TO_PEER.udp(b"out")));
    let state = save(&guest.device);
    let next = another(&guest, guest.memory.of_another_device(), &port);
    next.device.restore_state(&mut &state[..]).unwrap();
    next.device.resume_state().unwrap();
    assert_eq!((port.take().len(), next.memory.space().is_enabled()), (0, false));
    next.set_switches(true, true);
    next.device.run_deferred();
    let mut driver = driver.detach().attach(&next);
    assert_eq!((port.take().len(), driver.reap(0)), (1, 1));
    exchange(&mut driver, &port);
}
