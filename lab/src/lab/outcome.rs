//! Outcome of a run, and its exit status.

use std::process::ExitCode;

use anyhow::Error;

use crate::causes;

/// Exit status: a guest failed.
pub const VM_FAILED: u8 = 123;
/// Exit status: the time was up.
pub const TIMED_OUT: u8 = 124;
/// Exit status: the lab itself failed.
pub const LAB_FAILED: u8 = 125;

/// Outcome of a run.
#[derive(Debug)]
pub(super) enum Outcome {
    /// The command ended with this status: the first non-zero one, if there was one.
    Ended(u8),
    /// A guest failed, with the reason.
    Vm(String),
    /// The time limit of this many seconds was reached.
    TimedOut(u64),
    /// The run could not be started.
    Lab(Error),
    /// A signal has ended it: the exit status, and a description of the removed files.
    Interrupted(u8, String),
}

impl Outcome {
    /// Returns `true` if the command succeeded.
    pub(super) const fn is_success(&self) -> bool {
        matches!(self, Self::Ended(0))
    }

    /// Returns the message for the user, unless the command has printed one itself.
    pub(super) fn message(&self) -> Option<String> {
        match self {
            Self::Ended(0) => None,
            Self::Ended(status) => Some(format!("the command ended with status {status}")),
            Self::Vm(how) => Some(format!("a guest failed: {how}")),
            Self::TimedOut(seconds) => Some(format!("the {seconds} s of --timeout are up")),
            Self::Lab(error) => Some(causes(error)),
            Self::Interrupted(_, removed) => Some(format!("interrupted: {removed}")),
        }
    }

    pub(super) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Ended(status) | Self::Interrupted(status, _) => *status,
            Self::Vm(_) => VM_FAILED,
            Self::TimedOut(_) => TIMED_OUT,
            Self::Lab(_) => LAB_FAILED,
        })
    }
}
