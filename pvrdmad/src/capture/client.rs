//! Client side: writes a capture to a file.

use std::fs::OpenOptions;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use log::debug;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::filter::Filter;
use crate::cli::CaptureArgs;
use crate::control;

/// Longest block that the daemon writes, in bytes: the longest frame with its metadata.
const MAX_BLOCK: usize = 1 << 20;
/// Block type of a frame.
const ENHANCED_PACKET: u32 = 6;
/// Size of a block's type and length, in bytes.
const BLOCK_HEADER: usize = 8;
/// Size of a block without its body, in bytes: type, length, and the length repeated at the end.
const BLOCK_FRAME: usize = 12;
/// Offsets of a frame's captured length and of its bytes in its block.
const FRAME_LENGTH: usize = 20;
const FRAME_DATA: usize = 28;

/// Captures until the requested number of frames is reached, a signal arrives, or the daemon ends. Returns the number
/// of frames.
///
/// # Errors
/// The daemon does not answer, refuses, or sends data that is not a capture; or the file cannot be written.
pub fn run(args: &CaptureArgs) -> Result<u64> {
    // The handler is installed before the file exists, so that no signal can leave a truncated file.
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).context("signal handlers")?;
    let (path, device) = (args.of.daemon.control()?, &args.of.device);
    let filter = Filter::new(args.peer, args.qp, || control::ask_traffic(&path, device))?;
    let stream = control::start_capture(&path, device, args.snaplen)?;
    let output = open(&args.write)?;
    let enough = stream.try_clone().context("the connection")?;
    thread::spawn(move || {
        signals.forever().next();
        finish(&enough);
        // A second signal ends the program at once.
        signals.forever().next();
        std::process::exit(1);
    });
    if let Some(seconds) = args.seconds {
        let enough = stream.try_clone().context("the connection")?;
        thread::spawn(move || {
            thread::sleep(Duration::from_secs(seconds));
            finish(&enough);
        });
    }
    match copy(&stream, output, args.count, &filter) {
        // The reader of the output has closed its end, which is a normal end of a capture.
        Err(error) if is_broken_pipe(&error) => Ok(0),
        result => result.with_context(|| args.write.display().to_string()),
    }
}

/// Tells the daemon to end the capture. Frames that it has already buffered are still sent.
fn finish(stream: &UnixStream) {
    if let Err(error) = stream.shutdown(Shutdown::Write) {
        debug!("the daemon is gone already: {error}");
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// Opens the output: `-` is standard output. A capture contains guest memory, so only the owner may read a new file.
fn open(path: &Path) -> Result<Box<dyn Write>> {
    if path == Path::new("-") {
        return Ok(Box::new(io::stdout().lock()));
    }
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path);
    Ok(Box::new(file.with_context(|| path.display().to_string())?))
}

/// Copies whole blocks, so that the file is valid however the capture ends, and at most `count` frames that pass the
/// filter.
fn copy(stream: &UnixStream, output: impl Write, count: Option<u64>, filter: &Filter) -> Result<u64> {
    let (mut input, mut output) =
        (BufReader::with_capacity(1 << 16, stream), BufWriter::with_capacity(1 << 16, output));
    let (mut frames, mut block) = (0, Vec::new());
    while read_block(&mut input, &mut block)? {
        if kind_of(&block) == Some(ENHANCED_PACKET) {
            if count == Some(frames) || !filter.keeps(frame_of(&block)) {
                continue;
            }
            frames += 1;
        }
        output.write_all(&block)?;
        if count == Some(frames) {
            finish(stream);
        }
        // The output may be a pipe to an interactive viewer, so it is flushed whenever no more input is buffered.
        if input.buffer().is_empty() {
            output.flush()?;
        }
    }
    output.flush()?;
    Ok(frames)
}

/// Returns the captured bytes of a frame's block.
fn frame_of(block: &[u8]) -> &[u8] {
    let captured = be32(block, FRAME_LENGTH).and_then(|length| usize::try_from(length).ok()).unwrap_or(0);
    let data = block.get(FRAME_DATA..).unwrap_or_default();
    data.get(..captured).unwrap_or(data)
}

fn be32(block: &[u8], at: usize) -> Option<u32> {
    block.get(at..)?.first_chunk().map(|bytes| u32::from_be_bytes(*bytes))
}

fn kind_of(block: &[u8]) -> Option<u32> {
    block.first_chunk().map(|kind| u32::from_be_bytes(*kind))
}

/// Reads the next block. Returns `false` at the end of the stream, even in the middle of a block.
fn read_block(input: &mut impl BufRead, block: &mut Vec<u8>) -> Result<bool> {
    block.resize(BLOCK_HEADER, 0);
    if !read_all(input, block)? {
        return Ok(false);
    }
    let length = block.last_chunk().and_then(|length| usize::try_from(u32::from_be_bytes(*length)).ok());
    let Some(length) = length.filter(|length| (BLOCK_FRAME..=MAX_BLOCK).contains(length)) else {
        bail!("the daemon's data is not a capture");
    };
    block.resize(length, 0);
    read_all(input, block.get_mut(BLOCK_HEADER..).unwrap_or_default())
}

/// Fills `bytes`. Returns `false` if the stream ends before.
fn read_all(input: &mut impl Read, bytes: &mut [u8]) -> Result<bool> {
    match input.read_exact(bytes) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset) => {
            Ok(false)
        }
        Err(error) => Err(error.into()),
    }
}
