//! A loom model of the list of watched rings. A watcher lists the rings of a context whose page becomes memory, while
//! commands create and destroy queues (`src/watched.rs`, `src/watch_list.rs`, `src/reclaim.rs`). In every order of
//! their steps, each queue whose doorbells are not trapped is watched, and no destroyed queue is.

#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

use std::sync::atomic::{AtomicUsize as StdUsize, Ordering as StdOrdering};

use loom::sync::{Arc, Mutex};
use loom::thread;

use Command::{Create, Destroy, EndAll};

/// Treatment of objects with the same handle.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Same {
    Object,
    /// The first one stays on the list.
    HandleFirst,
    /// The last one stays on the list.
    HandleLast,
}

/// A variant of the model, by the steps that it has.
#[derive(Clone, Copy)]
struct Has {
    same: Same,
    /// After listing a queue, the watcher checks that it still exists.
    second_look: bool,
    /// The thread that ends everything empties the list once more after the table.
    emptied_again: bool,
    /// A context is marked as mapped before its queues are listed, and no other thread changes that meanwhile.
    mapped_first: bool,
}

const ALL: Has = Has { same: Same::Object, second_look: true, emptied_again: true, mapped_first: true };

/// Commands with the number of a queue pair. All queue pairs have the same handle.
#[derive(Clone, Copy)]
enum Command {
    Create(usize),
    Destroy(usize),
    EndAll,
}

/// Returns which of the two contexts owns a queue pair.
const fn owner(object: usize) -> usize {
    object % 2
}

struct World {
    /// The object that has the handle.
    table: Mutex<Option<usize>>,
    list: Mutex<Vec<usize>>,
    /// Contexts whose pages are memory. The lock is `Context::changing`.
    mapped: [Mutex<bool>; 2],
    has: Has,
}

impl World {
    fn get(&self) -> Option<usize> {
        *self.table.lock().unwrap()
    }

    /// `WatchList::add_qp`.
    fn add(&self, object: usize) {
        let mut list = self.list.lock().unwrap();
        if self.has.same == Same::HandleLast {
            list.clear();
        }
        if list.is_empty() || self.has.same == Same::Object && !list.contains(&object) {
            list.push(object);
        }
    }

    /// `WatchList::remove_qp`.
    fn remove(&self, object: usize) {
        self.list.lock().unwrap().retain(|&other| other != object);
    }

    /// `Core::watch_all_of`.
    fn list_all_of(&self, context: usize) {
        let found = self.get().is_some_and(|object| owner(object) == context);
        if let Some(object) = self.get().filter(|_| found) {
            self.add(object);
            if self.has.second_look && self.get() != Some(object) {
                self.remove(object);
            }
        }
    }

    /// `Core::watch_page`.
    fn watch_page(&self, context: usize) {
        if !self.has.mapped_first {
            self.list_all_of(context);
        }
        let mut mapped = self.mapped[context].lock().unwrap();
        *mapped = true;
        if self.has.mapped_first {
            self.list_all_of(context);
        }
        drop(mapped);
    }

    fn run(&self, command: Command) {
        match command {
            Create(object) => {
                *self.table.lock().unwrap() = Some(object);
                // `Core::watch_new`.
                let mapped = self.mapped[owner(object)].lock().unwrap();
                if *mapped {
                    self.add(object);
                }
                drop(mapped);
            }
            Destroy(object) => {
                self.table.lock().unwrap().take();
                self.remove(object);
            }
            EndAll => {
                self.list.lock().unwrap().clear();
                self.table.lock().unwrap().take();
                if self.has.emptied_again {
                    self.list.lock().unwrap().clear();
                }
            }
        }
    }
}

/// The page of context 1 becomes memory during these commands; the page of context 0 already is.
fn model(first: Option<usize>, commands: &'static [Command], has: Has) {
    let orders = std::sync::Arc::new(StdUsize::new(0));
    let counted = std::sync::Arc::clone(&orders);
    loom::model(move || {
        counted.fetch_add(1, StdOrdering::Relaxed);
        let world = Arc::new(World {
            table: Mutex::new(first),
            list: Mutex::default(),
            mapped: [Mutex::new(true), Mutex::new(false)],
            has,
        });
        let watcher = Arc::clone(&world);
        let watcher = thread::spawn(move || watcher.watch_page(1));
        commands.iter().for_each(|&command| world.run(command));
        watcher.join().unwrap();
        let (live, list) = (world.get(), world.list.lock().unwrap().clone());
        assert!(live.is_none_or(|object| list.contains(&object)), "an element is posted, and no thread looks");
        assert!(list.iter().all(|&object| live == Some(object)), "a destroyed object stays on the list");
    });
    println!("{} orders", orders.load(StdOrdering::Relaxed));
}

/// One process ends, and the next one gets the same handle.
const REUSED: &[Command] = &[Destroy(1), Create(2)];

#[test]
fn exactly_the_rings_without_trapped_doorbells_are_watched() {
    model(None, &[Create(1)], ALL);
    model(None, &[Create(1), Destroy(1), Create(3)], ALL);
    model(Some(1), REUSED, ALL);
    model(Some(1), &[Destroy(1), Create(2), Destroy(2), Create(3)], ALL);
    model(Some(1), &[EndAll], ALL);
    model(None, &[Create(1), EndAll, Create(2)], ALL);
}

/// Each omitted step makes the model fail as expected.
#[test]
#[should_panic(expected = "no thread looks")]
fn with_the_first_of_a_handle_the_new_object_is_hidden() {
    model(Some(1), REUSED, Has { same: Same::HandleFirst, ..ALL });
}

#[test]
#[should_panic(expected = "no thread looks")]
fn with_the_last_of_a_handle_the_new_object_is_replaced() {
    model(Some(1), REUSED, Has { same: Same::HandleLast, ..ALL });
}

#[test]
#[should_panic(expected = "a destroyed object stays")]
fn without_a_second_look_a_destroyed_object_stays() {
    model(Some(1), &[Destroy(1)], Has { second_look: false, ..ALL });
}

#[test]
#[should_panic(expected = "a destroyed object stays")]
fn with_the_list_emptied_only_at_first_a_destroyed_object_stays() {
    model(Some(1), &[EndAll], Has { emptied_again: false, ..ALL });
}

#[test]
#[should_panic(expected = "no thread looks")]
fn with_the_page_mapped_last_a_new_one_is_not_watched() {
    model(None, &[Create(1)], Has { mapped_first: false, ..ALL });
}
