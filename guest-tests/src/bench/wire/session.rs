//! Two processes, one on each side of a network, controlled over their standard streams.

use std::io::{BufRead, BufReader, PipeReader, PipeWriter, Write};
use std::process::Stdio;

use anyhow::{Context, Result};

use super::network::Network;
use super::peer::{Outcome, PeerOptions};
use crate::process::BoundChild;

/// A process and its streams.
#[derive(Debug)]
pub(super) struct Talker {
    child: BoundChild,
    input: PipeWriter,
    output: BufReader<PipeReader>,
}

impl Talker {
    /// Starts a command on a side.
    pub(super) fn start(network: &Network, side: usize, command: &[String]) -> Result<Self> {
        let mut words = network.enter(side);
        words.extend_from_slice(command);
        Self::spawn(&words)
    }

    /// Starts a command on this machine.
    pub(super) fn spawn(words: &[String]) -> Result<Self> {
        let (their_input, input) = std::io::pipe().context("cannot create a pipe")?;
        let (output, their_output) = std::io::pipe().context("cannot create a pipe")?;
        let (program, arguments) = words.split_first().context("an empty command")?;
        let child = BoundChild::spawn("a side", program, |command| {
            command.args(arguments).stdin(their_input).stdout(their_output).stderr(Stdio::inherit());
        })?;
        Ok(Self { child, input, output: BufReader::new(output) })
    }

    /// Starts this program on a side.
    fn start_self(network: &Network, side: usize, arguments: Vec<String>) -> Result<Self> {
        let program = std::env::current_exe().context("cannot find this program")?;
        let mut command = vec![program.to_string_lossy().into_owned()];
        command.extend(arguments);
        Self::start(network, side, &command)
    }

    /// Returns the next line of its output.
    pub(super) fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line).context("cannot read from a side")?;
        anyhow::ensure!(!line.is_empty(), "a side of the measurement (process {}) ended early", self.child.id());
        Ok(line)
    }

    /// Returns all remaining output until it ends.
    pub(super) fn rest(&mut self) -> Result<String> {
        std::io::read_to_string(&mut self.output).context("cannot read from a side")
    }

    /// Sends it a line.
    pub(super) fn tell(&mut self, line: &str) -> Result<()> {
        writeln!(self.input, "{}", line.trim()).context("cannot write to a side")
    }
}

/// Runs this program on both sides. Returns the outcomes of sender and receiver.
pub(super) fn run(network: &Network, options: &PeerOptions) -> Result<[Outcome; 2]> {
    let mut sides = [0, 1].map(|side| Talker::start_self(network, side, options.arguments(side)));
    let [Ok(sender), Ok(receiver)] = &mut sides else {
        return Err(sides.into_iter().find_map(Result::err).context("two sides")?);
    };
    let places = [sender.line()?, receiver.line()?];
    receiver.tell(&places[0])?;
    receiver.line().context("the receiver")?;
    sender.tell(&places[1])?;
    sender.line().context("the sender")?;
    sender.tell("go")?;
    let sent = sender.line().context("the sender")?;
    receiver.tell("end")?;
    let received = receiver.line().context("the receiver")?;
    Ok([serde_json::from_str(&sent)?, serde_json::from_str(&received)?])
}
