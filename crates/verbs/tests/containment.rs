//! [`EndOnPanic`](pvrdma_base::EndOnPanic) ends the process on a panic, and does nothing otherwise.

use std::panic::catch_unwind;

use pvrdma_base::{
    EndOnPanic,
    threads::{self, ThreadKind},
};
use pvrdma_verbs::testing::aborts;

#[test]
fn a_thread_that_others_rely_on_takes_the_process_along() {
    let text = aborts("a_thread_that_others_rely_on_takes_the_process_along", || {
        let thread = threads::spawn(ThreadKind::Engine, "rxe-0", || panic!("a bug")).unwrap();
        let _ = thread.join();
    });
    assert!(text.contains("a bug") && text.contains("a panic in thread rxe-0 (engine)"), "{text}");
}

#[test]
fn a_capture_ends_alone() {
    let thread = threads::spawn(ThreadKind::Capture, "capture", || panic!("a bug")).unwrap();
    assert!(thread.join().is_err());
}

#[test]
fn a_caught_panic_in_shared_state_ends_the_process() {
    let text = aborts("a_caught_panic_in_shared_state_ends_the_process", || {
        let _ = catch_unwind(|| {
            let _guard = EndOnPanic::new("the region tables");
            panic!("a bug");
        });
    });
    assert!(text.contains("a panic in the region tables may have left"), "{text}");
    // Without a panic nothing happens.
    drop(EndOnPanic::new("nothing"));
}
