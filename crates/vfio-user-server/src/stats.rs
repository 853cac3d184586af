//! Statistics of a device's socket, for the status output.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};

use pvrdma_base::{LogLimit, counters};
use rustix::process::Pid;

counters! {
    /// Counts of a device's socket over all its clients.
    pub struct ClientCounters {
        /// Clients served, including the present one.
        client_connections,
        /// Clients that were refused because another one was connected.
        client_connections_turned_away,
        /// Connections that the daemon closed, because of an invalid message or because a reply took too long.
        client_connections_broken,
        /// Clients that continued, with their functions in reset, after the process that served them had crashed.
        client_connections_recovered,
        /// Connections that ended by a panic of the daemon; their devices were reset.
        client_connections_panicked,
        /// Messages received.
        client_messages,
        /// Messages without a reply. If this is not 0, the client posts writes, which the driver does not support.
        client_messages_posted,
        /// Error replies.
        client_messages_refused,
        /// Memory ranges that were refused because of their file or a limit of the device.
        client_memory_refused,
        /// Clients that were disconnected because they removed mapped memory.
        client_memory_lost,
        /// Accesses to guest memory that waited in the kernel for 50 ms or more, for example while the client punches a
        /// hole.
        client_memory_stalls,
        /// Clients that were disconnected because accesses to their memory stalled three times in ten minutes.
        client_memory_slow,
    }
}

/// Descriptors and mappings that the current client's memory takes in this process.
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

    /// Returns the number of files, each of which takes a descriptor.
    pub fn files(&self) -> usize {
        self.files.load(Ordering::Relaxed)
    }

    /// Returns the number of mappings of these files.
    pub fn mappings(&self) -> usize {
        self.mappings.load(Ordering::Relaxed)
    }
}

/// Statistics of a device's socket.
#[derive(Default)]
pub struct ConnectionStats {
    /// A client is connected.
    connected: AtomicBool,
    /// PID of the connected client; 0 if unknown. Valid while a client is connected.
    process: AtomicI32,
    /// The client migrates the device: it is not in RUNNING, or the log of written pages is on.
    migrating: AtomicBool,
    /// Files and mappings of the current client.
    pub cost: MemoryCost,
    /// Log limit shared by all clients, because a refused client may reconnect at once.
    pub(crate) log: LogLimit,
    /// Called when a client connects or disconnects.
    observer: Option<Observer>,
    /// Counts of client actions.
    pub counters: ClientCounters,
}

/// Callback for the presence of a client.
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
    /// Creates statistics of a new socket. `observer` is called when a client connects, or is taken over from another
    /// server, and when it disconnects; not when it is given away.
    pub fn with_observer(observer: impl Fn(bool) + Send + Sync + 'static) -> Self {
        Self { observer: Some(Box::new(observer)), ..Self::default() }
    }

    /// Sets the PID of a client that is about to be served.
    pub(super) fn set_process(&self, process: Option<Pid>) {
        self.process.store(Pid::as_raw(process), Ordering::Relaxed);
    }

    /// Returns the PID of the connected client, if it is known.
    pub fn process(&self) -> Option<u32> {
        let process = Some(self.process.load(Ordering::Relaxed)).filter(|_| self.is_connected());
        process.and_then(|process| u32::try_from(process).ok()).filter(|&process| process != 0)
    }

    /// Records that a client connected or disconnected, and calls the observer if that is a change.
    pub(crate) fn set_connected(&self, connected: bool) {
        let before = self.connected.swap(connected, Ordering::Relaxed);
        if let Some(observer) = self.observer.as_ref().filter(|_| before != connected) {
            observer(connected);
        }
    }

    /// Records that another server has the client, without a call of the observer.
    pub(crate) fn set_given(&self) {
        self.connected.store(false, Ordering::Relaxed);
    }

    /// Records that the client migrates the device, or no longer does.
    pub(crate) fn set_migrating(&self, migrating: bool) {
        self.migrating.store(migrating, Ordering::Relaxed);
    }

    /// Returns `true` while the client migrates the device.
    pub fn is_migrating(&self) -> bool {
        self.migrating.load(Ordering::Relaxed)
    }

    /// Returns `true` while a client is connected.
    pub fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Relaxed)
    }
}
