//! Fallback server: a process that answers the kernel's requests for doorbell pages after the process of a network has
//! ended.
//!
//! Without an answer, the next touch of an absent page would end the VMM that maps it. This process has no other task.
//! It holds a duplicate of each FUSE connection, and one end of a pipe whose other end belongs to the worker that
//! serves the connection. Once that worker has ended, or all supervisors of it have, this process makes the kernel
//! repeat the unanswered requests, and answers with zeros until the file is no longer mapped anywhere. Doorbells then
//! have no effect, and the VMM continues without its device.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, anyhow};
use log::{error, info};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

use super::fuse::{Connection, Notifier, REQUEST, Served};
use crate::config::SandboxMode;
use crate::sandbox::{self, Mismatch};

/// Maximum number of files of doorbell pages that it guards. Each takes two descriptors.
const FILES: usize = 400;

/// Hands a FUSE connection of a file with `pages` pages to the fallback server. `life` reports the end of the worker
/// that serves it.
///
/// # Errors
/// The fallback server does not accept it.
pub fn entrust(to: &UnixStream, pages: u32, device: BorrowedFd<'_>, life: BorrowedFd<'_>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [device, life];
    if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let bytes = pages.to_le_bytes();
    let sent = rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(to, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)
    })?;
    // A write to a stream socket transfers all four bytes or none.
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Tells the fallback server that the worker no longer serves its files. Its descriptors may still be open: a stuck
/// thread of a killed process keeps all of them open.
///
/// # Errors
/// The fallback server does not accept the message.
pub fn tell_end(to: &UnixStream) -> io::Result<()> {
    let sent = rustix::io::retry_on_intr(|| rustix::net::send(to, &[0; 4], SendFlags::NOSIGNAL))?;
    if sent == 4 { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// A guarded file.
struct Guarded {
    connection: Connection,
    device: OwnedFd,
    /// Readable once the worker has ended. `None` after that.
    life: Option<OwnedFd>,
}

/// Serves until there is no file left to guard: the supervisor has closed its end of standard input, and no process
/// maps a file.
///
/// # Errors
/// Standard input is not a connection to a supervisor.
pub fn run(mode: SandboxMode) -> Result<()> {
    match mode {
        SandboxMode::On => sandbox::enter_alone(Mismatch::Refuse),
        SandboxMode::Strict => sandbox::enter_alone(Mismatch::Kill),
        SandboxMode::Off => {}
    }
    let stream = UnixStream::from(io::stdin().as_fd().try_clone_to_owned().context("standard input")?);
    serve(stream)
}

pub(super) fn serve(stream: UnixStream) -> Result<()> {
    let mut supervisor = Some(stream);
    let mut guarded: Vec<Guarded> = Vec::new();
    let mut buffer = vec![0; REQUEST];
    while supervisor.is_some() || !guarded.is_empty() {
        // While the worker serves a file, its connection is not polled, because its requests are for the worker.
        let watched = guarded.iter().map(|one| one.life.as_ref().unwrap_or(&one.device).as_fd());
        let all = supervisor.iter().map(AsFd::as_fd).chain(watched);
        let mut poll: Vec<_> = all.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        match rustix::event::poll(&mut poll, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno).context("waiting"),
        }
        let mut ready = poll.iter().map(|polled| !polled.revents().is_empty());
        let said = supervisor.is_some() && ready.next().unwrap_or(false);
        let ready: Vec<bool> = ready.collect();
        drop(poll);
        let mut ready = ready.into_iter();
        guarded.retain_mut(|one| !ready.next().unwrap_or(false) || one.handle_event(&mut buffer));
        if said && let Some(stream) = &supervisor {
            match receive(stream)? {
                Said::Guard(one) if guarded.len() < FILES => guarded.push(one),
                Said::Guard(_) => {}
                Said::End => guarded.retain_mut(Guarded::begin_once),
                // The kernel ends a worker with its supervisor. A thread that waits for the kernel to remove a page
                // outlives that, and keeps the pipe open until this process answers the kernel in its place.
                Said::Closed => {
                    supervisor = None;
                    guarded.retain_mut(Guarded::begin_once);
                }
            }
        }
    }
    Ok(())
}

impl Guarded {
    /// Handles an event. Returns `false` if the file no longer needs to be guarded.
    fn handle_event(&mut self, buffer: &mut [u8]) -> bool {
        if self.life.take().is_some() {
            return self.begin();
        }
        match self.connection.serve(buffer, |_| ()) {
            Ok(Served::Open | Served::Other) => true,
            Ok(Served::Ended) => false,
            Err(problem) => {
                // Log: once for a file.
                error!("doorbell pages: {problem}");
                false
            }
        }
    }

    /// Takes over from the worker unless this was done before. Returns `false` if there is nothing to take over.
    fn begin_once(&mut self) -> bool {
        self.life.take().is_none() || self.begin()
    }

    /// Takes over from the worker that has ended. Returns `false` if there is nothing to take over.
    fn begin(&self) -> bool {
        match Notifier::of(&self.device).and_then(|notifier| notifier.ask_again()) {
            Ok(()) => {
                // Log: once for a file.
                info!("doorbell pages are served in place of a process that has ended");
                true
            }
            // The file is no longer open anywhere.
            Err(problem) if problem.raw_os_error() == Some(libc::ENODEV) => false,
            Err(problem) => {
                // Log: once for a file.
                error!("doorbell pages: unanswered requests are lost: {problem}");
                true
            }
        }
    }
}

/// A message of the supervisor.
enum Said {
    /// Guard one more file.
    Guard(Guarded),
    /// The worker no longer serves its files.
    End,
    /// There will be no more messages.
    Closed,
}

fn receive(stream: &UnixStream) -> Result<Said> {
    let mut bytes = [0; 4];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let buffer = &mut [IoSliceMut::new(&mut bytes)];
    let received = rustix::net::recvmsg(stream, buffer, &mut control, RecvFlags::CMSG_CLOEXEC);
    match received {
        Ok(received) if received.bytes == 4 => {}
        Ok(_) | Err(Errno::CONNRESET) => return Ok(Said::Closed),
        Err(errno) => return Err(errno).context("standard input"),
    }
    let fds = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let mut fds = fds.flatten();
    let pages = u32::from_le_bytes(bytes);
    let Some(device) = fds.next() else {
        return if pages == 0 { Ok(Said::End) } else { Err(anyhow!("not a supervisor")) };
    };
    let life = fds.next().context("not a supervisor")?;
    let connection = Connection::new(device.try_clone().context("descriptors")?, pages);
    Ok(Said::Guard(Guarded { connection, device, life: Some(life) }))
}
