//! Connects a character device with a socket: what leads to an agent is a device in a guest that plays a host, and some
//! VMMs have their guests' serial ports at sockets.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// How long somebody may take to listen at the socket.
const PATIENCE: Duration = Duration::from_secs(60);

/// Moves bytes both ways until one end closes.
pub(crate) fn run(device: &Path, socket: &Path) -> Result<()> {
    let device = File::options().read(true).write(true).open(device).context("cannot open the device")?;
    let stream = connect(socket)?;
    let (from, to) = (device.try_clone()?, stream.try_clone()?);
    // It ends with the program.
    thread::spawn(move || copy(from, to));
    copy(stream, device)
}

fn connect(socket: &Path) -> Result<UnixStream> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match UnixStream::connect(socket) {
            Ok(stream) => return Ok(stream),
            Err(error) if Instant::now() > deadline => return Err(error).context("nobody listens at the socket"),
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    }
}

fn copy(mut from: impl Read, mut to: impl Write) -> Result<()> {
    let mut buffer = [0; 4096];
    loop {
        let count = from.read(&mut buffer).context("cannot read")?;
        if count == 0 {
            return Ok(());
        }
        to.write_all(&buffer[..count]).context("cannot write")?;
    }
}
