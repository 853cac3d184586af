//! RAII handle for a device's network attachment.

use std::sync::Arc;
use std::thread::JoinHandle;

use pvrdma_link::Frames;
use pvrdma_verbs::VerbsError;

use super::Port;
use super::prober::ProbeSender;
use super::registry::Ports;

/// Network attachment of a device. Dropping it detaches the device.
#[derive(Debug)]
pub(crate) struct Uplink {
    pub(crate) port: Arc<Port>,
    ports: Arc<Ports>,
    threads: Vec<JoinHandle<()>>,
}

impl Uplink {
    /// Connects a port to its network.
    ///
    /// # Errors
    /// The device has a port already, or a thread cannot be started.
    pub(crate) fn start(port: Arc<Port>, ports: Arc<Ports>, threaded: bool) -> Result<Self, VerbsError> {
        ports.insert(&port)?;
        port.join();
        let mut uplink = Self { port, ports, threads: Vec::new() };
        if threaded {
            uplink.port.start_threads(&mut uplink.threads)?;
            uplink.port.read_nic_at_once();
            uplink.port.take_at_once();
        }
        Ok(uplink)
    }
}

impl ProbeSender for Port {
    fn send_probes(&self, frames: &Frames) {
        self.send_urgent(frames);
    }
}

impl Drop for Uplink {
    fn drop(&mut self) {
        // The next port of the device, which joins as soon as this one is removed, keeps its registration.
        self.port.leave();
        self.ports.remove(self.port.mac);
        self.port.announcer.stop();
        self.port.take_no_more();
        self.port.end_threads();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                // Log: the last of this thread.
                log::error!("a thread of a port panicked");
            }
        }
        // Adapters may hold the port for longer.
        self.port.uplink.link.detach();
    }
}
