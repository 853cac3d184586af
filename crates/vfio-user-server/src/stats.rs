//! What happened on a device's socket, for the status output.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};

use pvrdma_base::{LogLimit, counters};
use rustix::process::Pid;

counters! {
    /// Counts of a device's socket over all its clients.
    pub struct ClientCounters {
        /// Clients served so far, with the present one.
        client_connections,
        /// Clients sent away because there was one already.
        client_connections_turned_away,
        /// Connections that we ended because of what the client did, or because we were too slow.
        client_connections_broken,
        /// Connections that ended by a bug of ours; their devices were reset at once.
        client_connections_panicked,
        /// Messages received.
        client_messages,
        /// Messages that wanted no answer. Not 0 means that a client posts writes, which the driver does not survive
        /// for long.
        client_messages_posted,
        /// Error replies.
        client_messages_refused,
        /// Ranges of memory that were refused, for what their files are or because a limit of the device is used up.
        client_memory_refused,
        /// Clients that were disconnected because they took memory away that was mapped.
        client_memory_lost,
        /// Times that an access to guest memory waited in the kernel, for 50 ms or more, as while the client punches a
        /// hole there.
        client_memory_stalls,
        /// Clients that were disconnected because their memory stalled three times in ten minutes.
        client_memory_slow,
    }
}

/// Descriptors and mappings that the memory of the present client takes of the process.
#[derive(Debug, Default)]
pub struct MemoryCost {
    files: AtomicUsize,
    mappings: AtomicUsize,
}

impl MemoryCost {
    pub(super) fn set(&self, (files, mappings): (usize, usize)) {
        self.files.store(files, Ordering::Relaxed);
        self.mappings.store(mappings, Ordering::Relaxed);
    }

    /// Files, each a descriptor.
    pub fn files(&self) -> usize {
        self.files.load(Ordering::Relaxed)
    }

    /// Mappings of these files.
    pub fn mappings(&self) -> usize {
        self.mappings.load(Ordering::Relaxed)
    }
}

/// A device's socket.
#[derive(Default)]
pub struct ConnectionStats {
    /// A client is there now.
    connected: AtomicBool,
    /// The process that it is of, as long as it is there. None is 0.
    process: AtomicI32,
    /// Files and mappings of the present client.
    pub cost: MemoryCost,
    /// For what clients cause, over all of them: who is refused may come again at once.
    pub(crate) log: LogLimit,
    /// Is told when that changes.
    observer: Option<Observer>,
    /// What its clients did.
    pub counters: ClientCounters,
}

/// Is told whether there is a client.
type Observer = Box<dyn Fn(bool) + Send + Sync>;

impl fmt::Debug for ConnectionStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionStats")
            .field("connected", &self.connected)
            .field("counters", &self.counters)
            .finish_non_exhaustive()
    }
}

impl ConnectionStats {
    /// Nobody was there yet, and `observer` is told on the thread that serves the socket when somebody comes or goes.
    pub fn with_observer(observer: impl Fn(bool) + Send + Sync + 'static) -> Self {
        Self { observer: Some(Box::new(observer)), ..Self::default() }
    }

    /// Notes which process a client is of that is about to come.
    pub(super) fn set_process(&self, process: Option<Pid>) {
        self.process.store(Pid::as_raw(process), Ordering::Relaxed);
    }

    /// The process of the client that is there, if the system told.
    pub fn process(&self) -> Option<u32> {
        let process = Some(self.process.load(Ordering::Relaxed)).filter(|_| self.is_connected());
        process.and_then(|process| u32::try_from(process).ok()).filter(|&process| process != 0)
    }

    /// Notes that a client came or went.
    pub(crate) fn set_connected(&self, connected: bool) {
        let before = self.connected.swap(connected, Ordering::Relaxed);
        if let Some(observer) = self.observer.as_ref().filter(|_| before != connected) {
            observer(connected);
        }
    }

    /// Returns `true` while a client is there.
    pub fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Relaxed)
    }
}
