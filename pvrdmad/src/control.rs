//! Client of the control socket: the commands of `pvrdmad`.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use pvrdma_dev::{LimitStatus, ObjectKind};
use pvrdma_vfio_user_server::socket::user;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::geteuid;
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::protocol::{REPLACE_VERSION, Request, Upgraded, json_rpc};
use crate::status::{DaemonStatus, QueuePairTraffic};
use crate::text::{is_printable_json, printable, printable_text};

/// Longest answer that the client accepts, in bytes.
const MAX_RESPONSE: usize = 64 << 20;

/// Time for which the client waits. Adding a device with a new network includes the start of a process.
const PATIENCE: Duration = Duration::from_secs(60);

/// Asks a running daemon for its status, with descriptions of the counters if `describe` is set.
///
/// # Errors
/// No daemon answers, or its answer is invalid.
pub fn ask_status(path: &Path, describe: bool) -> Result<DaemonStatus> {
    ask(path, &Request::Status { describe }).map(|(_, status)| status)
}

/// As [`ask_status`], but gives up after `patience` in all, whatever the daemon does.
///
/// # Errors
/// No daemon answers in time, or its answer is invalid.
pub fn ask_status_within(path: &Path, patience: Duration) -> Result<DaemonStatus> {
    let deadline = Instant::now().checked_add(patience);
    ask_until(path, &Request::Status { describe: false }, deadline).map(|(_, status)| status)
}

/// Asks a running daemon for the objects of a device.
///
/// # Errors
/// No daemon answers, it refuses, or its answer is invalid.
pub fn ask_objects(path: &Path, device: &str, object: ObjectKind) -> Result<Value> {
    let (_, objects) = ask::<Box<RawValue>>(path, &Request::Show { device: device.to_owned(), object })?;
    parse_objects(&objects)
}

/// Asks a running daemon for the traffic of a device's queue pairs.
///
/// # Errors
/// No daemon answers, it refuses, or its answer is invalid.
pub fn ask_traffic(path: &Path, device: &str) -> Result<Vec<QueuePairTraffic>> {
    let request = Request::Show { device: device.to_owned(), object: ObjectKind::Traffic };
    let (_, objects) = ask::<Box<RawValue>>(path, &request)?;
    parse_objects(&objects)
}

/// Parses objects of a device and replaces control characters in their text.
fn parse_objects<T: DeserializeOwned>(objects: &RawValue) -> Result<T> {
    let text = objects.get();
    let parsed = if is_printable_json(text) {
        serde_json::from_str(text)
    } else {
        serde_json::from_value(printable(serde_json::from_str(text)?))
    };
    parsed.context("the objects are not understood")
}

/// Asks a running daemon for a capture, which can be read from the returned stream.
///
/// # Errors
/// No daemon answers, it refuses, or its answer is invalid.
pub fn start_capture(path: &Path, device: &str, snaplen: Option<u32>) -> Result<UnixStream> {
    let (stream, _) = ask::<IgnoredAny>(path, &Request::Capture { device: device.to_owned(), snaplen })?;
    stream.set_read_timeout(None)?;
    Ok(stream)
}

/// Subscribes to the events of a running daemon. Each is an object of JSON, on one line.
///
/// # Errors
/// No daemon answers, it refuses, or its answer is invalid.
pub fn start_events(path: &Path) -> Result<impl Iterator<Item = Result<String>> + use<>> {
    #[derive(Deserialize)]
    struct Notification {
        params: Box<RawValue>,
    }
    let (stream, _) = ask::<IgnoredAny>(path, &Request::Events {})?;
    stream.set_read_timeout(None)?;
    Ok(BufReader::new(stream).lines().map(|line| {
        let event: Notification = serde_json::from_str(&line?).context("the event is not understood")?;
        Ok(printable_text(event.params.get()))
    }))
}

/// Asks a running daemon for a change.
///
/// # Errors
/// No daemon answers, it refuses, or its answer is invalid.
pub fn change(path: &Path, request: &Request) -> Result<()> {
    ask::<IgnoredAny>(path, request).map(|_| ())
}

/// Asks a running daemon to set limits of a device, and returns all of its limits.
///
/// # Errors
/// No daemon answers, it refuses, or its answer is invalid.
pub fn limits(path: &Path, device: &str, set: BTreeMap<String, u64>) -> Result<Vec<LimitStatus>> {
    ask(path, &Request::Limits { device: device.to_owned(), set }).map(|(_, limits)| limits)
}

/// Asks a running daemon to set a device's share, and returns the resulting share.
///
/// # Errors
/// No daemon answers, it refuses, or its answer is invalid.
pub fn share(path: &Path, device: &str, set: BTreeMap<String, String>) -> Result<BTreeMap<String, String>> {
    ask(path, &Request::Share { device: device.to_owned(), set }).map(|(_, words)| printable_words(words))
}

/// Asks a running daemon to upgrade a network, or all networks, or with `daemon` itself, and returns the result for
/// each network. With `check` the daemon only returns the obstacles.
///
/// # Errors
/// No daemon answers, there is no such network, or the answer is invalid.
pub fn upgrade(path: &Path, network: Option<&str>, daemon: bool, check: bool) -> Result<Vec<Upgraded>> {
    let request = Request::Upgrade { network: network.map(str::to_owned), daemon, check };
    ask(path, &request).map(|(_, upgraded)| upgraded)
}

/// Asks a running daemon to give its networks to this process. They arrive at the returned connection.
///
/// # Errors
/// No daemon answers, it refuses, or it is one of another user: its descriptions are trusted.
pub(crate) fn start_replacing(path: &Path) -> Result<UnixStream> {
    let (stream, _) = ask::<IgnoredAny>(path, &Request::Replace { version: REPLACE_VERSION })?;
    let uid = rustix::net::sockopt::socket_peercred(&stream)?.uid;
    if !uid.is_root() && uid != geteuid() {
        bail!("{}: the daemon there is one of {}", path.display(), user(uid.as_raw()));
    }
    Ok(stream)
}

/// Replaces control characters in keys and values.
fn printable_words(words: BTreeMap<String, String>) -> BTreeMap<String, String> {
    words.into_iter().map(|(key, value)| (printable_text(&key), printable_text(&value))).collect()
}

/// Sends a call, and returns its result with the connection.
pub(crate) fn ask<T: DeserializeOwned>(path: &Path, request: &Request) -> Result<(UnixStream, T)> {
    ask_until(path, request, None)
}

/// As [`ask`], up to a deadline.
fn ask_until<T: DeserializeOwned>(
    path: &Path,
    request: &Request,
    deadline: Option<Instant>,
) -> Result<(UnixStream, T)> {
    let ask = || -> Result<(UnixStream, T)> {
        let stream = connect(path, remaining(deadline)?).map_err(|error| unreachable(path, error))?;
        stream.set_write_timeout(Some(remaining(deadline)?))?;
        (&stream).write_all(&json_rpc::call(request)?)?;
        let answer = read_line(&stream, deadline)?;
        if answer.is_empty() {
            bail!(
                "the connection ended without an answer: root may ask, the daemon's user, and the control socket's \
                 owner and group"
            );
        }
        // Vfio-user headers contain zeros, JSON does not: this is the socket of a device.
        if answer.contains(&0) {
            bail!("this is the socket of a device, for its VMM; use the control socket");
        }
        match json_rpc::parse_response(&answer).context("the answer is not understood")? {
            Ok(result) => Ok((stream, result)),
            Err(refused) => bail!("the daemon refused: {refused}"),
        }
    };
    ask().with_context(|| path.display().to_string())
}

/// Returns the time for which the next operation may wait.
fn remaining(deadline: Option<Instant>) -> io::Result<Duration> {
    let left = deadline.map_or(PATIENCE, |deadline| deadline.saturating_duration_since(Instant::now()));
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Connects to a socket. Waits while the backlog of the daemon is full.
fn connect(path: &Path, patience: Duration) -> io::Result<UnixStream> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(patience))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

/// Explains why no daemon can be reached.
fn unreachable(path: &Path, error: io::Error) -> anyhow::Error {
    match (error.kind(), fs::metadata(path)) {
        (io::ErrorKind::PermissionDenied, Ok(found)) => {
            anyhow!("no permission to ask: the socket is of {}, mode {:o}", user(found.uid()), found.mode() & 0o777)
        }
        (io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused, _) => {
            anyhow::Error::new(error).context("no daemon answers there (is it running, with --control?)")
        }
        _ => anyhow::Error::new(error).context("no daemon answers there"),
    }
}

/// Reads up to the end of a line and leaves the following data in the socket, because it may be a capture.
fn read_line(mut stream: &UnixStream, deadline: Option<Instant>) -> Result<Vec<u8>> {
    let (mut line, mut chunk) = (Vec::new(), [0; 1 << 16]);
    while line.len() < MAX_RESPONSE {
        stream.set_read_timeout(Some(remaining(deadline)?))?;
        // With a timeout, the call is interrupted when this process is stopped and continued: signal(7).
        let (seen, _) = rustix::io::retry_on_intr(|| rustix::net::recv(stream, &mut chunk[..], RecvFlags::PEEK))?;
        let seen = chunk.get_mut(..seen).unwrap_or_default();
        let end = seen.iter().position(|&byte| byte == b'\n');
        let taken = seen.get_mut(..end.map_or(seen.len(), |end| end.saturating_add(1))).unwrap_or_default();
        stream.read_exact(taken)?;
        line.extend_from_slice(taken);
        if end.is_some() || taken.is_empty() {
            return Ok(line);
        }
    }
    bail!("the answer is too long")
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::thread;

    use super::*;

    /// A daemon that does not accept connections, or sends an answer without an end, is given up.
    #[test]
    fn a_daemon_that_hangs() {
        let folder = tempfile::tempdir().unwrap();
        let (full, endless) = (folder.path().join("full"), folder.path().join("endless"));
        let ask = |path: &Path| ask_status_within(path, Duration::from_millis(20)).map(drop);
        let listener = UnixListener::bind(&full).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let _waits = UnixStream::connect(&full).unwrap();
        assert!(ask(&full).is_err());

        let listener = UnixListener::bind(&endless).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let (mut client, _) = listener.accept().unwrap();
                while client.write_all(b" ").is_ok() {}
            });
            assert!(ask(&endless).is_err());
        });
    }

    /// A user without access is told who owns the socket.
    #[test]
    fn a_socket_of_another_user_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let denied = || io::ErrorKind::PermissionDenied.into();
        let said = format!("{:#}", unreachable(file.path(), denied()));
        let own = user(fs::metadata(file.path()).unwrap().uid());
        assert_eq!(said, format!("no permission to ask: the socket is of {own}, mode 600"));
        // Without access it is not revealed whether the socket exists.
        let said = format!("{:#}", unreachable(Path::new("/no/such"), denied()));
        assert!(said.contains("no daemon answers there"), "{said}");
    }
}
