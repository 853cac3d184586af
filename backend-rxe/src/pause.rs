//! Pausing an adapter.
//!
//! # Order of a pause
//!
//! The adapter is marked first. Each thread that would touch its queue pairs or its guest's memory checks the mark
//! while it holds a lock. The pause then takes and releases each of these locks once:
//!
//! | threads | lock | in a pause |
//! | --- | --- | --- |
//! | those that run a queue pair of the adapter: engine, doorbells, port | its requester | they do nothing |
//! | those that receive packets or send responses | a receive queue of the port | they drop packets or [hold off] |
//! | those that run a peer in the process, which delivers here | views of both, or of slow memory | they [wait] |
//! | that of the connections to iWARP peers | a view of the memory | it loses datagrams to the guest |
//! | those that look for receives in a shared receive queue | a view of the memory | they do nothing |
//!
//! Owed responses stay owed.
//!
//! [wait]: crate::paused::Paused::wait
//! [hold off]: crate::path::wire::hold
//!
//! Requesters of other adapters check the generation of the directory instead of the mark, because they do so for every
//! batch anyway. The generation changes after the mark is set. So a thread that finds it unchanged took its views
//! before the pause waits for them.
//!
//! # Time
//!
//! For requests, time stands still during a pause. Requesters of local connections compare the number of pauses with
//! that at their last run ([`Directory::pauses`](crate::path::directory::Directory::pauses)). If it has changed, they
//! retry without spending a retry. The adapter's own connections to other hosts restart their timers.

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
        endpoints.iter().for_each(|endpoint| endpoint.prompt_peer());
        endpoints.iter().for_each(|endpoint| endpoint.ring());
        waiters.values().for_each(|task| task.schedule());
        true
    }

    fn is_paused(&self) -> bool {
        self.adapter().paused.is_set()
    }
}
