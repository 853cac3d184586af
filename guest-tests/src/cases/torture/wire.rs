//! The uplink of the guests' network, with a hostile peer.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use pvrdmad::testing::HostilePeer;
use tempfile::TempDir;

use crate::guest_with_daemon::{cable, datagrams};

/// Option that attaches a device to it.
pub(super) const DEVICE_OPTIONS: &str = ",network=wire";
/// Time between two bursts of the peer, unless a frame arrives: the guests are emulated, and must process them.
const PAUSE: Duration = Duration::from_millis(1);
/// Time within which the daemon must take a frame.
const DEADLINE: Duration = Duration::from_secs(60);
/// Number of frames that the peer remembers.
const RECENT: usize = 32;

#[derive(Debug)]
pub(super) struct Wire {
    socket: UnixDatagram,
    /// Sockets of the daemon and of the peer.
    ends: [PathBuf; 2],
    _directory: TempDir,
}

impl Wire {
    pub(super) fn new() -> Result<Self> {
        let directory =
            tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
        let ends = cable(directory.path());
        let socket = UnixDatagram::bind(&ends[1]).context("cannot make the end of a wire")?;
        socket.set_read_timeout(Some(PAUSE))?;
        socket.set_write_timeout(Some(DEADLINE))?;
        Ok(Self { socket, ends, _directory: directory })
    }

    /// Returns the network in the daemon's syntax.
    pub(super) fn network(&self) -> String {
        format!("name=wire,uplink={}", datagrams(&self.ends[0], &self.ends[1]))
    }

    /// Lets a peer send until it is told to stop. Returns the number of frames.
    pub(super) fn attack(&self, mut peer: HostilePeer, stop: &AtomicBool) -> Result<u64> {
        let (mut sent, mut recent) = (0, VecDeque::new());
        while !stop.load(Ordering::Acquire) {
            if let Some(frame) = self.receive()? {
                recent.push_back(frame);
                if recent.len() > RECENT {
                    recent.pop_front();
                }
            }
            for _ in 0..peer.burst() {
                if let Some(frame) = peer.frame(|| recent.pop_front()) {
                    self.socket.send_to(&frame, &self.ends[0]).context("cannot send a frame")?;
                    sent += 1;
                }
            }
        }
        Ok(sent)
    }

    /// Returns a received frame, or `None` after a pause.
    fn receive(&self) -> Result<Option<Vec<u8>>> {
        let mut frame = vec![0; 1 << 16];
        match self.socket.recv(&mut frame) {
            Ok(length) => {
                frame.truncate(length);
                Ok(Some(frame))
            }
            Err(error) if [ErrorKind::WouldBlock, ErrorKind::Interrupted].contains(&error.kind()) => Ok(None),
            Err(error) => Err(error).context("cannot receive a frame"),
        }
    }
}
