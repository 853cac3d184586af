//! A panic while the state of several guests is being changed ends the process.
#![expect(clippy::panic, reason = "a test of panics")]

use std::panic::{AssertUnwindSafe, catch_unwind};

use pvrdma_guest_memory::DmaView;
use pvrdma_link::{
    Frames, Link, LinkInspect, Readiness,
    memory::{self, MemoryLink},
};
use pvrdma_rxe::{PortRules, Rxe, RxeConfig};
use pvrdma_verbs::{QueueError, QueuePair, SendSource, testing::aborts};
use pvrdma_verbs_types::{QpType, SendWr};

use crate::world::{End, Node, plug};

/// A ring with a bug in it.
struct Buggy;

impl SendSource for Buggy {
    fn pop(&mut self, _view: &DmaView<'_>, _work: &mut SendWr) -> Result<bool, QueueError> {
        panic!("a bug in a ring")
    }

    fn retire(&mut self, _view: &DmaView<'_>) {}

    fn reset(&mut self) {}
}

fn doorbell(config: RxeConfig, ring: impl FnOnce(&End)) {
    let node = Node::new(&Rxe::new(config).unwrap(), 1);
    let end = node.qp_with(QpType::Rc, None, |init| init.send_queue = Box::new(Buggy));
    // The process ends even if the panic would be caught.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        end.connect(&end, |_| ());
        ring(&end);
    }));
}

#[test]
fn on_the_thread_that_rings_the_doorbell() {
    let text = aborts("panics::on_the_thread_that_rings_the_doorbell", || {
        doorbell(RxeConfig::default().with_workers(0), |end| end.qp.notify_send());
    });
    assert!(text.contains("a bug in a ring") && text.contains("a panic in the data path"), "{text}");
}

/// A link with a bug in it.
#[derive(Debug)]
struct BuggyLink(MemoryLink);

impl Link for BuggyLink {
    fn receive(&self, _frames: &mut Frames, _most: usize) {
        panic!("a bug in a link")
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        self.0.send(frames, from)
    }

    fn readiness(&self) -> Readiness {
        self.0.readiness()
    }

    fn lost(&self) -> u64 {
        self.0.lost()
    }

    fn inspect(&self) -> LinkInspect {
        self.0.inspect()
    }
}

#[test]
fn on_the_thread_of_a_port() {
    let text = aborts("panics::on_the_thread_of_a_port", || {
        let rxe = Rxe::new(RxeConfig::default().with_workers(1)).unwrap();
        let (ours, theirs) = memory::pair(1).unwrap();
        let _station = plug(&rxe, 1, BuggyLink(ours), PortRules::default());
        let mut frames = Frames::default();
        frames.push(&[0; 64]);
        theirs.send(&frames, 0);
        loop {
            std::thread::park();
        }
    });
    assert!(text.contains("a bug in a link") && text.contains("a panic in "), "{text}");
}
