//! The connection of a migration: a Unix socket that only the owner of both processes can use. Waits on it end at a
//! deadline, or when the migration is cancelled.

use std::fs::{self, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use parking_lot::Mutex;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, sockopt};
use rustix::process::{Uid, geteuid};

/// Listening socket of a destination. Dropping it removes its file.
#[derive(Debug)]
pub(crate) struct Listener {
    listener: UnixListener,
    path: PathBuf,
    /// The only user that may connect.
    user: Uid,
}

impl Listener {
    /// Creates the socket, whose path must not exist.
    pub(crate) fn bind(path: &Path) -> Result<Self> {
        let bind = || {
            let listener = Self { listener: UnixListener::bind(path)?, path: path.to_owned(), user: geteuid() };
            // A stranger that connects before this has an effect is refused by its credentials.
            fs::set_permissions(path, Permissions::from_mode(0o600)).map(|()| listener)
        };
        bind().with_context(|| format!("cannot listen on {}", path.display()))
    }

    /// Waits for a source, which has `limit` for the whole migration. Other users are refused.
    pub(crate) fn accept(self, limit: Duration) -> Result<Link> {
        loop {
            let (stream, _) = self.listener.accept().context("cannot accept a source")?;
            match check_user(&stream, self.user) {
                Ok(()) => return Link::new(stream, limit, Arc::default()),
                Err(error) => eprintln!("{}: {error:#}", self.path.display()),
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // The file may have been removed by another process.
        let _ = fs::remove_file(&self.path);
    }
}

/// Connects to a listener, which must be one of this user.
fn connect_to(path: &Path, user: Uid, limit: Duration) -> Result<UnixStream> {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(limit))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = UnixStream::from(socket);
    // Another user may have created the socket, to get the guest's memory.
    check_user(&stream, user)?;
    Ok(stream)
}

/// Checks that the process at the other end belongs to this user.
fn check_user(stream: &UnixStream, user: Uid) -> Result<()> {
    let other = sockopt::socket_peercred(stream).context("cannot ask for the other end's user")?.uid;
    ensure!(other == user, "the other end belongs to user {}, not to {}", other.as_raw(), user.as_raw());
    Ok(())
}

/// Stage of a migration as far as it matters for its cancellation.
#[derive(Debug, Default)]
enum Stage {
    /// None is in progress, or it has gone too far.
    #[default]
    None,
    /// There is no connection yet.
    Begun,
    /// Its connection can be shut down.
    Connected(UnixStream),
    Cancelled,
}

/// Cancellation of a migration by another thread. Consecutive migrations can share a value.
#[derive(Debug, Default)]
pub(crate) struct Cancel(Mutex<Stage>);

impl Cancel {
    /// Begins a migration, which can be cancelled from here on.
    pub(crate) fn begin(&self) {
        *self.0.lock() = Stage::Begun;
    }

    /// Cancels the migration, if there is one: reads and writes of its connection fail.
    pub(crate) fn cancel(&self) {
        let mut stage = self.0.lock();
        match &*stage {
            Stage::None | Stage::Cancelled => return,
            Stage::Begun => {}
            // This fails if the other end has shut the connection down.
            Stage::Connected(stream) => drop(stream.shutdown(Shutdown::Both)),
        }
        *stage = Stage::Cancelled;
    }

    fn is_cancelled(&self) -> bool {
        matches!(*self.0.lock(), Stage::Cancelled)
    }
}

/// An end of the connection. Clones are the same end; the last one closes it.
#[derive(Clone, Debug)]
pub(crate) struct Link(Arc<End>);

#[derive(Debug)]
struct End {
    stream: UnixStream,
    deadline: Mutex<Instant>,
    cancel: Arc<Cancel>,
}

impl Drop for End {
    fn drop(&mut self) {
        // The duplicate in `cancel` would keep the connection open.
        *self.cancel.0.lock() = Stage::None;
    }
}

impl Link {
    /// Connects to the destination that listens on `path`. The migration ends after `limit`.
    pub(crate) fn connect(path: &Path, limit: Duration, cancel: Arc<Cancel>) -> Result<Self> {
        let stream = connect_to(path, geteuid(), limit);
        let stream = stream.with_context(|| format!("cannot connect to {}", path.display()))?;
        Self::new(stream, limit, cancel)
    }

    /// Uses a connected socket.
    pub(crate) fn new(stream: UnixStream, limit: Duration, cancel: Arc<Cancel>) -> Result<Self> {
        let mut stage = cancel.0.lock();
        ensure!(!matches!(*stage, Stage::Cancelled), "cancelled");
        *stage = Stage::Connected(stream.try_clone().context("cannot share a socket")?);
        drop(stage);
        Ok(Self(Arc::new(End { stream, deadline: Mutex::new(Instant::now() + limit), cancel })))
    }

    /// Moves the deadline to `limit` from now, if it is later than that.
    pub(crate) fn limit(&self, limit: Duration) {
        let mut deadline = self.0.deadline.lock();
        *deadline = (*deadline).min(Instant::now() + limit);
    }

    /// Returns the time to the deadline.
    pub(super) fn left(&self) -> Duration {
        self.0.deadline.lock().saturating_duration_since(Instant::now())
    }

    /// Ends the time in which the migration can be cancelled, and gives it `limit` from now.
    ///
    /// # Errors
    /// It has been cancelled.
    pub(crate) fn commit(&self, limit: Duration) -> Result<()> {
        let mut stage = self.0.cancel.0.lock();
        ensure!(!matches!(*stage, Stage::Cancelled), "cancelled");
        *stage = Stage::None;
        *self.0.deadline.lock() = Instant::now() + limit;
        Ok(())
    }

    /// Does an operation that ends at the deadline.
    fn bounded<T>(&self, operation: impl FnOnce(&UnixStream) -> io::Result<T>) -> io::Result<T> {
        let late = || io::Error::new(ErrorKind::TimedOut, "the time for the migration is over");
        let left = self.left();
        if left.is_zero() {
            return Err(late());
        }
        self.0.stream.set_read_timeout(Some(left))?;
        self.0.stream.set_write_timeout(Some(left))?;
        match operation(&self.0.stream) {
            _ if self.0.cancel.is_cancelled() => Err(io::Error::other("cancelled")),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Err(late()),
            result => result,
        }
    }
}

impl Read for Link {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.bounded(|mut stream| stream.read(bytes))
    }
}

impl Write for Link {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bounded(|mut stream| stream.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_socket_is_for_its_owner() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let again = Listener::bind(&path).unwrap_err();
        assert!(format!("{again:#}").contains("cannot listen on "), "{again:#}");

        let mut source = Link::connect(&path, LONG, Arc::default()).unwrap();
        let mut destination = listener.accept(LONG).unwrap();
        assert!(!path.exists(), "one source connects");
        source.write_all(b"memory").unwrap();
        let mut bytes = [0; 6];
        destination.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"memory");
        let gone = Link::connect(&path, LONG, Arc::default()).unwrap_err();
        assert!(format!("{gone:#}").contains("cannot connect to "), "{gone:#}");
    }

    #[test]
    fn another_user_is_refused_by_both_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let mut listener = Listener::bind(&path).unwrap();
        let (own, other) = (geteuid(), Uid::from_raw(geteuid().as_raw() ^ 1));
        let source = connect_to(&path, other, LONG).unwrap_err();
        let reason = format!("the other end belongs to user {}, not to {}", own.as_raw(), other.as_raw());
        assert_eq!(source.to_string(), reason);

        listener.user = other;
        let socket = listener.listener.try_clone().unwrap();
        let destination = thread::spawn(move || listener.accept(LONG).map(drop));
        let mut source = connect_to(&path, own, LONG).unwrap();
        assert_eq!(source.read(&mut [0]).unwrap(), 0, "it is not served");
        rustix::net::shutdown(&socket, rustix::net::Shutdown::Both).unwrap();
        assert!(destination.join().unwrap().is_err());
    }

    #[test]
    fn a_waiting_end_is_cancelled() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let cancel = Arc::new(Cancel::default());
        cancel.cancel();
        let mut link = Link::new(ours, LONG, Arc::clone(&cancel)).unwrap();
        let waiting = thread::spawn(move || (link.read(&mut [0]).unwrap_err(), link));
        cancel.cancel();
        let (error, mut link) = waiting.join().unwrap();
        assert_eq!(error.to_string(), "cancelled");
        assert_eq!(link.write(&[0]).unwrap_err().to_string(), "cancelled");
        assert!(link.commit(LONG).is_err());
    }

    #[test]
    fn a_migration_is_cancelled_before_it_connects() {
        let cancel = Arc::new(Cancel::default());
        let link = || Link::new(UnixStream::pair().unwrap().0, LONG, Arc::clone(&cancel));
        cancel.begin();
        cancel.cancel();
        assert_eq!(link().unwrap_err().to_string(), "cancelled");
        cancel.begin();
        drop(link().unwrap());
    }

    #[test]
    fn after_the_commit_nothing_is_cancelled() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let cancel = Arc::new(Cancel::default());
        let mut link = Link::new(ours, LONG, Arc::clone(&cancel)).unwrap();
        link.commit(LONG).unwrap();
        cancel.cancel();
        theirs.write_all(&[7]).unwrap();
        assert_eq!(link.read(&mut [0]).unwrap(), 1);
    }

    #[test]
    fn the_other_end_sees_that_a_link_is_dropped() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let cancel = Arc::new(Cancel::default());
        let link = Link::new(ours, LONG, Arc::clone(&cancel)).unwrap();
        let clone = link.clone();
        drop((link, clone));
        assert_eq!(theirs.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn the_deadline_ends_a_wait() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut link = Link::new(ours, LONG, Arc::default()).unwrap();
        link.limit(Duration::from_millis(1));
        link.limit(LONG);
        assert!(link.left() <= Duration::from_millis(1), "only shorter");
        for _ in 0..2 {
            assert_eq!(link.read(&mut [0]).unwrap_err().kind(), ErrorKind::TimedOut);
        }
        link.commit(LONG).unwrap();
        assert_eq!(link.write(&[0]).unwrap(), 1);
    }
}
