//! Event rings at the level of the hub. The driver's view of them is tested in `tests/rings.rs` and
//! `tests/doorbells.rs`.

use std::time::Duration;

use pvrdma_pci_function::InterruptSink;
use pvrdma_verbs::testing::LogLines;

use super::*;
use crate::inspect::ObjectKind;
use crate::testing::ring_memory::{RingMemory, open_interrupts};
use crate::testing::typed::TypedDriver;
use crate::testing::{GuestMemory, Irqs};

/// A hub, and memory for its rings.
struct HubFixture {
    memory: Arc<GuestMemory>,
    asynchronous: RingMemory,
    notifications: RingMemory,
    hub: Arc<EventHub>,
    irqs: Arc<Irqs>,
}

impl HubFixture {
    fn new() -> Self {
        let memory = GuestMemory::new(4 << 20);
        let [asynchronous, notifications] = [(); 2].map(|()| RingMemory::in_memory(&memory, 4));
        let fixture = Self {
            memory,
            asynchronous,
            notifications,
            hub: EventHub::new(&DeviceLog::new("test")),
            irqs: Irqs::new(),
        };
        fixture.install();
        fixture
    }

    fn install(&self) {
        let interrupts = open_interrupts(Arc::clone(&self.irqs) as Arc<dyn InterruptSink>);
        let rings = EventRings::new(self.asynchronous.list(), self.notifications.list(), interrupts).unwrap();
        self.hub.install(rings);
    }
}

/// Rings are installed and removed; without rings events are counted, and old rings are not written.
#[test]
fn handshakes() {
    let fixture = HubFixture::new();
    let view = fixture.memory.space().view();
    let old = fixture.hub.rings.read().clone().unwrap();
    fixture.hub.remove();
    old.notify_cq(&view, 1);
    old.post_async(&view, AsyncEvent::Port(PortEvent::Active));
    fixture.hub.notify_cq(&view, 1);
    fixture.hub.event(&view, AsyncEvent::Port(PortEvent::Error));
    assert_eq!(fixture.hub.counters()[0].value, 2);
    assert_eq!((fixture.irqs.count(1), fixture.irqs.count(2)), (0, 0));
    assert_eq!(fixture.memory.load(fixture.notifications.state() + 8), 0);
    fixture.install();
    fixture.hub.event(&view, AsyncEvent::Port(PortEvent::Error));
    let entry = fixture.memory.read_vec(fixture.asynchronous.slot(0, 512, 8), 8);
    assert_eq!(entry, [10, 0, 0, 0, 1, 0, 0, 0]);
}

/// A kernel may break its event rings, and repeat the handshake, any number of times: the number of log lines stays
/// bounded.
#[test]
fn rings_that_break_over_and_over() {
    let fixture = HubFixture::new();
    let log = LogLines::watch();
    let view = fixture.memory.space().view();
    for _ in 0..100 {
        fixture.memory.write(fixture.notifications.state() + 12, &u32::MAX.to_le_bytes());
        fixture.install();
        // The consumer's index is loaded when the ring seems full.
        (0..10_000).for_each(|handle| fixture.hub.notify_cq(&view, handle));
        assert_eq!(fixture.hub.inspect(fixture.memory.space())[1].state, "shut");
    }
    log.assert_limited("ring stops");
}

/// Sizes follow from the page counts: the largest power of two that divides the driver's nominal count, for every count
/// that the shared region may contain.
#[test]
fn sizes() {
    let memory = GuestMemory::new(8 << 20);
    for pages in [2, 3, 4, 5, 9, 512] {
        let ring = RingMemory::in_memory(&memory, pages);
        let sink = Irqs::new();
        let rings = EventRings::new(ring.list(), ring.list(), open_interrupts(sink)).unwrap();
        let view = memory.space().view();
        let nominal = (pages - 1) * 1024;
        let entries = nominal & nominal.wrapping_neg();
        for i in 0..=entries {
            rings.notify_cq(&view, u32::try_from(i).unwrap());
        }
        assert_eq!(memory.load(ring.state() + 8) as usize, entries);
        assert!(rings.has_pending());
        memory.free(&ring.pages);
    }
    let one = RingMemory::in_memory(&memory, 1);
    let interrupts = open_interrupts(Irqs::new());
    assert!(EventRings::new(one.list(), one.list(), interrupts).is_err());
}

/// N6: a thread of all devices changes the link, and the VMM determines how long an access to slow memory lasts.
#[test]
fn a_change_of_the_link_waits_for_no_slow_memory() {
    let guest = TypedDriver::up();
    let core = guest.device.core();
    core.memory.note_stall(Duration::from_secs(1));
    let view = core.memory.view();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| core.memory.barrier());
        while core.memory.try_view().is_some() {
            std::thread::yield_now();
        }
        assert!(guest.device.set_link(false).unwrap());
        let shown = guest.device.inspect_objects(ObjectKind::Ring);
        assert!(shown.to_string().contains("asynchronous events"), "{shown}");
        drop(view);
        writer.join().unwrap();
    });
    assert!(core.hub.has_pending());
    core.retry_events();
    assert!(!core.hub.has_pending());
}
