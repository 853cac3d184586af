//! A server in one guest and a client in the other.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::endpoints::listens;
use crate::vm::{Job, Vm};

/// Method by which a started server is detected. Programs write to a pipe in blocks, so their output may come late.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ready {
    /// It listens on a TCP port.
    Tcp(u16),
    /// It listens with the connection manager.
    ConnectionManager,
}

impl Ready {
    fn condition(self) -> String {
        match self {
            Self::Tcp(port) => listens(port),
            Self::ConnectionManager => "rdma resource show cm_id | grep -q LISTEN".to_owned(),
        }
    }
}

/// A server and its client.
#[derive(Debug)]
pub(crate) struct Programs<'a> {
    /// Guest that runs the server.
    pub(crate) server_vm: &'a Vm,
    /// Command of the server.
    pub(crate) server: String,
    /// Condition for starting the client.
    pub(crate) ready: Ready,
    /// Guest that runs the client.
    pub(crate) client_vm: &'a Vm,
    /// Command of the client.
    pub(crate) client: String,
    /// Time limit for both.
    pub(crate) timeout: Duration,
}

/// Output of both programs.
#[derive(Clone, Debug)]
pub(crate) struct Exchange {
    /// The server's output.
    pub(crate) server: String,
    /// The client's output.
    pub(crate) client: String,
}

impl Programs<'_> {
    /// Runs both; both must succeed.
    pub(crate) fn run(&self) -> Result<Exchange> {
        let (server, client) = self.start()?;
        finish(&server, &client, self.timeout)
    }

    /// Starts both.
    pub(crate) fn start(&self) -> Result<(Job, Job)> {
        let server = self.start_server()?;
        let client = self.client_vm.spawn(&self.client)?;
        Ok((server, client))
    }

    /// Starts the server and waits until it listens.
    pub(crate) fn start_server(&self) -> Result<Job> {
        let server = self.server_vm.spawn(&self.server)?;
        let condition = self.ready.condition();
        let waiting = self.server_vm.spawn(&format!("until {condition}; do sleep 0.02; done"))?;
        let deadline = Instant::now() + self.timeout;
        while waiting.is_running() {
            waiting.pause(Duration::from_millis(200));
            if !server.is_running() {
                bail!("{}: ended before it listened\n{}", server.title(), server.output());
            }
            if Instant::now() > deadline {
                bail!("{}: does not listen\n{}", server.title(), server.output());
            }
        }
        Ok(server)
    }
}

/// Waits for the end of both; both must succeed.
pub(crate) fn finish(server: &Job, client: &Job, timeout: Duration) -> Result<Exchange> {
    let client_output = client.wait_success(timeout).with_context(|| {
        // The output of the server helps to explain the failure of the client.
        format!("the client failed; {} printed:\n{}", server.title(), server.output())
    })?;
    let server_output = server
        .wait_success(Duration::from_secs(30).min(timeout))
        .with_context(|| format!("the server failed; {} printed:\n{client_output}", client.title()))?;
    Ok(Exchange { server: server_output, client: client_output })
}
