//! `-netdev dgram`: each frame is a datagram.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use pvrdma_link::{Connector, Frames, Link, LinkInspect, MAX_LINK_FRAME, Readiness, Reconnect};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::open::{PathConnector, ready_datagram};

/// A link over datagram sockets. Both ends may start, end and restart in any order.
///
/// Frames are received at a bound socket, from any process that may write to it. They are sent through a second,
/// connected socket, because only a connected socket can be polled for room. The bound socket cannot be that one: once
/// connected, it would reject the frames of a restarted peer.
#[derive(Debug)]
pub struct DatagramLink {
    input: Arc<OwnedFd>,
    /// Path of `input`, empty if it has none.
    local: PathBuf,
    remote: PathBuf,
    output: Mutex<Option<Arc<OwnedFd>>>,
    reconnect: Reconnect,
    lost: AtomicU64,
}

impl DatagramLink {
    /// Receives at `local` and sends to the socket at `remote`.
    ///
    /// # Errors
    /// The socket cannot be used.
    pub fn new(local: UnixDatagram, remote: PathBuf) -> io::Result<Self> {
        let address = local.local_addr()?;
        let path = address.as_pathname().map(Path::to_owned).unwrap_or_default();
        let connector = Arc::new(PathConnector::datagram(remote.clone()));
        Ok(Self::from_socket(ready_datagram(local)?, path, remote, connector))
    }

    /// Receives at a [prepared](ready_datagram) socket, which is bound to `local`, and sends through the sockets from
    /// `connector`, which are connected to `remote` ([`connect_datagram`](super::connect_datagram)). The paths are for
    /// descriptions only.
    pub fn from_socket(input: OwnedFd, local: PathBuf, remote: PathBuf, connector: Arc<dyn Connector>) -> Self {
        Self {
            input: Arc::new(input),
            local,
            remote,
            output: Mutex::new(None),
            reconnect: Reconnect::new(connector),
            lost: AtomicU64::new(0),
        }
    }
}

impl Link for DatagramLink {
    fn receive(&self, frames: &mut Frames, most: usize) {
        for _ in 0..most {
            let more = frames.push_with(MAX_LINK_FRAME, |room| {
                rustix::net::recv(&self.input, room, RecvFlags::DONTWAIT).ok().map(|(count, _)| count)
            });
            if !more {
                return;
            }
            self.reconnect.expedite();
        }
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        let mut output = self.output.lock();
        let mut taken = 0;
        for frame in frames.iter_from(from) {
            // The first attempt uses the current connection, the second one a new one.
            let mut result = Err(Errno::NOTCONN);
            for _ in 0..2 {
                if output.is_none() {
                    *output = self.reconnect.attempt().map(Arc::new);
                }
                let Some(socket) = output.as_ref() else { break };
                result = rustix::net::send(socket, frame, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
                match result {
                    Err(Errno::CONNREFUSED | Errno::NOTCONN | Errno::CONNRESET | Errno::PIPE) => *output = None,
                    _ => break,
                }
            }
            match result {
                Err(Errno::AGAIN) => return taken,
                Err(_) => _ = self.lost.fetch_add(1, Ordering::Relaxed),
                Ok(_) => {}
            }
            taken += 1;
        }
        taken
    }

    fn readiness(&self) -> Readiness {
        let writable = self.output.lock().clone();
        Readiness { readable: Some(Arc::clone(&self.input)), writable, ..Readiness::default() }
    }

    fn inspect(&self) -> LinkInspect {
        let up = self.output.try_lock().map(|output| output.is_some());
        let peers = vec![self.remote.display().to_string()];
        LinkInspect { kind: "unix", name: self.local.display().to_string(), peers, up: up.into() }
    }

    fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}
