//! Runs the command in the guests: its output and its end.

use std::fs::File;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::cli::{Place, RunArgs};
use super::guests::Guests;
use super::logs::Logs;
use super::outcome::Outcome;
use super::script::script;
use crate::vm::{Job, Vm};

/// Interval at which a silent guest is checked.
const LOOK: Duration = Duration::from_millis(500);

/// End of a command in a guest.
#[derive(Debug)]
enum Ended {
    Status(u8),
    /// It ended with the guest, for this reason.
    Guest(&'static str),
    /// It was told to stop.
    Stopped,
    /// Its output cannot be passed on.
    Output(io::Error),
}

/// Runs the command and passes its output on.
///
/// # Errors
/// It cannot be started.
pub(super) fn run(
    guests: &Guests,
    args: &RunArgs,
    variables: &[(String, String)],
    logs: &Logs,
    deadline: Instant,
) -> Result<Outcome> {
    let count = if args.on == Place::First { 1 } else { guests.vms().len() };
    let mut running = Vec::new();
    for (number, vm) in guests.vms().iter().take(count).enumerate() {
        let text = script(&guests.surroundings(number), variables, guests.folder(), &args.command);
        let path = logs.path(&format!("{}.output", vm.name()));
        let log = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        let prefix = if count > 1 { format!("{}: ", vm.name()) } else { String::new() };
        running.push((vm, vm.spawn(&text)?, Output { prefix, line: Vec::new(), log }));
    }
    let stop = AtomicBool::new(false);
    let (sender, endings) = channel();
    thread::scope(|scope| {
        for (vm, job, mut output) in running {
            let (stop, sender) = (&stop, sender.clone());
            scope.spawn(move || follow(vm, &job, &mut output, stop, &sender));
        }
        drop(sender);
        let mut outcome = Outcome::Ended(0);
        for _ in 0..count {
            let left = deadline.saturating_duration_since(Instant::now());
            outcome = match endings.recv_timeout(left) {
                Ok((_, Ended::Status(0))) => continue,
                Ok((_, Ended::Status(status))) => Outcome::Ended(status),
                Ok((name, Ended::Guest(how))) => Outcome::Vm(format!("{name}: {how}")),
                Ok((name, Ended::Output(error))) => {
                    Outcome::Lab(anyhow::Error::new(error).context(format!("the output of {name}")))
                }
                Ok((_, Ended::Stopped)) | Err(_) => Outcome::TimedOut(args.timeout),
            };
            break;
        }
        // The other commands most likely wait for a peer that is gone. The thread that follows each of them kills it.
        stop.store(true, Ordering::Release);
        Ok(outcome)
    })
}

/// Passes on the output of a command until it ends.
fn follow(vm: &Vm, job: &Job, output: &mut Output, stop: &AtomicBool, ended: &Sender<(String, Ended)>) {
    let how = loop {
        let (text, status) = job.take(LOOK);
        if let Err(error) = output.take(text.as_bytes()) {
            break Ended::Output(error);
        }
        match status {
            Some(..0) => break Ended::Guest("it rebooted, or could not start the command"),
            Some(status) => break Ended::Status(u8::try_from(status).unwrap_or(u8::MAX)),
            None if stop.load(Ordering::Acquire) => break Ended::Stopped,
            None if !vm.is_running() => break Ended::Guest("QEMU has ended"),
            None if text.is_empty() && vm.has_panicked() => break Ended::Guest("its kernel has panicked"),
            None => {}
        }
    };
    // A failure to write the last partial line is not reported.
    let _ = output.end();
    // The receiver is gone if another command failed before.
    let _ = ended.send((vm.name().to_owned(), how));
}

/// Output of a command: to standard output in whole lines, with the guest's name if there are several, and to a log.
struct Output {
    prefix: String,
    /// The beginning of a line.
    line: Vec<u8>,
    log: File,
}

impl Output {
    fn take(&mut self, text: &[u8]) -> io::Result<()> {
        self.log.write_all(text)?;
        let mut out = io::stdout().lock();
        if self.prefix.is_empty() {
            out.write_all(text)?;
            return out.flush();
        }
        for piece in text.split_inclusive(|&byte| byte == b'\n') {
            self.line.extend_from_slice(piece);
            if self.line.ends_with(b"\n") {
                out.write_all(self.prefix.as_bytes())?;
                out.write_all(&self.line)?;
                self.line.clear();
            }
        }
        out.flush()
    }

    fn end(&mut self) -> io::Result<()> {
        if self.line.is_empty() { Ok(()) } else { self.take(b"\n") }
    }
}
