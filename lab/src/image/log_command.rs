//! Commands of a build step. Their output goes to the step's log, and its last lines into the error.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// The log of one step.
#[derive(Debug)]
pub(crate) struct StepLog {
    path: PathBuf,
}

impl StepLog {
    /// Starts an empty log.
    pub(crate) fn new(path: PathBuf) -> Result<Self> {
        File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self { path })
    }

    /// Runs a command; its output is logged.
    pub(crate) fn run(&self, command: &mut Command) -> Result<()> {
        let log = File::options().append(true).open(&self.path)?;
        let shown = shown(command);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let status = command.status().with_context(|| format!("cannot run {shown}"))?;
        if !status.success() {
            bail!("{shown} ended with {status}; the end of {}:\n{}", self.path.display(), self.tail());
        }
        Ok(())
    }

    /// Runs a shell script.
    pub(crate) fn shell(&self, script: &str) -> Result<()> {
        self.run(Command::new("sh").args(["-ec", script]))
    }

    /// Runs a shell script inside a root directory.
    pub(crate) fn shell_in(&self, root: &Path, script: &str) -> Result<()> {
        self.run(inside(Command::new("chroot").arg(root).args(["/bin/sh", "-ec", script])))
    }

    /// Same as [`Self::shell_in`], with `/proc` mounted, which some programs need.
    pub(crate) fn shell_with_proc(&self, root: &Path, script: &str) -> Result<()> {
        const ENTER: &str = "mount -t proc proc \"$0/proc\"; exec chroot \"$0\" /bin/sh -ec \"$1\"";
        self.run(inside(Command::new("unshare").args(["--mount", "sh", "-ec", ENTER]).arg(root).arg(script)))
    }

    fn tail(&self) -> String {
        let text = std::fs::read(&self.path).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(25)..].join("\n")
    }
}

/// Sets the environment for package installation inside a root directory.
fn inside(command: &mut Command) -> &mut Command {
    let path = "/usr/sbin:/usr/bin:/sbin:/bin";
    command.env("PATH", path).env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C")
}

/// Returns the output of a command inside a root directory.
pub(crate) fn output_in(root: &Path, script: &str) -> Result<String> {
    let mut command = Command::new("chroot");
    command.arg(root).args(["/bin/sh", "-ec", script]).env("LC_ALL", "C");
    let output = command.output().with_context(|| format!("cannot run {}", shown(&command)))?;
    if !output.status.success() {
        bail!("{script} ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn shown(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args() {
        text.push(' ');
        text.push_str(&argument.to_string_lossy());
    }
    text
}
