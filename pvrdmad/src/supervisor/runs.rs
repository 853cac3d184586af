//! The worker of a network, in this process or in its own.

use std::time::Instant;

use super::connection::{CallError, reply_by};
use super::process::Process;
use crate::protocol::{Reply, Request};
use crate::worker::Worker;

/// The way in which the worker of a network runs.
#[derive(Debug)]
pub(super) enum Runs {
    Here(Box<Worker>),
    Process(Process),
}

impl Runs {
    /// Sends a request and waits for its reply.
    ///
    /// # Errors
    /// There is no worker, or no reply in time.
    pub(super) fn ask(&self, request: Request, deadline: Instant) -> Result<Reply, CallError> {
        match self {
            Self::Here(worker) => Ok(worker.handle(request, Vec::new())),
            Self::Process(process) => process.ask(request, &[]).and_then(|reply| reply_by(&reply, deadline)),
        }
    }
}
