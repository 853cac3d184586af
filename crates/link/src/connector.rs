//! Replacement of lost descriptors, so that a link itself never opens, binds or connects a socket.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pvrdma_packet::MacAddr;

/// Time between two attempts after a failure.
pub const RETRY: Duration = Duration::from_millis(500);
/// Time between two attempts while the connector reports that one is in progress.
const IN_PROGRESS: Duration = Duration::from_millis(10);

/// Provides the descriptor that replaces a lost one: a connection to the other end, or a socket on a recreated
/// interface. In a process without privileges, it requests the descriptor from a privileged process.
///
/// Threads that use the link call the connector, so it should not block.
pub trait Connector: Send + Sync + fmt::Debug {
    /// Returns a descriptor of the same kind as the link's first one.
    ///
    /// # Errors
    /// No descriptor is available now; the link retries after half a second. [`io::ErrorKind::WouldBlock`]: an attempt
    /// is in progress; the link retries after 10 ms.
    fn connect(&self) -> io::Result<OwnedFd>;

    /// Requests frames to these addresses and to groups. Does nothing where this makes no difference, or where another
    /// component requests them.
    ///
    /// # Errors
    /// The system refuses.
    fn set_addresses(&self, _addresses: &[MacAddr]) -> io::Result<()> {
        Ok(())
    }
}

/// Connector of a link whose descriptor cannot be replaced.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoConnector;

impl Connector for NoConnector {
    fn connect(&self) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Rate limiter in front of a connector.
#[derive(Debug)]
pub struct Reconnect {
    connector: Arc<dyn Connector>,
    /// Earliest time of the next attempt after a failure, and the interval between attempts.
    next: Mutex<(Option<Instant>, Duration)>,
}

impl Reconnect {
    /// Wraps a connector. The first attempt is not delayed.
    pub fn new(connector: Arc<dyn Connector>) -> Self {
        Self { connector, next: Mutex::new((None, RETRY)) }
    }

    /// Returns the connector.
    pub fn connector(&self) -> &dyn Connector {
        &*self.connector
    }

    /// Calls the connector if an attempt is due. Returns the descriptor if it provides one.
    pub fn attempt(&self) -> Option<OwnedFd> {
        let (due, interval) = &mut *self.next.lock();
        let now = Instant::now();
        if due.is_some_and(|due| due > now) {
            return None;
        }
        match self.connector.connect() {
            Ok(descriptor) => {
                (*due, *interval) = (None, RETRY);
                Some(descriptor)
            }
            Err(error) => {
                *interval = if error.kind() == io::ErrorKind::WouldBlock { IN_PROGRESS } else { RETRY };
                *due = now.checked_add(*interval);
                None
            }
        }
    }

    /// Permits the next attempt at once, because the other end has shown a sign of life.
    pub fn expedite(&self) {
        self.next.lock().0 = None;
    }

    /// Returns the interval between attempts.
    pub fn interval(&self) -> Duration {
        self.next.lock().1
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[derive(Debug)]
    struct Script(Mutex<VecDeque<io::Result<OwnedFd>>>);

    impl Connector for Script {
        fn connect(&self) -> io::Result<OwnedFd> {
            self.0.lock().pop_front().unwrap()
        }
    }

    #[test]
    fn a_connector_that_fails_is_left_alone_for_a_while() {
        let descriptor = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let script = [Err(io::ErrorKind::NotFound.into()), Err(io::ErrorKind::WouldBlock.into()), Ok(descriptor)];
        let script = Arc::new(Script(Mutex::new(script.into())));
        let reconnect = Reconnect::new(Arc::clone(&script) as Arc<dyn Connector>);
        let left = || script.0.lock().len();
        for (wait, after) in [(RETRY, 2), (IN_PROGRESS, 1)] {
            assert!(reconnect.attempt().is_none() && reconnect.attempt().is_none());
            assert_eq!((reconnect.interval(), left()), (wait, after), "the connector was asked once");
            reconnect.expedite();
        }
        assert!(reconnect.attempt().is_some());
        assert_eq!((reconnect.interval(), left()), (RETRY, 0));
        assert!(NoConnector.connect().is_err());
    }
}
