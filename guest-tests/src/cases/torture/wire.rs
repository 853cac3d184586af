//! The wire that the guests' network ends at, with a peer that means no good.

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

/// What puts a device on it.
pub(super) const DEVICE_OPTIONS: &str = ",network=wire";
/// Between two bursts of the peer, unless something comes: guests are emulated, and have to take them.
const PAUSE: Duration = Duration::from_millis(1);
/// When the daemon has to have taken a frame.
const DEADLINE: Duration = Duration::from_secs(60);
/// Frames that it remembers.
const RECENT: usize = 32;

#[derive(Debug)]
pub(super) struct Wire {
    socket: UnixDatagram,
    /// Where the daemon is, and the peer.
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

    /// The network that ends here, as the daemon takes it.
    pub(super) fn network(&self) -> String {
        format!("name=wire,uplink={}", datagrams(&self.ends[0], &self.ends[1]))
    }

    /// Lets a peer send until it shall stop. Gives how many frames that were.
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

    /// What has come, after a pause if nothing has.
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
