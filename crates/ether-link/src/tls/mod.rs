//! A link over TCP with TLS 1.3, between two ends that authenticate each other by certificates. It is for networks that
//! block UDP or are not trusted.
//!
//! Each frame is preceded by its length in four bytes. Both ends first send an empty frame, which tells the other one
//! that its certificate was accepted; later empty frames have no meaning. TCP keeps the order and loses nothing while
//! the connection lasts. Frames for which it has no room stay with the caller. Frames sent without a connection are
//! lost, as without a cable, and so are frames in flight when a connection ends.
//!
//! One end listens. The other one connects, and reconnects when the connection has ended. An end has one connection: a
//! newer authenticated one replaces it, so that a peer that lost power can return at once. A connection that is not
//! authenticated in time, or exceeds the limits, is closed, and its sender learns only the certificate of this end.
//!
//! Keys: [`TlsKeys`] reads the files; a confined process gets them as descriptors.

mod admission;
mod config;
mod counters;
mod handshake;
mod keys;
mod open;
mod session;
mod shared;
#[cfg(test)]
mod tests;

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use pvrdma_base::{
    Counter,
    threads::{self, ThreadKind},
};
use pvrdma_link::{Connector, Frames, Link, LinkInspect, Readiness};
use thiserror::Error;

use self::handshake::{Handshaker, Origin};
use self::shared::Shared;

pub(crate) use self::config::TlsAddress;
pub use self::config::{TlsConfig, TlsFiles, TlsRole};
pub(crate) use self::counters::all_counters;
pub use self::keys::{TlsKeyError, TlsKeys};
pub use self::open::{TlsConnector, listener};

/// Error of creating a TLS link.
#[derive(Debug, Error)]
pub enum TlsError {
    /// The keys are not usable.
    #[error(transparent)]
    Keys(#[from] TlsKeyError),
    /// The number of descriptors is not that of such a link.
    #[error("{0} descriptors came for a TLS link")]
    Descriptors(usize),
    /// The socket or the thread cannot be created. The system's error is the source.
    #[error("tls at {address}")]
    Io {
        /// Address that the link listens on or connects to.
        address: SocketAddr,
        /// Error of the system.
        source: io::Error,
    },
}

/// An end of a TLS link.
#[derive(Debug)]
pub struct TlsLink {
    shared: Arc<Shared>,
    /// Address that the link listens on, if it listens, and configured address of the other end, if there is one.
    listens: Option<SocketAddr>,
    connects: Option<SocketAddr>,
    thread: Option<JoinHandle<()>>,
}

impl TlsLink {
    /// Opens the files and sockets of an end, for a process that may.
    ///
    /// # Errors
    /// The keys are not usable, or the address is not local or in use.
    pub fn open(config: &TlsConfig) -> Result<Self, TlsError> {
        let keys = TlsKeys::read(config)?;
        let failed = |source| TlsError::Io { address: config.address, source };
        let listener = (config.role == TlsRole::Listen).then(|| listener(config.address)).transpose();
        let listener = listener.map_err(failed)?;
        Self::new(config, &keys, listener, Arc::new(TlsConnector(config.address)))
    }

    /// Creates an end from descriptors: its [listener](listener), if it listens, and its [keys](TlsKeys::descriptors).
    /// An end that connects gets its connections from `connector`; they may still be in progress.
    ///
    /// # Errors
    /// The descriptors are not usable.
    pub fn from_descriptors(
        config: &TlsConfig,
        mut fds: Vec<OwnedFd>,
        connector: Arc<dyn Connector>,
    ) -> Result<Self, TlsError> {
        let failed = |source| TlsError::Io { address: config.address, source };
        let keys = fds.split_off(fds.len().saturating_sub(3));
        let keys = <[OwnedFd; 3]>::try_from(keys).map_err(|fds| TlsError::Descriptors(fds.len()))?;
        let keys = TlsKeys::from_descriptors(config, keys).map_err(failed)?;
        let count = fds.len();
        if count != usize::from(config.role == TlsRole::Listen) {
            return Err(TlsError::Descriptors(count.saturating_add(3)));
        }
        Self::new(config, &keys, fds.pop(), connector)
    }

    fn new(
        config: &TlsConfig,
        keys: &TlsKeys,
        listener: Option<OwnedFd>,
        connector: Arc<dyn Connector>,
    ) -> Result<Self, TlsError> {
        let failed = |source| TlsError::Io { address: config.address, source };
        let identity = keys.identity(config)?;
        let shared = Arc::new(Shared::new(format!("link {}:{}", config.word(), config.address)).map_err(failed)?);
        let (origin, listens) = match listener {
            Some(listener) => {
                let local = rustix::net::getsockname(&listener).map_err(io::Error::from);
                let local = local.and_then(|local| Ok(SocketAddr::try_from(local)?)).map_err(failed)?;
                (Origin::Listener(Arc::new(listener)), Some(local))
            }
            None => (Origin::Connector(connector, config.address), None),
        };
        let connects = listens.is_none().then_some(config.address);
        let handshaker = Handshaker::new(Arc::clone(&shared), origin, identity);
        let thread = threads::spawn(ThreadKind::Handshake, "tls", move || handshaker.run()).map_err(failed)?;
        Ok(Self { shared, listens, connects, thread: Some(thread) })
    }
}

impl Drop for TlsLink {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.wake.ring();
        if let Some(session) = self.shared.session.lock().take() {
            session.end();
        }
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            // Log: the last of this thread.
            log::error!("{}: its thread panicked", self.shared.name);
        }
    }
}

impl Link for TlsLink {
    fn receive(&self, frames: &mut Frames, most: usize) {
        let session = self.shared.session().or_else(|| {
            // The handshake thread stores the connection before it rings the bell. So either the second look finds the
            // connection, or the bell will still ring.
            self.shared.arrived.clear();
            self.shared.session()
        });
        let Some(session) = session else { return };
        if let Err(end) = session.receive(frames, most) {
            self.shared.hang_up(&session, &end);
        }
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        let all = frames.len().saturating_sub(from);
        let Some(session) = self.shared.session() else {
            self.shared.lose(all as u64);
            return all;
        };
        match session.send(frames, from) {
            Ok((taken, lost)) => {
                self.shared.lose(lost);
                taken
            }
            Err(end) => {
                self.shared.hang_up(&session, &end);
                self.shared.lose(all as u64);
                all
            }
        }
    }

    fn unsent(&self) -> bool {
        self.shared.session.lock().as_ref().is_some_and(|session| session.is_unsent())
    }

    fn readiness(&self) -> Readiness {
        match self.shared.session() {
            Some(session) => Readiness {
                readable: Some(Arc::clone(&session.socket)),
                writable: Some(Arc::clone(&session.socket)),
                wait: session.holds().then_some(Duration::ZERO),
                ..Readiness::default()
            },
            None => Readiness { readable: Some(self.shared.arrived.descriptor()), ..Readiness::default() },
        }
    }

    fn inspect(&self) -> LinkInspect {
        let session = self.shared.session.try_lock().map(|session| session.as_ref().map(|session| session.peer));
        let up = session.map(|session| session.is_some());
        let configured = self.connects.as_ref().map(SocketAddr::to_string);
        let there = session.flatten().map(|peer| peer.to_string());
        let name = self.listens.as_ref().map_or_else(String::new, SocketAddr::to_string);
        LinkInspect { kind: "tls", name, peers: configured.or(there).into_iter().collect(), up: up.into() }
    }

    fn lost(&self) -> u64 {
        self.shared.lost.load(Ordering::Relaxed)
    }

    fn counters(&self) -> Vec<Counter> {
        self.shared.counters.list()
    }
}
