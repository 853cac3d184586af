//! A worker with a process to itself: requests arrive on standard input, which is a socket.

use std::io::{self, Write};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, bail};
use log::debug;
use pvrdma_vfio_user_server::eventfd;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Signal, set_parent_process_death_signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};

use super::Worker;
use super::host::RemoteHost;
use crate::config::SandboxMode;
use crate::fault_point;
use crate::protocol::frame::{encode, send};
use crate::protocol::{Frame, FrameReader, Incoming, Outgoing, Received, Reply, Request, VERSION};
use crate::sandbox::{self, Mismatch, Profile};

/// Longest request in bytes.
const MAX_REQUEST: usize = 1 << 20;

/// Serves until the supervisor shuts down its half of the connection, or exits.
///
/// # Errors
/// Standard input is not a connection to a supervisor.
pub fn run(mode: SandboxMode, profile: Profile) -> Result<()> {
    // The end of the stream means the same, but a stuck thread would not read it.
    set_parent_process_death_signal(Some(Signal::KILL)).context("cannot follow the supervisor's end")?;
    // The supervisor decides when workers end. A service manager sends these signals to all processes of the service at
    // once, so the worker ignores them.
    for signal in [SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2] {
        signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false))).context("signal handlers")?;
    }
    // This precedes the sandbox, because it needs system calls that the rest of the worker does not need.
    eventfd::prepare();
    // The process confines itself before it reads any input. The supervisor is trusted, but the data that follows its
    // first requests is not.
    match mode {
        SandboxMode::On => sandbox::enter(profile, Mismatch::Refuse),
        SandboxMode::Strict => sandbox::enter(profile, Mismatch::Kill),
        SandboxMode::Off => {}
    }
    fault_point::reach("worker-start");
    let stream = UnixStream::from(io::stdin().as_fd().try_clone_to_owned().context("standard input")?);
    match serve(&stream)? {
        End::Asked(worker) => drop(worker),
        // No destructor may run. It would release the clients, which the next daemon finds at their keepers, or it
        // would touch guests that belong to the next worker.
        End::Gone | End::Given => std::process::exit(0),
    }
    let _ = io::stderr().flush();
    Ok(())
}

/// Reason for the end of a worker.
enum End {
    /// The supervisor stops the network.
    Asked(Option<Box<Worker>>),
    /// The supervisor has ended without stopping the network.
    Gone,
    /// The network was given to another worker.
    Given,
}

/// Serves a supervisor.
fn serve(stream: &UnixStream) -> Result<End> {
    let mut reader = FrameReader::with_descriptors();
    // Dropped only by the caller, and only if the supervisor stops the network: a return because of an error must not
    // release the clients.
    let mut worker = ManuallyDrop::new(None::<Worker>);
    loop {
        let Frame { body, fds } = match reader.receive(stream, MAX_REQUEST).context("not a supervisor")? {
            Received::Frame(frame) => frame,
            Received::Pending => continue,
            Received::Closed if is_gone(stream) => return Ok(End::Gone),
            Received::Closed => break,
        };
        let request: Incoming<'_> = serde_json::from_slice(&body).context("not a supervisor")?;
        let reply = match (serde_json::from_str(request.body.get()), &*worker) {
            (Ok(asked), Some(worker)) => worker.handle(asked, fds),
            (Ok(Request::Hello { version, network }), None) => {
                let started = start(version, *network, fds);
                let (started, reply) = match started {
                    Ok(started) => (Some(started), Reply::Done {}),
                    Err(error) => (None, Reply::Error(format!("{error:#}"))),
                };
                *worker = started;
                reply
            }
            (Ok(_), None) => Reply::Error("hello comes first".to_owned()),
            (Err(error), _) => Reply::Error(error.to_string()),
        };
        let sent = send(stream, &encode(&Outgoing { id: request.id, body: &reply })?, &[]);
        if worker.as_ref().is_some_and(Worker::is_given) {
            return Ok(End::Given);
        }
        if let Err(error) = sent {
            debug!("the supervisor is gone: {error}");
            return Ok(End::Gone);
        }
    }
    debug!("the supervisor has closed its end");
    Ok(End::Asked(ManuallyDrop::into_inner(worker).map(Box::new)))
}

/// Returns `true` if the supervisor has closed the connection. To stop the worker, it shuts down only its own half.
fn is_gone(stream: &UnixStream) -> bool {
    let mut polled = [PollFd::new(stream, PollFlags::empty())];
    let found = rustix::event::poll(&mut polled, Some(&Timespec::default()));
    found.is_err() || polled[0].revents().contains(PollFlags::HUP)
}

fn start(version: u32, setup: crate::protocol::NetworkSetup, fds: Vec<OwnedFd>) -> Result<Worker> {
    fault_point::reach("worker-hello");
    if version != VERSION {
        bail!("the supervisor speaks version {version}, this program version {VERSION}");
    }
    let mut fds = fds.into_iter();
    let Some(host) = fds.next() else { bail!("no socket to ask the supervisor back") };
    let host = RemoteHost::new(UnixStream::from(host)).context("the socket to ask the supervisor back")?;
    let worker = Worker::start(setup, fds.collect(), Arc::new(host));
    // The adapter is loaded, and no client has been admitted yet.
    sandbox::confine_main();
    worker
}
