//! The control socket: one JSON object in a line asks, one answers.
//!
//! `{"request":"status"}` is answered with `{"ok":…}`, anything else with `{"error":"…"}`.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use log::{debug, error};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::status::DaemonStatus;
use crate::vfio_user::SocketFile;

/// Longest question.
const MAX_REQUEST: usize = 4096;

/// Longest answer that the asking side takes.
const MAX_RESPONSE: u64 = 16 << 20;

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
}

/// An answer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Response {
    /// As asked.
    Ok(Box<DaemonStatus>),
    /// Not understood.
    Error(String),
}

/// Answers questions until dropped.
#[derive(Debug)]
pub struct ControlServer {
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl ControlServer {
    /// Starts answering at a socket that listens already.
    ///
    /// # Errors
    /// The system has no room for another thread.
    pub fn start(socket: SocketFile, status: impl Fn() -> DaemonStatus + Send + 'static) -> io::Result<Self> {
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        let stopped = stop.try_clone()?;
        let thread = thread::Builder::new().name("control".to_owned()).spawn(move || {
            let far = Instant::now() + Duration::from_secs(u64::from(u32::MAX));
            while wait(&stopped, &socket.listener(), far) {
                match socket.listener().accept() {
                    Ok((stream, _)) => {
                        if let Err(error) = serve(&stream, &stopped, &status) {
                            debug!("control connection: {error}");
                        }
                    }
                    Err(error) => {
                        error!("cannot accept a control connection: {error}");
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

fn serve(stream: &UnixStream, stop: &OwnedFd, status: &impl Fn() -> DaemonStatus) -> io::Result<()> {
    let deadline = Instant::now() + CONNECTION_TIME;
    stream.set_write_timeout(Some(CONNECTION_TIME))?;
    let mut line = Vec::new();
    let mut chunk = [0; MAX_REQUEST];
    while wait(stop, &stream, deadline) {
        let count = match (&*stream).read(&mut chunk)? {
            0 => return Ok(()),
            count => count,
        };
        line.extend_from_slice(chunk.get(..count).unwrap_or_default());
        while let Some(end) = line.iter().position(|&byte| byte == b'\n') {
            let rest = line.split_off(end.saturating_add(1));
            answer(stream, &line, status)?;
            line = rest;
        }
        if line.len() > MAX_REQUEST {
            return send(stream, &Response::Error(format!("a request has at most {MAX_REQUEST} bytes")));
        }
    }
    Ok(())
}

fn answer(stream: &UnixStream, line: &[u8], status: &impl Fn() -> DaemonStatus) -> io::Result<()> {
    let response = match serde_json::from_slice(line) {
        Ok(Request::Status {}) => Response::Ok(Box::new(status())),
        Err(error) => Response::Error(error.to_string()),
    };
    send(stream, &response)
}

fn send(mut stream: &UnixStream, response: &Response) -> io::Result<()> {
    let mut text = serde_json::to_vec(response)?;
    text.push(b'\n');
    stream.write_all(&text)
}

/// Asks a running daemon.
///
/// # Errors
/// Nobody answers there, or not in the way we understand.
pub fn ask_status(path: &Path) -> Result<DaemonStatus> {
    let ask = || -> Result<DaemonStatus> {
        let stream = UnixStream::connect(path).context("no daemon answers there")?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut request = serde_json::to_vec(&Request::Status {})?;
        request.push(b'\n');
        (&stream).write_all(&request)?;
        let mut line = String::new();
        BufReader::new(stream.take(MAX_RESPONSE)).read_line(&mut line)?;
        match serde_json::from_str(&line).context("the answer is not understood")? {
            Response::Ok(status) => Ok(*status),
            Response::Error(problem) => bail!("the daemon refused: {problem}"),
        }
    };
    ask().with_context(|| path.display().to_string())
}
