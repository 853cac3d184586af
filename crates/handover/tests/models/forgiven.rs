//! Packets in flight to a peer that no longer count, because they were not acknowledged for a long time.

use loom::sync::atomic::{AtomicU64, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;
use pvrdma_handover::Level;

use super::check;

/// A window with one connection (`crates/pacing/src/peer_window/mod.rs`).
struct Window {
    level: Level,
    queue: Mutex<()>,
    in_flight: AtomicU64,
    forgiven: AtomicU64,
}

impl Window {
    /// Stops counting the packets in flight, as another connection's thread does when it grants turns.
    fn forgive(&self) {
        let _queue = self.queue.lock().unwrap();
        let stale = self.in_flight.load(Ordering::Relaxed);
        let already = self.forgiven.load(Ordering::Relaxed);
        if stale > already {
            self.forgiven.store(stale, Ordering::Relaxed);
            self.level.change(-i64::try_from(stale - already).unwrap());
        }
    }

    /// Sets the number of packets that the connection has in flight.
    fn count(&self, in_flight: u64) {
        let before = self.in_flight.load(Ordering::Relaxed);
        self.in_flight.store(in_flight, Ordering::Relaxed);
        let mut change = i64::try_from(in_flight).unwrap() - i64::try_from(before).unwrap();
        if self.forgiven.load(Ordering::Relaxed) > 0 {
            change += self.settle(before.saturating_sub(in_flight), in_flight);
        }
        self.level.change(change);
    }

    fn settle(&self, acked: u64, in_flight: u64) -> i64 {
        let _queue = self.queue.lock().unwrap();
        let forgiven = self.forgiven.load(Ordering::Relaxed);
        let left = forgiven.saturating_sub(acked).min(in_flight);
        self.forgiven.store(left, Ordering::Relaxed);
        i64::try_from(forgiven - left).unwrap()
    }
}

/// A connection with two packets in flight leaves, with or without an acknowledgement, while another thread forgives
/// the packets. In the end the window is empty. `settle`: the connection checks once more, under the lock, if packets
/// were forgiven.
fn forgiven_of(settle: bool) {
    let level = Level::new();
    level.change(2);
    let window = Window { level, queue: Mutex::new(()), in_flight: AtomicU64::new(2), forgiven: AtomicU64::new(0) };
    let window = Arc::new(window);
    let other = Arc::clone(&window);
    let other = thread::spawn(move || other.forgive());
    window.count(1);
    window.count(0);
    if settle {
        window.level.change(window.settle(0, 0));
    }
    other.join().unwrap();
    assert_eq!(window.level.get(), 0, "the window has changed for good");
}

fn forgiven() {
    forgiven_of(true);
}

protocol!(forgiven,);

#[test]
#[should_panic(expected = "the window has changed for good")]
fn leaving_without_a_last_look_changes_the_window() {
    check(|| forgiven_of(false));
}
