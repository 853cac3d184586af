//! Pausing an adapter.
//!
//! # What waits for what
//!
//! The adapter is marked first. Each thread that would touch its queue pairs or the guest's memory looks at the mark
//! with a lock held, and the pause then waits once for each of these locks:
//!
//! | threads | lock with which they look | what they do in a pause |
//! | --- | --- | --- |
//! | those that run a queue pair of the adapter: engine, doorbells, port | its requester | nothing |
//! | those that handle received packets or send responses | a receive queue of the port | drop requests and responses of peers, which repeat them; owe the responses |
//! | those that run a queue pair of another adapter which delivers to this one | views of both memories | [wait](crate::paused::Paused::wait) |
//! | those that look for receives in a shared receive queue | a view of the memory | nothing |
//!
//! Requesters of other adapters look at the generation of the directory instead of the mark, because they do so for
//! every batch anyway. The generation ends after the mark is set, so a thread that finds it unchanged took its views
//! before the pause waits for them.
//!
//! # Time
//!
//! Time does not pass for requests in a pause. The adapter's own requesters start their timers anew when it ends.
//! Requesters of other adapters compare the number of pauses in the process with the number when their wait began
//! ([`Directory::pauses`](crate::path::directory::Directory::pauses)): if it has changed, they try again without
//! spending a retry.

use pvrdma_verbs::PauseHca;

use crate::hca::RxeHca;

impl PauseHca for RxeHca {
    fn pause(&self) -> bool {
        let adapter = self.adapter();
        let mut complete = adapter.paused.change();
        if *complete {
            return false;
        }
        self.fabric.directory.pause(&self.node);
        if let Some(port) = &self.fabric.port {
            port.wait_for_receivers();
        }
        self.node.qps().iter().for_each(|endpoint| endpoint.wait_for_run());
        adapter.memory.barrier();
        *complete = true;
        true
    }

    fn resume(&self) -> bool {
        let mut complete = self.adapter().paused.change();
        if !*complete {
            return false;
        }
        let endpoints = self.node.qps();
        // Before anything runs, so that no timer that fired meanwhile counts.
        endpoints.iter().for_each(|endpoint| endpoint.restart_timers());
        let waiters = self.fabric.directory.resume(&self.node);
        *complete = false;
        endpoints.iter().for_each(|endpoint| endpoint.ring());
        waiters.values().for_each(|task| task.schedule());
        true
    }

    fn is_paused(&self) -> bool {
        self.adapter().paused.is_set()
    }
}
