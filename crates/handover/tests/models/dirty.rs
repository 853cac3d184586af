//! A VMM copies the pages that a report names while devices write to them (`crates/guest-memory/src/dirty.rs`).

use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::sync::{Arc, RwLock};
use loom::thread;
use pvrdma_handover::DirtyBitmap;

use super::check;

/// Steps of the protocol. A model leaves one out to check that it notices.
#[derive(Clone, Copy)]
struct Has {
    /// The report waits for the views of the memory.
    barrier: bool,
    /// A writer holds a view when it marks a page.
    view: bool,
}

const ALL: Has = Has { barrier: true, view: true };

/// A page of guest memory with its bit.
struct World {
    map: RwLock<()>,
    bitmap: DirtyBitmap,
    page: AtomicUsize,
}

impl World {
    fn new() -> Arc<Self> {
        Arc::new(Self { map: RwLock::new(()), bitmap: DirtyBitmap::new(1), page: AtomicUsize::new(0) })
    }

    /// A device writes to the page.
    fn write(&self, value: usize, has: Has) {
        if !has.view {
            self.bitmap.mark(0, 0);
        }
        let _view = self.map.read().unwrap();
        if has.view {
            self.bitmap.mark(0, 0);
        }
        self.page.fetch_or(value, Ordering::Relaxed);
    }

    /// The VMM asks for the bitmap, and copies the page if it is written.
    fn report(&self, has: Has, copy: &mut usize) {
        let bits = self.bitmap.take(0, u64::MAX);
        if has.barrier {
            drop(self.map.write().unwrap());
        }
        if bits != 0 {
            *copy = self.page.load(Ordering::Relaxed);
        }
    }
}

/// `writers` devices write to a page while the VMM copies it twice. When they have stopped, the VMM copies a last time.
fn copied(writers: usize, has: Has) {
    let world = World::new();
    let threads: Vec<_> = (0..writers)
        .map(|writer| {
            let world = Arc::clone(&world);
            thread::spawn(move || world.write(1 << writer, has))
        })
        .collect();
    let mut copy = 0;
    world.report(has, &mut copy);
    for thread in threads {
        thread.join().unwrap();
    }
    world.report(has, &mut copy);
    assert_eq!(copy, world.page.load(Ordering::Relaxed), "a page is lost");
}

#[test]
fn every_page_is_copied() {
    check(|| copied(1, ALL));
}

/// The second writer may find the bit of the first one.
#[test]
fn a_page_with_two_writers_is_copied() {
    check(|| copied(2, ALL));
}

#[test]
#[should_panic(expected = "a page is lost")]
fn without_the_barrier() {
    check(|| copied(1, Has { barrier: false, ..ALL }));
}

#[test]
#[should_panic(expected = "a page is lost")]
fn without_the_view() {
    check(|| copied(1, Has { view: false, ..ALL }));
}
