//! Pauses beside locks and owed responses that are visible only inside the crate.

use std::sync::atomic::{AtomicBool, Ordering};

use pvrdma_link::{Frames, Link};
use pvrdma_roce::wire::{Opcode, Reth};
use pvrdma_verbs::{MemoryRegion, PauseHca, QueuePair};

use super::{Connected, exposed, give, request};
use crate::RxeHca;

/// Asserts that a pause does not end before `held`, a lock of this thread, is released.
fn assert_pause_waits_for(hca: &RxeHca, held: impl Sized) {
    let paused = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let pausing = scope.spawn(|| {
            assert!(hca.pause());
            paused.store(true, Ordering::SeqCst);
        });
        while !hca.is_paused() {
            std::thread::yield_now();
        }
        (0..1000).for_each(|_| std::thread::yield_now());
        assert!(!paused.load(Ordering::SeqCst), "the pause is early");
        drop(held);
        pausing.join().unwrap();
    });
    assert!(hca.resume());
}

/// A pause waits for the threads that run a queue pair, handle received packets, or access the memory.
#[test]
fn a_pause_waits_for_work_in_progress() {
    let connected = Connected::new(true);
    let (hca, endpoint) = (&connected.nodes[0].hca, &connected.ends[0].qp.endpoint);
    assert_pause_waits_for(hca, endpoint.hold_requester());
    assert_pause_waits_for(hca, connected.nodes[0].memory.view());
    let port = hca.fabric.port.as_ref().unwrap();
    assert_pause_waits_for(hca, port.hold_receiver(endpoint.qp().qpn).unwrap());
}

/// READ data that is owed does not leave in a pause, not even when its queue pair ends.
#[test]
fn responses_that_are_owed_stay_in_a_pause() {
    for ends in [false, true] {
        let (rxe, node, end, cable, _station) = exposed(3);
        let buffer = node.buffer(16 << 10);
        let reth = Reth { address: buffer.start, rkey: buffer.mr.rkey(), length: 16 << 10 };
        give(&cable, &request([10, 0, 0, 2], &end, Opcode::READ_REQUEST, 0, reth), &[]);
        let left = || {
            let mut frames = Frames::default();
            while {
                let before = frames.len();
                rxe.run_ready();
                cable.receive(&mut frames, 100);
                frames.len() > before
            } {}
            frames.len()
        };
        rxe.run_ready();
        assert!(node.hca.pause());
        let before = left();
        if ends {
            end.qp.destroy();
        }
        assert_eq!(left(), 0);
        assert!(node.hca.resume());
        assert_eq!(before + left(), if ends { before } else { 16 });
    }
}
