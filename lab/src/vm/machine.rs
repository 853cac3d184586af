//! A running virtual machine.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::channel::Channel;
use super::job::{Job, JobOutput};
use crate::agent::to_hex;
use crate::process::BoundChild;

/// Time limit of a short command; generous, for emulated processors on a busy machine.
pub const SHORT: Duration = Duration::from_secs(60);

const BOOT: Duration = Duration::from_secs(240);

/// A running machine; dropping it kills it.
#[derive(Debug)]
pub struct Vm {
    pub(super) name: String,
    /// QEMU, or the process that runs the QEMUs of several machines.
    pub(super) process: Arc<Mutex<BoundChild>>,
    pub(super) channel: Arc<Channel>,
    pub(super) console: PathBuf,
    pub(super) qemu_log: PathBuf,
    /// The socket of QEMU's monitor.
    pub(super) monitor: PathBuf,
    pub(super) started: Instant,
    /// Factor by which everything may take longer than usual.
    pub(super) patience: u32,
}

impl Vm {
    /// The machine's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Waits until the agent answers for the first time.
    pub fn wait_boot(&self) -> Result<()> {
        self.wait_boots(1)
    }

    /// Same as [`Self::wait_boot`], but waits no longer than until `deadline`.
    pub fn wait_boot_until(&self, deadline: Instant) -> Result<()> {
        self.wait_boots_until(1, deadline)
    }

    /// Returns `true` if its agent has answered.
    pub fn has_booted(&self) -> bool {
        self.channel.boots() > 0
    }

    /// Returns `true` if its kernel has panicked.
    pub fn has_panicked(&self) -> bool {
        self.console_tail().contains("Kernel panic")
    }

    /// Returns the files with its output: the console, and QEMU's messages.
    pub fn log_files(&self) -> [&Path; 2] {
        [&self.console, &self.qemu_log]
    }

    /// Runs a short command, which must succeed, and returns its output.
    pub fn run(&self, command: &str) -> Result<String> {
        self.spawn(command)?.wait_success(SHORT * self.patience)
    }

    /// Runs a command and returns its exit code and output.
    pub fn exec(&self, command: &str, timeout: Duration) -> Result<JobOutput> {
        self.spawn(command)?.wait(timeout)
    }

    /// Starts a command.
    pub fn spawn(&self, command: &str) -> Result<Job> {
        let title = format!("{}: {command}", self.name);
        log::debug!("{title}");
        let id = self.channel.spawn(command).with_context(|| title.clone())?;
        Ok(Job::new(Arc::clone(&self.channel), id, title))
    }

    /// Waits until a shell condition holds in the guest. The guest's shell checks it repeatedly; the error contains the
    /// condition.
    pub fn wait_until(&self, condition: &str, timeout: Duration) -> Result<()> {
        self.spawn(&format!("until {condition}; do sleep 0.05; done"))?.wait_success(timeout).map(drop)
    }

    /// Writes a file in the guest.
    pub fn write_file(&self, path: &str, mode: u32, content: &[u8]) -> Result<()> {
        // An empty file is written as one empty piece.
        let pieces: Vec<&[u8]> = if content.is_empty() { vec![&[]] } else { content.chunks(32 << 10).collect() };
        for (index, piece) in pieces.into_iter().enumerate() {
            let id = self.channel.write(path, index > 0, mode, to_hex(piece))?;
            Job::new(Arc::clone(&self.channel), id, format!("{}: write {path}", self.name)).wait_success(SHORT)?;
        }
        Ok(())
    }

    /// Reboots the guest and waits until it is up again.
    pub fn reboot(&self) -> Result<()> {
        // The command ends with the guest, so its end is not awaited.
        self.boot_again(|| self.spawn("sync; /bed/busybox reboot -f"))
    }

    /// Runs an action that makes the guest boot again, and waits until it is up.
    pub fn boot_again<T>(&self, start: impl FnOnce() -> Result<T>) -> Result<()> {
        let boots = self.channel.boots();
        // The result of the action may have to live until the boot is complete.
        let _started = start()?;
        self.wait_boots(boots + 1)
    }

    /// Kills every command of the host that still runs.
    pub fn kill_jobs(&self) -> Result<()> {
        self.channel.kill_all()
    }

    /// Kills the machine, as a power failure would.
    pub fn kill(&self) {
        self.process.lock().unwrap_or_else(PoisonError::into_inner).kill();
    }

    /// Returns `true` if QEMU runs.
    pub fn is_running(&self) -> bool {
        self.process.lock().unwrap_or_else(PoisonError::into_inner).exited().is_none()
    }

    /// Returns `true` if QEMU has ended. The line closes a moment before the process ends, so this waits a little for
    /// callers that have just lost the line.
    pub fn has_ended(&self) -> bool {
        let mut process = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        process.wait(Duration::from_secs(1)).is_some()
    }

    /// Returns the process that runs it, for machines that end with it.
    pub fn process(&self) -> Arc<Mutex<BoundChild>> {
        Arc::clone(&self.process)
    }

    /// QEMU's process id.
    pub fn process_id(&self) -> u32 {
        self.process.lock().unwrap_or_else(PoisonError::into_inner).id()
    }

    /// Returns the output of QEMU itself.
    pub fn qemu_messages(&self) -> String {
        std::fs::read_to_string(&self.qemu_log).unwrap_or_default()
    }

    /// Returns the end of the console, for error messages.
    pub fn console_tail(&self) -> String {
        let bytes = std::fs::read(&self.console).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }

    /// Returns all information that helps to understand a failure: QEMU's messages, the console, the kernel log.
    pub fn diagnosis(&self) -> String {
        let dmesg = if self.is_running() && self.has_booted() {
            match self.exec("dmesg | tail -n 40", Duration::from_secs(15)) {
                Ok(output) => output.text,
                Err(error) => format!("(cannot be read: {error:#})"),
            }
        } else {
            "(no guest to ask)".to_owned()
        };
        format!(
            "--- {0}: QEMU's messages\n{1}\n--- {0}: end of the console ({2})\n{3}\n--- {0}: end of dmesg\n{dmesg}",
            self.name,
            self.qemu_messages(),
            self.console.display(),
            self.console_tail(),
        )
    }

    fn wait_boots(&self, count: u32) -> Result<()> {
        self.wait_boots_until(count, Instant::now() + BOOT * self.patience)
    }

    fn wait_boots_until(&self, count: u32, deadline: Instant) -> Result<()> {
        while !self
            .channel
            .wait_boots(count, Duration::from_secs(1).min(deadline.saturating_duration_since(Instant::now())))
        {
            let why = if self.channel.is_closed() {
                "QEMU has ended"
            } else if self.has_panicked() {
                "the guest's kernel has panicked"
            } else if Instant::now() >= deadline {
                "the guest's agent did not answer"
            } else {
                continue;
            };
            bail!("{}: {why}\n{}", self.name, self.diagnosis());
        }
        log::info!("{}: up {:.1} s after the start of QEMU", self.name, self.started.elapsed().as_secs_f64());
        Ok(())
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.channel.close();
    }
}
