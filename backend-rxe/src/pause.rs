//! Pausing an adapter.
//!
//! # What waits for what
//!
//! The adapter is marked first. Each thread that would touch its queue pairs or the guest's memory looks at the mark
//! with a lock held, and the pause then waits once for each of these locks:
//!
//! | threads | lock | in a pause |
//! | --- | --- | --- |
//! | those that run a queue pair of the adapter: engine, doorbells, port | its requester | they do nothing |
//! | those that handle received packets or send responses | a receive queue of the port | they drop the packets |
//! | those that run a peer in the process, which delivers here | views of both, or of slow memory | they [wait] |
//! | those that look for receives in a shared receive queue | a view of the memory | they do nothing |
//!
//! Responses that are owed stay owed.
//!
//! [wait]: crate::paused::Paused::wait
//!
//! Requesters of other adapters look at the generation of the directory instead of the mark, because they do so for
//! every batch anyway. The generation ends after the mark is set, so a thread that finds it unchanged took its views
//! before the pause waits for them.
//!
//! # Time
//!
//! Time does not pass for requests in a pause. Requesters of connections in the process compare the number of pauses
//! with that at their last run ([`Directory::pauses`](crate::path::directory::Directory::pauses)): if it has changed,
//! they try again without spending a retry. The adapter's own connections to other hosts start their timers anew.

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
            port.pause();
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
