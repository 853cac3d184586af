//! Event rings (conformance 42 to 45, 70).

use std::sync::atomic::AtomicU64;

use super::*;
use crate::InterruptSink;
use crate::testing::GuestMemory;
use crate::testing::bed::{RingBed, open_interrupts};

/// A driver's side of one event ring: it drains whenever it is told to.
struct Ring {
    bed: RingBed,
    element: u64,
    entries: u32,
    head: u32,
}

impl Ring {
    fn new(memory: &Arc<GuestMemory>, element: u64, entries: u32) -> Self {
        Self { bed: RingBed::in_memory(memory, 4), element, entries, head: 0 }
    }

    /// Takes everything as the driver's interrupt handler does, and checks that the index is one that it accepts.
    fn drain(&mut self) -> Vec<Vec<u8>> {
        let tail = self.bed.memory.load(self.bed.state() + 8);
        assert!(tail < 2 * self.entries, "the driver would never run its loop again");
        let mut out = Vec::new();
        while self.head != tail {
            let len = u32::try_from(self.element).unwrap();
            let addr = self.bed.slot(self.head, self.entries, len);
            out.push(self.bed.memory.read_vec(addr, usize::try_from(self.element).unwrap()));
            self.head = (self.head + 1) % (2 * self.entries);
            self.bed.memory.store(self.bed.state() + 12, self.head);
        }
        out
    }
}

#[derive(Default)]
struct Counter([AtomicU64; 3]);

impl InterruptSink for Counter {
    fn msix(&self, vector: u16) {
        self.0[usize::from(vector)].fetch_add(1, Ordering::Relaxed);
    }

    fn intx(&self, _asserted: bool) {}
}

struct Bed {
    memory: Arc<GuestMemory>,
    asynchronous: Ring,
    notifications: Ring,
    hub: Arc<EventHub>,
    counter: Arc<Counter>,
}

impl Bed {
    fn new() -> Self {
        let memory = GuestMemory::new(4 << 20);
        let (asynchronous, notifications) = (Ring::new(&memory, 8, 512), Ring::new(&memory, 4, 1024));
        let hub = EventHub::new("test");
        let counter = Arc::new(Counter::default());
        let bed = Self { memory, asynchronous, notifications, hub, counter };
        bed.install();
        bed
    }

    fn install(&self) {
        let interrupts = open_interrupts(Arc::clone(&self.counter) as Arc<dyn InterruptSink>);
        let rings = EventRings::new(self.asynchronous.bed.list(), self.notifications.bed.list(), interrupts).unwrap();
        self.hub.install(rings);
    }

    fn raised(&self, vector: usize) -> u64 {
        self.counter.0[vector].load(Ordering::Relaxed)
    }
}

fn words(entries: &[Vec<u8>]) -> Vec<u32> {
    entries.iter().map(|e| u32::from_le_bytes(e[e.len() - 4..].try_into().unwrap())).collect()
}

/// Conformance 42: 2000 events with a live consumer.
#[test]
fn two_thousand_async_events() {
    let mut bed = Bed::new();
    for i in 0..2000_u32 {
        bed.hub.event(&bed.memory.space().view(), AsyncEvent::Qp(QpEvent::CommunicationEstablished, i));
        let slot = bed.asynchronous.bed.slot(i, 512, 8);
        assert_eq!(bed.memory.read_vec(slot, 8), [4_u32.to_le_bytes(), i.to_le_bytes()].concat());
        assert_eq!(bed.raised(1), u64::from(i) + 1);
        assert_eq!(words(&bed.asynchronous.drain()), [i]);
    }
}

/// Conformance 43: 5000 notifications with a consumer that is up to 700 behind.
#[test]
fn five_thousand_notifications() {
    let mut bed = Bed::new();
    let mut seen = Vec::new();
    for i in 0..5000_u32 {
        bed.hub.notify_cq(&bed.memory.space().view(), i);
        assert_eq!(bed.memory.load(bed.notifications.bed.slot(i, 1024, 4)), i);
        if i % 700 == 0 {
            seen.extend(words(&bed.notifications.drain()));
        }
    }
    seen.extend(words(&bed.notifications.drain()));
    assert_eq!(seen, (0..5000).collect::<Vec<_>>());
    assert_eq!(bed.raised(2), 5000);
}

/// Conformance 44: with the rings full nothing is overwritten, and everything arrives, once and in order, when the
/// consumer goes on.
#[test]
fn full_rings() {
    let mut bed = Bed::new();
    for i in 0..3000_u32 {
        let view = bed.memory.space().view();
        bed.hub.notify_cq(&view, i);
        bed.hub.event(&view, AsyncEvent::Srq(SrqEvent::LimitReached, i));
        if i >= 2000 {
            // What waits already is not doubled.
            bed.hub.notify_cq(&view, i);
            bed.hub.event(&view, AsyncEvent::Srq(SrqEvent::LimitReached, i));
        }
    }
    assert!(bed.hub.has_pending());
    assert_eq!((bed.raised(1), bed.raised(2)), (512, 1024));
    let (mut events, mut notifications) = (Vec::new(), Vec::new());
    for _ in 0..10 {
        events.extend(words(&bed.asynchronous.drain()));
        notifications.extend(words(&bed.notifications.drain()));
        bed.hub.retry_pending(&bed.memory.space().view());
    }
    assert_eq!(events, (0..3000).collect::<Vec<_>>());
    assert_eq!(notifications, (0..3000).collect::<Vec<_>>());
    assert!(!bed.hub.has_pending());
}

/// Conformance 45: an invalid consumer index ends the posting; no other byte of the state pages is touched.
#[test]
fn invalid_consumer_index() {
    let bed = Bed::new();
    let state = bed.notifications.bed.state();
    let view = bed.memory.space().view();
    for i in 0..1024 {
        bed.hub.notify_cq(&view, i);
    }
    bed.memory.store(state + 12, 0x800);
    bed.hub.notify_cq(&view, 7);
    bed.memory.store(state + 12, 1024);
    bed.hub.notify_cq(&view, 8);
    bed.hub.retry_pending(&view);
    assert_eq!(bed.memory.load(state + 8), 1024);
    assert_eq!(bed.raised(2), 1024);
    assert_eq!(bed.memory.read_vec(state, 8), [0; 8]);
    assert_eq!(bed.memory.read_vec(state + 16, 4080), [0; 4080]);
}

/// Rings come and go; in between events are counted, and old rings stay silent.
#[test]
fn handshakes() {
    let bed = Bed::new();
    let view = bed.memory.space().view();
    let old = bed.hub.rings.read().clone().unwrap();
    bed.hub.remove();
    old.notify_cq(&view, 1);
    old.post_async(&view, AsyncEvent::Port(PortEvent::Active));
    bed.hub.notify_cq(&view, 1);
    bed.hub.event(&view, AsyncEvent::Port(PortEvent::Error));
    assert_eq!(bed.hub.counters()[0].value, 2);
    assert_eq!((bed.raised(1), bed.raised(2)), (0, 0));
    assert_eq!(bed.memory.load(bed.notifications.bed.state() + 8), 0);
    bed.install();
    bed.hub.event(&view, AsyncEvent::Port(PortEvent::Error));
    let entry = bed.memory.read_vec(bed.asynchronous.bed.slot(0, 512, 8), 8);
    assert_eq!(entry, [10, 0, 0, 0, 1, 0, 0, 0]);
}

/// Sizes come from the page counts: the largest power of two that divides the driver's nominal count, for every count the
/// shared region may give.
#[test]
fn sizes() {
    let memory = GuestMemory::new(8 << 20);
    for pages in [2, 3, 4, 5, 9, 512] {
        let bed = RingBed::in_memory(&memory, pages);
        let sink = Arc::new(Counter::default());
        let rings = EventRings::new(bed.list(), bed.list(), open_interrupts(sink)).unwrap();
        let view = memory.space().view();
        let nominal = (pages - 1) * 1024;
        let entries = nominal & nominal.wrapping_neg();
        for i in 0..=entries {
            rings.notify_cq(&view, u32::try_from(i).unwrap());
        }
        assert_eq!(memory.load(bed.state() + 8) as usize, entries);
        assert!(rings.has_pending());
        memory.free(&bed.pages);
    }
    let one = RingBed::in_memory(&memory, 1);
    let interrupts = open_interrupts(Arc::new(Counter::default()));
    assert!(EventRings::new(one.list(), one.list(), interrupts).is_err());
}

/// Conformance 70: index and entry are in memory when the interrupt is raised.
#[test]
fn entry_before_interrupt() {
    struct Check(Arc<GuestMemory>, u64, u64);
    impl InterruptSink for Check {
        fn msix(&self, vector: u16) {
            assert_eq!(vector, 2);
            assert_eq!((self.0.load(self.1), self.0.load(self.2)), (1, 0x77));
        }

        fn intx(&self, _asserted: bool) {}
    }
    let memory = GuestMemory::new(1 << 20);
    let (bed, other) = (RingBed::in_memory(&memory, 4), RingBed::in_memory(&memory, 4));
    let check = Check(Arc::clone(&memory), bed.state() + 8, bed.slot(0, 1024, 4));
    let rings = EventRings::new(other.list(), bed.list(), open_interrupts(Arc::new(check))).unwrap();
    rings.notify_cq(&memory.space().view(), 0x77);
}
