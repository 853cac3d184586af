//! The control socket: one JSON object in a line asks, one answers.
//!
//! `{"request":"status"}` is answered with `{"ok":…}`, `{"request":"show","device":"vm0","object":"qp"}` with
//! `{"objects":[…]}`. `{"request":"capture","device":"vm0"}` is answered with `{"capturing":{}}`, and from there on the
//! connection carries a capture in pcapng (see [`crate::capture`]) until the asking side closes its half. Anything else
//! is answered with `{"error":"…"}`.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use log::{debug, error};
use pvrdma_dev::ObjectKind;
use pvrdma_rxe::capture::{Capture, CaptureConfig};
use pvrdma_verbs::LogLimit;
use pvrdma_verbs::threads::{self, ThreadKind};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::capture::stream::{self, Streams};
use crate::control_access::ControlAccess;
use crate::socket::{SocketFile, user};
use crate::status::DaemonStatus;

/// Longest question.
const MAX_REQUEST: usize = 4096;

/// Longest answer that the asking side takes.
const MAX_RESPONSE: usize = 64 << 20;

/// Questions are answered one after the other, so nobody may keep the line for longer.
const CONNECTION_TIME: Duration = Duration::from_secs(2);

/// How long the asking side waits.
const PATIENCE: Duration = Duration::from_secs(20);

/// A question.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "lowercase", deny_unknown_fields)]
enum Request {
    /// What the daemon does.
    Status {},
    /// The objects of a device.
    Show {
        /// Which device.
        device: String,
        /// Which objects.
        object: ObjectKind,
    },
    /// What goes over a device.
    Capture {
        /// Which device.
        device: String,
        /// Bytes of a frame that are kept.
        #[serde(default)]
        snaplen: Option<u32>,
    },
}

/// An answer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Response {
    /// As asked.
    Ok(Box<DaemonStatus>),
    /// Objects as data.
    Objects(Value),
    /// A capture follows.
    Capturing {},
    /// Not understood.
    Error(String),
}

/// Answers questions until dropped.
#[derive(Debug)]
pub(crate) struct ControlServer {
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl ControlServer {
    /// Starts answering at a socket that listens already.
    ///
    /// # Errors
    /// The system has no room for another thread.
    pub(crate) fn start(
        socket: SocketFile,
        access: Arc<ControlAccess>,
        status: impl Fn() -> DaemonStatus + Send + 'static,
        show: impl Fn(&str, ObjectKind) -> Result<Value, String> + Send + 'static,
        capture: impl Fn(&str, CaptureConfig) -> Result<Capture, String> + Send + 'static,
    ) -> io::Result<Self> {
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        let stopped = stop.try_clone()?;
        let thread = threads::spawn(ThreadKind::Supervisor, "control", move || {
            let mut server = Server {
                stop: stopped,
                log: LogLimit::new(),
                access,
                status,
                show,
                capture,
                streams: Streams::default(),
            };
            let far = Instant::now() + Duration::from_secs(u64::from(u32::MAX));
            while wait(&server.stop, &socket.listener(), far) {
                match socket.listener().accept() {
                    Ok((stream, _)) if !server.access.admits(&stream) => {}
                    Ok((stream, _)) => {
                        if let Err(error) = server.serve(stream) {
                            debug!("control connection: {error}");
                        }
                    }
                    Err(error) => {
                        server.log.error("control socket", format_args!("cannot accept a connection: {error}"));
                        thread::sleep(Duration::from_millis(100));
                    }
                }
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        if rustix::io::write(&self.stop, &1u64.to_ne_bytes()).is_ok()
            && let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            // Log: the last of this thread.
            error!("the control thread panicked");
        }
    }
}

/// Waits until there is something to read. False when it is time to stop.
fn wait(stop: &OwnedFd, source: &impl AsFd, deadline: Instant) -> bool {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut poll = [PollFd::new(stop, PollFlags::IN), PollFd::new(source, PollFlags::IN)];
        match rustix::event::poll(&mut poll, Timespec::try_from(left).ok().as_ref()) {
            Err(Errno::INTR) => {}
            Err(_) | Ok(0) => return false,
            Ok(_) => return poll.first().is_some_and(|stop| stop.revents().is_empty()),
        }
    }
}

/// What the thread has.
struct Server<S, W, C> {
    stop: OwnedFd,
    log: LogLimit,
    access: Arc<ControlAccess>,
    status: S,
    show: W,
    capture: C,
    streams: Streams,
}

impl<S, W, C> Server<S, W, C>
where
    S: Fn() -> DaemonStatus,
    W: Fn(&str, ObjectKind) -> Result<Value, String>,
    C: Fn(&str, CaptureConfig) -> Result<Capture, String>,
{
    fn serve(&mut self, stream: UnixStream) -> io::Result<()> {
        let deadline = Instant::now() + CONNECTION_TIME;
        stream.set_write_timeout(Some(CONNECTION_TIME))?;
        let mut line = Vec::new();
        let mut chunk = [0; MAX_REQUEST];
        while wait(&self.stop, &stream, deadline) {
            let count = match (&stream).read(&mut chunk)? {
                0 => return Ok(()),
                count => count,
            };
            line.extend_from_slice(chunk.get(..count).unwrap_or_default());
            while let Some(end) = line.iter().position(|&byte| byte == b'\n') {
                let rest = line.split_off(end.saturating_add(1));
                let response = match serde_json::from_slice(&line) {
                    Ok(Request::Status {}) => Response::Ok(Box::new((self.status)())),
                    Ok(Request::Show { device, object }) => {
                        (self.show)(&device, object).map_or_else(Response::Error, Response::Objects)
                    }
                    Ok(Request::Capture { device, snaplen }) => return self.start_capture(stream, device, snaplen),
                    Err(error) => Response::Error(error.to_string()),
                };
                send(&stream, &response)?;
                line = rest;
            }
            if line.len() > MAX_REQUEST {
                return send(&stream, &Response::Error(format!("a request has at most {MAX_REQUEST} bytes")));
            }
        }
        Ok(())
    }

    /// Hands the connection to a thread of its own.
    fn start_capture(&mut self, stream: UnixStream, device: String, snaplen: Option<u32>) -> io::Result<()> {
        let started = self.access.permits_capture(&device).and_then(|()| {
            let config = stream::config(snaplen)?;
            Ok((config, (self.capture)(&device, config)?))
        });
        match started {
            Ok((config, capture)) => {
                send(&stream, &Response::Capturing {})?;
                self.streams.start(stream, device, config.snaplen, capture)
            }
            Err(problem) => send(&stream, &Response::Error(problem)),
        }
    }
}

fn send(mut stream: &UnixStream, response: &Response) -> io::Result<()> {
    let mut text = serde_json::to_vec(response)?;
    text.push(b'\n');
    stream.write_all(&text)
}

/// Asks a running daemon how it is.
///
/// # Errors
/// Nobody answers there, or not in the way we understand.
pub fn ask_status(path: &Path) -> Result<DaemonStatus> {
    let (_, response) = ask(path, &Request::Status {})?;
    match response {
        Response::Ok(status) => Ok(*status),
        _ => bail!("{}: the answer is not understood", path.display()),
    }
}

/// Asks a running daemon for the objects of a device.
///
/// # Errors
/// Nobody answers there, or with a refusal, or not in the way we understand.
pub fn ask_objects(path: &Path, device: &str, object: ObjectKind) -> Result<Value> {
    let (_, response) = ask(path, &Request::Show { device: device.to_owned(), object })?;
    match response {
        Response::Objects(objects) => Ok(objects),
        _ => bail!("{}: the answer is not understood", path.display()),
    }
}

/// Asks a running daemon for a capture, which is what can be read from then on.
///
/// # Errors
/// Nobody answers there, or with a refusal, or not in the way we understand.
pub fn start_capture(path: &Path, device: &str, snaplen: Option<u32>) -> Result<UnixStream> {
    let (stream, response) = ask(path, &Request::Capture { device: device.to_owned(), snaplen })?;
    match response {
        Response::Capturing {} => {
            stream.set_read_timeout(None)?;
            Ok(stream)
        }
        _ => bail!("{}: the answer is not understood", path.display()),
    }
}

fn ask(path: &Path, request: &Request) -> Result<(UnixStream, Response)> {
    let ask = || -> Result<(UnixStream, Response)> {
        let stream = UnixStream::connect(path).map_err(|error| unreachable(path, error))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut request = serde_json::to_vec(request)?;
        request.push(b'\n');
        (&stream).write_all(&request)?;
        let answer = read_line(&stream)?;
        // A vfio-user header has zeros, JSON does not.
        if answer.contains(&0) {
            bail!("this is the socket of a device, for its VMM; use the control socket");
        }
        match serde_json::from_slice(&answer).context("the answer is not understood")? {
            Response::Error(problem) => bail!("the daemon refused: {problem}"),
            response => Ok((stream, response)),
        }
    };
    ask().with_context(|| path.display().to_string())
}

/// Why nobody could be asked.
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

/// Reads up to the end of a line, and nothing of what follows: that may be a capture.
fn read_line(mut stream: &UnixStream) -> Result<Vec<u8>> {
    let (mut line, mut chunk) = (Vec::new(), [0; 4096]);
    while line.len() < MAX_RESPONSE {
        let (seen, _) = rustix::net::recv(stream, &mut chunk, RecvFlags::PEEK)?;
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
