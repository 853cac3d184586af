//! The asking side: a capture becomes a file.

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

use crate::cli::CaptureArgs;
use crate::control;

/// Longest block that the daemon writes: the longest frame with its surroundings.
const MAX_BLOCK: usize = 1 << 20;
/// Block type of a frame.
const ENHANCED_PACKET: u32 = 6;
/// Bytes of a block's type and length, and of the length again at its end.
const BLOCK_HEADER: usize = 8;
const BLOCK_FRAME: usize = 12;

/// Captures until there is enough, a signal comes or the daemon ends. Returns the number of frames.
///
/// # Errors
/// The daemon does not answer, refuses, or says something that is no capture; the file cannot be written.
pub fn run(args: &CaptureArgs) -> Result<u64> {
    // Before there is a file that a signal could leave cut.
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).context("signal handlers")?;
    let stream = control::start_capture(&args.of.daemon.control()?, &args.of.device, args.snaplen)?;
    let output = open(&args.write)?;
    let enough = stream.try_clone().context("the connection")?;
    thread::spawn(move || {
        signals.forever().next();
        finish(&enough);
        // Whoever asks twice does not want to wait.
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
    match copy(&stream, output, args.count) {
        // Who reads from us has had enough.
        Err(error) if is_broken_pipe(&error) => Ok(0),
        result => result.with_context(|| args.write.display().to_string()),
    }
}

/// Tells the daemon that this is enough. What it has on the way, it still sends.
fn finish(stream: &UnixStream) {
    if let Err(error) = stream.shutdown(Shutdown::Write) {
        debug!("the daemon is gone already: {error}");
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// The output: `-` is standard output. A capture holds guest memory, so a new file is its owner's only.
fn open(path: &Path) -> Result<Box<dyn Write>> {
    if path == Path::new("-") {
        return Ok(Box::new(io::stdout().lock()));
    }
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path);
    Ok(Box::new(file.with_context(|| path.display().to_string())?))
}

/// Copies whole blocks, so that the file is valid however this ends, and at most `count` frames.
fn copy(stream: &UnixStream, output: impl Write, count: Option<u64>) -> Result<u64> {
    let (mut input, mut output) =
        (BufReader::with_capacity(1 << 16, stream), BufWriter::with_capacity(1 << 16, output));
    let (mut frames, mut block) = (0, Vec::new());
    while read_block(&mut input, &mut block)? {
        if kind_of(&block) == Some(ENHANCED_PACKET) {
            if count == Some(frames) {
                continue;
            }
            frames += 1;
        }
        output.write_all(&block)?;
        if count == Some(frames) {
            finish(stream);
        }
        // Somebody may be watching at the other end of a pipe.
        if input.buffer().is_empty() {
            output.flush()?;
        }
    }
    output.flush()?;
    Ok(frames)
}

fn kind_of(block: &[u8]) -> Option<u32> {
    block.first_chunk().map(|kind| u32::from_be_bytes(*kind))
}

/// Reads the next block. `false`: there is none, or not all of it.
fn read_block(input: &mut impl BufRead, block: &mut Vec<u8>) -> Result<bool> {
    block.resize(BLOCK_HEADER, 0);
    if !read_all(input, block)? {
        return Ok(false);
    }
    let length = block.last_chunk().and_then(|length| usize::try_from(u32::from_be_bytes(*length)).ok());
    let Some(length) = length.filter(|length| (BLOCK_FRAME..=MAX_BLOCK).contains(length)) else {
        bail!("what the daemon sends is not a capture");
    };
    block.resize(length, 0);
    read_all(input, block.get_mut(BLOCK_HEADER..).unwrap_or_default())
}

/// Fills `bytes`. `false`: the stream ended before.
fn read_all(input: &mut impl Read, bytes: &mut [u8]) -> Result<bool> {
    match input.read_exact(bytes) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset) => {
            Ok(false)
        }
        Err(error) => Err(error.into()),
    }
}
