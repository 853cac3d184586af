//! Captures of devices: one thread per capture, which writes to the connection of the client that requested it.

mod pcapng;

use std::io::{self, BufWriter, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use log::{Level, debug, error};
use pvrdma_base::{
    LogLimit,
    threads::{self, ThreadKind},
};
use pvrdma_link::MAX_LINK_FRAME;
use pvrdma_rxe::capture::{Batch, Capture, CaptureConfig};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use serde_json::Value;

use self::pcapng::File;
use crate::protocol::{Reply, json_rpc};

/// Limited, because clients may request any number of captures.
static LOG: LogLimit = LogLimit::new();

/// Bytes buffered for a slow reader. Frames beyond this are dropped and counted.
const BUFFER: usize = 8 << 20;

/// Bytes per write.
const CHUNK: usize = 64 << 10;

/// Interval at which a thread whose client does not read checks if it has to end.
const PATIENCE: Duration = Duration::from_millis(500);

/// Returns the capture configuration for the length that the client requested.
pub(super) fn config(snaplen: Option<u32>) -> Result<CaptureConfig, String> {
    match snaplen {
        None => Ok(CaptureConfig::new(MAX_LINK_FRAME, BUFFER)),
        Some(0) => Err("snaplen 0 keeps nothing".to_owned()),
        Some(snaplen) => {
            let snaplen = usize::try_from(snaplen).unwrap_or(usize::MAX).min(MAX_LINK_FRAME);
            Ok(CaptureConfig::new(snaplen, BUFFER))
        }
    }
}

/// Running captures. Dropping it ends them.
#[derive(Debug, Default)]
pub(super) struct Streams(Vec<Running>);

/// A capture and its thread. Dropping it ends both.
#[derive(Debug)]
struct Running {
    device: String,
    stream: UnixStream,
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Streams {
    /// Answers the call `id` on `stream`, unless it is a notification. Then writes the frames of `device` that
    /// `capture` sees there, until the client sends data or closes the connection.
    pub(super) fn start(
        &mut self,
        stream: UnixStream,
        device: String,
        id: Option<Value>,
        snaplen: usize,
        capture: Capture,
    ) -> io::Result<()> {
        self.0.retain(|running| !running.is_finished());
        stream.set_write_timeout(Some(PATIENCE))?;
        let (other, watched) = (stream.try_clone()?, device.clone());
        let stopped = Arc::<AtomicBool>::default();
        let stopping = Arc::clone(&stopped);
        let thread = threads::spawn(ThreadKind::Capture, "capture", move || {
            LOG.log(module_path!(), Level::Info, &device, format_args!("a capture begins"));
            let out = Patient { stream: &stream, stopping: &stopping };
            let result = run(&out, &device, id.as_ref(), snaplen, &capture);
            // `Running` still holds the stream, so dropping it here would not close it, and the client would wait for
            // its end forever.
            let closed = stream.shutdown(Shutdown::Both);
            match result.and(closed) {
                Ok(()) => LOG.log(module_path!(), Level::Info, &device, format_args!("a capture ends")),
                Err(error) => LOG.log(module_path!(), Level::Info, &device, format_args!("a capture ends: {error}")),
            }
        })?;
        self.0.push(Running { device: watched, stream: other, stopping: stopped, thread: Some(thread) });
        Ok(())
    }

    /// Returns the device of each running capture.
    pub(super) fn devices(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter(|running| !running.is_finished()).map(|running| running.device.as_str())
    }

    /// Ends the captures of a device.
    pub(super) fn end_of(&mut self, device: &str) {
        self.0.retain(|running| running.device != device);
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        // All captures are told to stop before the first one is awaited, so that they end in parallel.
        self.0.iter().for_each(Running::stop);
    }
}

impl Running {
    fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        // To the thread this looks as if the client had ended the capture.
        if let Err(error) = self.stream.shutdown(Shutdown::Read) {
            debug!("capture: {error}");
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            // Log: the last message of this thread.
            error!("the thread of a capture panicked");
        }
    }
}

/// Writer to a client. A write that blocks is repeated until the capture has to end.
struct Patient<'a> {
    stream: &'a UnixStream,
    stopping: &'a AtomicBool,
}

impl Write for &Patient<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match (&mut &*self.stream).write(bytes) {
                Err(error)
                    if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
                        && !self.stopping.load(Ordering::Acquire) => {}
                result => return result,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn run(out: &Patient<'_>, device: &str, id: Option<&Value>, snaplen: usize, capture: &Capture) -> io::Result<()> {
    let snaplen = u32::try_from(snaplen).unwrap_or(u32::MAX);
    if let Some(id) = id {
        let mut to = out;
        to.write_all(&json_rpc::response(id, &Reply::<()>::Capturing {})?)?;
    }
    let mut file = File::begin(BufWriter::with_capacity(CHUNK, out), device, snaplen)?;
    file.flush()?;
    let mut batch = Batch::default();
    let mut ended = false;
    while !ended {
        let mut poll =
            [PollFd::new(out.stream, PollFlags::IN | PollFlags::RDHUP), PollFd::new(capture.readable(), PollFlags::IN)];
        match rustix::event::poll(&mut poll, None) {
            Ok(_) => ended = poll.first().is_some_and(|stream| !stream.revents().is_empty()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        capture.take(&mut batch);
        file.frames(&batch)?;
        file.flush()?;
    }
    file.end(capture)
}
