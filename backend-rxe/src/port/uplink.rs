//! What keeps a device connected.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use pvrdma_verbs::Counter;
use pvrdma_verbs::threads::{self, ThreadKind};

use super::Port;
use super::registry::Ports;

/// Keeps a device connected. Dropping it takes the cable out.
#[derive(Debug)]
pub struct Uplink {
    pub(crate) port: Arc<Port>,
    ports: Arc<Ports>,
    thread: Option<JoinHandle<()>>,
}

impl Uplink {
    pub(crate) fn start(port: Arc<Port>, ports: Arc<Ports>, threaded: bool) -> io::Result<Self> {
        let mut uplink = Self { port, ports, thread: None };
        if threaded {
            let port = Arc::clone(&uplink.port);
            let name = format!("port-{}", port.mac);
            uplink.thread = Some(threads::spawn(ThreadKind::Port, name, move || port.work())?);
            uplink.port.read_nic_at_once();
        }
        Ok(uplink)
    }

    /// Counters of the port.
    pub fn counters(&self) -> Vec<Counter> {
        self.port.counts()
    }
}

impl Drop for Uplink {
    fn drop(&mut self) {
        self.ports.remove(self.port.mac);
        self.port.stopping.store(true, Ordering::Release);
        self.port.wake();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            // Log: the last of this thread.
            log::error!("the thread of a port panicked");
        }
    }
}
