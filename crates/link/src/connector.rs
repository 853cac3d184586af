//! Who gives a link its descriptor anew, so that a link itself opens, binds and connects nothing.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pvrdma_packet::MacAddr;

/// Time between two attempts that fail.
pub const RETRY: Duration = Duration::from_millis(500);
/// Time until a connector is asked for what it said to be in progress.
const IN_PROGRESS: Duration = Duration::from_millis(10);

/// Gives a link the descriptor that takes the place of one that was lost: a connection to the other end, a socket on an
/// interface that was made again. A process without privileges asks another one.
///
/// It is called on the threads that use the link, and should not wait.
pub trait Connector: Send + Sync + fmt::Debug {
    /// Gives a descriptor of the kind that the link began with.
    ///
    /// # Errors
    /// There is none now; the link asks again after half a second. [`io::ErrorKind::WouldBlock`]: one is being made;
    /// the link asks again after 10 ms.
    fn connect(&self) -> io::Result<OwnedFd>;

    /// The link is wanted for frames to these addresses and to groups. Nothing to do where that makes no difference, or
    /// where somebody else sees to it.
    ///
    /// # Errors
    /// The system refuses.
    fn set_addresses(&self, _addresses: &[MacAddr]) -> io::Result<()> {
        Ok(())
    }
}

/// For a link whose descriptor has no successor.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoConnector;

impl Connector for NoConnector {
    fn connect(&self) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// A connector that is not asked too often.
#[derive(Debug)]
pub struct Reconnect {
    connector: Arc<dyn Connector>,
    /// When the next attempt may be, after one that failed, and how long that is.
    next: Mutex<(Option<Instant>, Duration)>,
}

impl Reconnect {
    /// Asks this connector, first at once.
    pub fn new(connector: Arc<dyn Connector>) -> Self {
        Self { connector, next: Mutex::new((None, RETRY)) }
    }

    /// The connector.
    pub fn connector(&self) -> &dyn Connector {
        &*self.connector
    }

    /// A descriptor, if it is time to ask and there is one.
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

    /// The other end was heard: the next attempt need not wait.
    pub fn expedite(&self) {
        self.next.lock().0 = None;
    }

    /// Time to wait between attempts.
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
            assert_eq!((reconnect.interval(), left()), (wait, after), "asked once");
            reconnect.expedite();
        }
        assert!(reconnect.attempt().is_some());
        assert_eq!((reconnect.interval(), left()), (RETRY, 0));
        assert!(NoConnector.connect().is_err());
    }
}
