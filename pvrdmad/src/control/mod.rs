//! Control socket: serves calls of JSON-RPC 2.0, one a line (see [`crate::protocol::json_rpc`]), whose methods are the
//! [`Request`]s that are not internal.
//!
//! A change, such as `remove-device`, is complete when it is answered. After the response to `capture`, the connection
//! carries a capture in pcapng (see [`crate::capture`]) until the client shuts down its half; after the response to
//! `events`, it carries notifications (see [`crate::events`]).

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use log::{debug, error};
use pvrdma_dev::{LimitStatus, ObjectKind};
use pvrdma_verbs::LogLimit;
use pvrdma_verbs::threads::{self, ThreadKind};
use rustix::event::{EventfdFlags, PollFlags};
use rustix::net::RecvFlags;
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::control_access::ControlAccess;
use crate::protocol::json_rpc::{self, Call, CallRefused, Method};
use crate::protocol::{Reply, Request, Upgraded, is_printable_json, printable, printable_text};
use crate::socket::{SocketFile, user};
use crate::status::{DaemonStatus, QueuePairTraffic, by_name, describe_counters};
use crate::stop::wait;
use crate::supervisor::{CaptureError, Supervisor};

/// Prefix of log lines.
const SUBJECT: &str = "control socket";

/// Longest request in bytes.
const MAX_REQUEST: usize = 4096;

/// Longest answer that the client accepts, in bytes.
const MAX_RESPONSE: usize = 64 << 20;

/// Lifetime of a connection, so that a slow client does not occupy one of the few connections for longer.
const CONNECTION_TIME: Duration = Duration::from_secs(2);

/// Time for which the client waits. Adding a device with a new network includes the start of a process.
const PATIENCE: Duration = Duration::from_secs(60);

/// Most concurrent connections. Further ones are closed at once, so that no client waits behind a silent one.
const MAX_CONNECTIONS: usize = 16;

/// Response to a [`Request`] of this socket.
type Response = Reply<DaemonStatus>;

/// The control server. Dropping it stops it.
#[derive(Debug)]
pub(crate) struct ControlServer {
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl ControlServer {
    /// Starts to serve a listening socket.
    ///
    /// # Errors
    /// No thread can be started.
    pub(crate) fn start(
        socket: SocketFile,
        access: Arc<ControlAccess>,
        supervisor: Arc<Supervisor>,
    ) -> io::Result<Self> {
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        let server = Arc::new(Server { stop: stop.try_clone()?, access, log: LogLimit::new(), supervisor });
        let thread = threads::spawn(ThreadKind::Supervisor, "control", move || accept(&socket, &server))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        if rustix::io::write(&self.stop, &1u64.to_ne_bytes()).is_ok()
            && let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            // Log: the last message of this thread.
            error!("the control thread panicked");
        }
    }
}

/// Starts a thread for each connection, until the server is stopped.
fn accept(socket: &SocketFile, server: &Arc<Server>) {
    let mut connections: Vec<JoinHandle<()>> = Vec::new();
    while wait(&server.stop, socket.listener().as_fd(), PollFlags::IN, None) {
        connections.retain(|connection| !connection.is_finished());
        match socket.listener().accept() {
            Ok(_) if connections.len() >= MAX_CONNECTIONS => debug!("too many control connections"),
            Ok((stream, _)) if !server.access.admits(&stream) => {}
            Ok((stream, _)) => {
                let shared = Arc::clone(server);
                let thread = threads::spawn(ThreadKind::Supervisor, "control client", move || {
                    // A panic that a client causes here ends only its own connection, and not the networks.
                    match catch_unwind(AssertUnwindSafe(|| shared.serve(stream))) {
                        Ok(Ok(())) => {}
                        Ok(Err(error)) => debug!("control connection: {error}"),
                        Err(_) => {
                            shared.log.error(module_path!(), SUBJECT, format_args!("a connection ends by a panic"))
                        }
                    }
                });
                match thread {
                    Ok(thread) => connections.push(thread),
                    Err(error) => {
                        server.log.error(module_path!(), SUBJECT, format_args!("no thread for a connection: {error}"))
                    }
                }
            }
            Err(error) => {
                server.log.error(module_path!(), SUBJECT, format_args!("cannot accept a connection: {error}"));
                thread::sleep(Duration::from_millis(100));
            }
        }
    }
    for connection in connections {
        if connection.join().is_err() {
            // Log: the last message of this thread.
            error!("the thread of a control connection panicked");
        }
    }
}

/// State shared by the threads.
#[derive(Debug)]
struct Server {
    stop: OwnedFd,
    access: Arc<ControlAccess>,
    log: LogLimit,
    supervisor: Arc<Supervisor>,
}

impl Server {
    fn serve(&self, stream: UnixStream) -> io::Result<()> {
        let deadline = Some(Instant::now() + CONNECTION_TIME);
        stream.set_write_timeout(Some(CONNECTION_TIME))?;
        let mut line = Vec::new();
        let mut chunk = [0; MAX_REQUEST];
        while wait(&self.stop, stream.as_fd(), PollFlags::IN, deadline) {
            let count = match (&stream).read(&mut chunk)? {
                0 => return Ok(()),
                count => count,
            };
            line.extend_from_slice(chunk.get(..count).unwrap_or_default());
            while let Some(end) = line.iter().position(|&byte| byte == b'\n') {
                let rest = line.split_off(end.saturating_add(1));
                let Call { id, method } = Call::parse_line(&line);
                let answer = match method {
                    Ok(Method::Request(Request::Capture { device, snaplen })) => {
                        return self.capture(&stream, &device, snaplen, id);
                    }
                    Ok(Method::Request(Request::Events {})) => return self.subscribe(stream, id.as_ref()),
                    Ok(Method::Request(request)) => answer(id.as_ref(), &self.answer(request))?,
                    Ok(Method::Hello) => line_for(id.as_ref(), |id| json_rpc::result(id, &json_rpc::greeting()))?,
                    Err(refused) => line_for(id.as_ref(), |id| json_rpc::error(id, &refused))?,
                };
                (&stream).write_all(&answer)?;
                line = rest;
            }
            if line.len() > MAX_REQUEST {
                let refused = CallRefused::too_long(format!("a call has at most {MAX_REQUEST} bytes"));
                let answer = line_for(Some(&Value::Null), |id| json_rpc::error(id, &refused))?;
                return (&stream).write_all(&answer);
            }
        }
        Ok(())
    }

    fn answer(&self, request: Request) -> Response {
        match request {
            Request::Status { describe } => Response::Ok(Box::new(status(&self.access, &self.supervisor, describe))),
            Request::Show { device, object } => {
                self.supervisor.show(&device, object).map_or_else(Response::Error, Response::Objects)
            }
            Request::AddDevice { device } => done(self.supervisor.add(&device)),
            Request::RemoveDevice { device } => done(self.supervisor.remove(&device)),
            Request::Limits { device, set } => {
                self.supervisor.limits(&device, set).map_or_else(Response::Error, Response::Limits)
            }
            Request::Share { device, set } => {
                self.supervisor.share(&device, set).map_or_else(Response::Error, Response::Share)
            }
            Request::Upgrade { network } => {
                self.supervisor.upgrade(network.as_deref()).map_or_else(Response::Error, Response::Upgraded)
            }
            Request::Fault { network, fault } => done(self.supervisor.fault(&network, fault)),
            Request::LogLevel { level } => done(self.supervisor.log_level(&level)),
            Request::Link { device, state } => done(self.supervisor.link(&device, state)),
            Request::Capture { .. }
            | Request::Events {}
            | Request::Hello { .. }
            | Request::Carrier { .. }
            | Request::StartCapture { .. }
            | Request::Serve { .. }
            | Request::Expect { .. }
            | Request::HandOver {}
            | Request::TakeOver {} => Response::Error("not on this socket".to_owned()),
        }
    }

    /// Hands the connection over to the event log.
    fn subscribe(&self, stream: UnixStream, id: Option<&Value>) -> io::Result<()> {
        let first = answer(id, &Response::Events {})?;
        match self.supervisor.events().subscribe(stream, &first) {
            Ok(()) => Ok(()),
            Err(stream) => {
                let refused = Response::Error("the maximum number of subscribers is reached".to_owned());
                (&stream).write_all(&answer(id, &refused)?)
            }
        }
    }

    /// Hands the connection to the worker of the device's network, which answers the client.
    fn capture(
        &self,
        mut stream: &UnixStream,
        device: &str,
        snaplen: Option<u32>,
        id: Option<Value>,
    ) -> io::Result<()> {
        let to = stream.as_fd().try_clone_to_owned()?;
        let permitted = self.access.permits_capture(device).map_err(CaptureError::Refused);
        match permitted.and_then(|()| self.supervisor.capture(device, snaplen, id.clone(), to)) {
            Ok(()) => Ok(()),
            // An error line in the middle of a capture would corrupt it, so the connection is only closed.
            Err(CaptureError::HandedOver) => stream.shutdown(Shutdown::Both),
            Err(CaptureError::Refused(problem)) => {
                let sent = stream.write_all(&answer(id.as_ref(), &Response::Error(problem))?);
                // A worker that did not reply in time may still have the connection.
                stream.shutdown(Shutdown::Both)?;
                sent
            }
        }
    }
}

/// Returns the current status, with the counters of the control socket.
pub(crate) fn status(access: &ControlAccess, supervisor: &Supervisor, describe: bool) -> DaemonStatus {
    let (own, mut status) = (access.counters.list(), supervisor.status(describe));
    status.control = by_name(&own);
    if describe {
        describe_counters(&own, &mut status.counters);
    }
    status
}

/// Encodes the response to a call, and nothing for a notification.
fn answer(id: Option<&Value>, response: &Response) -> io::Result<Vec<u8>> {
    line_for(id, |id| json_rpc::response(id, response))
}

/// Encodes a line for a call with an id, and nothing for a notification.
fn line_for(id: Option<&Value>, text: impl FnOnce(&Value) -> serde_json::Result<Vec<u8>>) -> io::Result<Vec<u8>> {
    Ok(id.map_or_else(|| Ok(Vec::new()), text)?)
}

fn done(result: Result<(), String>) -> Response {
    result.map_or_else(Response::Error, |()| Response::Done {})
}

/// Asks a running daemon for its status, with descriptions of the counters if `describe` is set.
///
/// # Errors
/// No daemon answers, or its answer is invalid.
pub fn ask_status(path: &Path, describe: bool) -> Result<DaemonStatus> {
    ask(path, &Request::Status { describe }).map(|(_, status)| status)
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

/// Asks a running daemon to upgrade a network, or all networks, and returns the result for each.
///
/// # Errors
/// No daemon answers, there is no such network, or the answer is invalid.
pub fn upgrade(path: &Path, network: Option<&str>) -> Result<Vec<Upgraded>> {
    ask(path, &Request::Upgrade { network: network.map(str::to_owned) }).map(|(_, upgraded)| upgraded)
}

/// Replaces control characters in keys and values.
fn printable_words(words: BTreeMap<String, String>) -> BTreeMap<String, String> {
    words.into_iter().map(|(key, value)| (printable_text(&key), printable_text(&value))).collect()
}

/// Sends a call, and returns its result with the connection.
fn ask<T: DeserializeOwned>(path: &Path, request: &Request) -> Result<(UnixStream, T)> {
    let ask = || -> Result<(UnixStream, T)> {
        let stream = UnixStream::connect(path).map_err(|error| unreachable(path, error))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        (&stream).write_all(&json_rpc::call(request)?)?;
        let answer = read_line(&stream)?;
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
fn read_line(mut stream: &UnixStream) -> Result<Vec<u8>> {
    let (mut line, mut chunk) = (Vec::new(), [0; 1 << 16]);
    while line.len() < MAX_RESPONSE {
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
    use super::*;

    /// A user without access is told who owns the socket.
    #[test]
    fn somebody_elses_socket() {
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
