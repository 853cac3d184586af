//! Control socket: serves calls of JSON-RPC 2.0, one a line (see [`crate::protocol::json_rpc`]), whose methods are the
//! [`Request`]s that are not internal.
//!
//! A change, such as `remove-device`, is complete when it is answered. After the response to `capture`, the connection
//! carries a capture in pcapng until the client shuts down its half; after the response to `events`, it carries
//! notifications (see [`crate::events`]).

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use log::{debug, error};
use parking_lot::Mutex;
use pvrdma_base::{
    LogLimit,
    threads::{self, ThreadKind},
};
use rustix::event::{EventfdFlags, PollFlags};
use serde_json::Value;

use pvrdma_vfio_user_server::socket::SocketFile;

use crate::control_access::ControlAccess;
use crate::notify;
use crate::protocol::json_rpc::{self, Call, CallRefused, Method};
use crate::protocol::{REPLACE_VERSION, Reply, Request};
use crate::status::{DaemonStatus, by_name, describe_counters};
use crate::stop::wait;
use crate::supervisor::{CaptureError, Supervisor};

/// Prefix of log lines.
const SUBJECT: &str = "control socket";

/// Longest request in bytes.
const MAX_REQUEST: usize = 4096;

/// Lifetime of a connection, so that a slow client does not occupy one of the few connections for longer.
const CONNECTION_TIME: Duration = Duration::from_secs(2);

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
        socket: Arc<SocketFile>,
        access: Arc<ControlAccess>,
        supervisor: Arc<Supervisor>,
    ) -> io::Result<Self> {
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        let (log, accepts) = (LogLimit::new(), Mutex::new(true));
        let server = Arc::new(Server { stop: stop.try_clone()?, access, log, accepts, supervisor });
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
        let accepts = server.accepts.lock();
        if !*accepts {
            // Another daemon serves the socket now.
            break;
        }
        let accepted = socket.listener().accept();
        drop(accepts);
        match accepted {
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
    /// Locked while a connection is accepted. Cleared once another daemon serves the socket.
    accepts: Mutex<bool>,
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
                    Ok(Method::Request(Request::Replace { version })) => {
                        return self.replace(&stream, version, id.as_ref());
                    }
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
        // A change is refused while the daemon is being replaced, because it would not reach the next daemon. The
        // request that starts a replacement must not hold this lock, for which the replacement waits.
        let _change = match request {
            Request::Status { .. } | Request::Show { .. } | Request::Upgrade { check: true, .. } => None,
            Request::Upgrade { daemon: true, .. } => None,
            _ => match self.supervisor.change() {
                Ok(change) => Some(change),
                Err(problem) => return Response::Error(problem),
            },
        };
        match request {
            Request::Status { describe } => Response::Ok(Box::new(status(&self.access, &self.supervisor, describe))),
            Request::Show { device, object } => {
                self.supervisor.show(&device, object).map_or_else(Response::Error, Response::Objects)
            }
            Request::Failures { device, since } => {
                Response::Failures(self.supervisor.failures(device.as_deref(), since))
            }
            Request::PastEvents { since, last } => Response::PastEvents(self.supervisor.events().past(since, last)),
            Request::AddDevice { device, network } => done(self.supervisor.add(&device, network.as_deref())),
            Request::RemoveDevice { device } => done(self.supervisor.remove(&device)),
            Request::Limits { device, set } => {
                self.supervisor.limits(&device, set).map_or_else(Response::Error, Response::Limits)
            }
            Request::Share { device, set } => {
                self.supervisor.share(&device, set).map_or_else(Response::Error, Response::Share)
            }
            Request::Upgrade { network, daemon: _, check: true } => {
                self.supervisor.upgrade(network.as_deref(), true).map_or_else(Response::Error, Response::Upgraded)
            }
            Request::Upgrade { network: Some(_), daemon: true, .. } => {
                Response::Error("all networks are handed over with the daemon: name none".to_owned())
            }
            Request::Upgrade { network: None, daemon: true, .. } => match self.supervisor.start_next() {
                Ok(outcome) => Response::Upgraded(outcome.networks),
                Err(problem) => Response::Error(problem),
            },
            Request::Upgrade { network, daemon: false, .. } => {
                self.supervisor.upgrade(network.as_deref(), false).map_or_else(Response::Error, Response::Upgraded)
            }
            Request::Fault { network, fault } => done(self.supervisor.fault(&network, fault)),
            Request::DeviceFaults { faults } => done(self.supervisor.device_faults(faults)),
            Request::LogLevel { level } => done(self.supervisor.log_level(&level)),
            Request::Link { device, state } => done(self.supervisor.link(&device, state)),
            Request::Capture { .. }
            | Request::Events {}
            | Request::Replace { .. }
            | Request::Hello { .. }
            | Request::Carrier { .. }
            | Request::StartCapture { .. }
            | Request::Serve { .. }
            | Request::Expect { .. }
            | Request::CheckHandOver { .. }
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

    /// Gives all networks to the calling process, and ends this daemon if that process serves them.
    fn replace(&self, stream: &UnixStream, version: u32, id: Option<&Value>) -> io::Result<()> {
        let permitted = self.access.permits_replacement(stream).and_then(|pid| {
            self.supervisor.is_replaceable()?;
            match version {
                REPLACE_VERSION => Ok(pid),
                _ => Err(format!("the new program speaks version {version}, this daemon version {REPLACE_VERSION}")),
            }
        });
        let pid = match permitted {
            Ok(pid) => pid,
            Err(problem) => return (&*stream).write_all(&answer(id, &Response::Error(problem))?),
        };
        (&*stream).write_all(&answer(id, &Response::Done {})?)?;
        let outcome = self.supervisor.replace(stream, || {
            *self.accepts.lock() = false;
            // This precedes the first report of the next daemon: the service manager accepts reports from the main
            // process.
            notify::replaced_by(pid);
        });
        if outcome.replaced {
            self.supervisor.end_replaced();
        }
        Ok(())
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
