//! Checks that command lines of this project's programs parse, that scripts are valid for bash, that configuration
//! loads, and that QEMU gets the sockets that pvrdmad serves.

use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use clap::Parser;
use pvrdmad::config::{Config, ConfigError, ConfigSpec};

use super::markdown::{Block, Document};
use super::shell;
use crate::workflow;

/// Devices in a document's command lines.
#[derive(Debug, Default)]
struct Devices {
    sockets: Vec<String>,
    macs: Vec<String>,
    nics: Vec<String>,
}

/// Returns the problems of a document.
pub(super) fn check(document: &Document) -> Result<Vec<String>> {
    let (mut problems, mut devices, mut machines) = (Vec::new(), Devices::default(), Vec::new());
    for block in document.blocks() {
        let place = format!("{}:{}", document.path.display(), block.line);
        let mut problem = |what: String| problems.push(format!("{place}: {what}"));
        match block.language.as_str() {
            "sh" | "bash" | "console" | "yaml" => {
                let script = match block.language.as_str() {
                    "yaml" => match workflow::steps(&block.text) {
                        Ok(steps) => steps.iter().filter_map(script).map(|script| format!("{script}\n")).collect(),
                        Err(error) => {
                            problem(format!("{error:#}"));
                            continue;
                        }
                    },
                    _ => shell::without_prompts(&block.text),
                };
                if let Some(error) = bash_refuses(&script)? {
                    problem(error);
                }
                for command in shell::commands(&script) {
                    if let Some(error) = refused(&command) {
                        problem(error);
                    }
                    devices.note(&command);
                    machines.extend(is_qemu(&command).then(|| (place.clone(), command)));
                }
            }
            "toml" => {
                if let Some(error) = does_not_load(&block)? {
                    problem(error);
                }
            }
            _ => {}
        }
    }
    for (place, command) in machines {
        problems.extend(devices.strangers(&command).into_iter().map(|what| format!("{place}: {what}")));
    }
    Ok(problems)
}

/// Returns the script of a step: its own, or the one that it passes to the action of this repository.
fn script(step: &workflow::Step) -> Option<&String> {
    step.script.as_ref().or_else(|| step.inputs.get("run"))
}

/// Returns bash's error for a script, which it only parses.
fn bash_refuses(script: &str) -> Result<Option<String>> {
    let output =
        Command::new("bash").args(["-n", "-c", script]).stdin(Stdio::null()).output().context("cannot run bash")?;
    let text = String::from_utf8_lossy(&output.stderr);
    Ok((!output.status.success()).then(|| text.trim().to_owned()))
}

/// Returns the program that a command runs, and its arguments. Skips variable assignments, `sudo` and cargo.
fn program(command: &[String]) -> Option<(&str, &[String])> {
    let is_set = |word: &String| {
        word.split_once('=').is_some_and(|(name, _)| name.chars().all(|c| c == '_' || c.is_alphanumeric()))
    };
    let skipped = command
        .iter()
        .take_while(|word| is_set(word) || ["sudo", "exec", "nohup", "{", "then", "do"].contains(&word.as_str()));
    let command = command.get(skipped.count()..)?;
    let (first, rest) = command.split_first()?;
    let name = first.rsplit('/').next().unwrap_or(first);
    if name != "cargo" || rest.first().is_none_or(|word| word != "run") {
        return Some((name, rest));
    }
    let after = |option: &str| rest.iter().position(|word| word == option).and_then(|at| rest.get(at + 1));
    let package = after("--bin").or_else(|| after("-p"))?;
    let dashes = rest.iter().position(|word| word == "--").map_or(rest.len(), |at| at + 1);
    Some((package, rest.get(dashes..).unwrap_or_default()))
}

/// Returns the error of a program of this project for its arguments.
fn refused(command: &[String]) -> Option<String> {
    let (name, arguments) = program(command)?;
    let words = std::iter::once(name).chain(arguments.iter().map(String::as_str));
    let error = match name {
        "pvrdmad" => pvrdmad::cli::Cli::try_parse_from(words).map(drop),
        "guest-tests" => crate::cli::Cli::try_parse_from(words).map(drop),
        "pvrdma-lab" => crate::lab::LabCli::try_parse_from(words).map(drop),
        _ => return None,
    }
    .err()?;
    // --help and --version also end in an `Err`, but are not errors.
    error.use_stderr().then(|| format!("{}: {}", command.join(" "), error.to_string().trim()))
}

/// Returns pvrdmad's error for a configuration file.
fn does_not_load(block: &Block) -> Result<Option<String>> {
    Ok(load(&block.text)?.map(|error| format!("the configuration does not load: {error}")))
}

/// Returns pvrdmad's error for a configuration.
pub(super) fn load(text: &str) -> Result<Option<String>> {
    Ok(configuration(text)?.err().map(|error| format!("{:#}", anyhow::Error::from(error))))
}

/// Loads a configuration as pvrdmad does.
pub(super) fn configuration(text: &str) -> Result<Result<Config, ConfigError>> {
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let path = directory.path().join("pvrdmad.toml");
    std::fs::write(&path, text).context("cannot write a configuration")?;
    Ok(Config::load(Some(&path), ConfigSpec::default()))
}

fn is_qemu(command: &[String]) -> bool {
    program(command).is_some_and(|(name, _)| name.starts_with("qemu-system-"))
}

impl Devices {
    /// Records the devices of a pvrdmad command line.
    fn note(&mut self, command: &[String]) {
        let Some(("pvrdmad", arguments)) = program(command) else { return };
        for field in arguments.iter().flat_map(|word| word.split(',')) {
            if let Some((key, value)) = field.split_once('=') {
                match key {
                    "socket" | "nic-socket" => self.sockets.push(value.to_owned()),
                    "mac" => self.macs.push(value.to_owned()),
                    // unix:PATH, unix-connect:PATH, unix-dgram:LOCAL:REMOTE
                    "nic" => self.nics.extend(value.split(':').skip(1).map(str::to_owned)),
                    _ => {}
                }
            }
        }
    }

    /// Returns sockets and addresses in a QEMU command line that pvrdmad does not have. Documents without a pvrdmad
    /// command line are not compared.
    fn strangers(&self, command: &[String]) -> Vec<String> {
        let mut strangers = Vec::new();
        let mut compare = |what: &str, value: &str, known: &[String]| {
            if !known.is_empty() && !known.iter().any(|known| may_be(value, known)) {
                strangers.push(format!("QEMU's {what} {value} is none of pvrdmad's: {}", known.join(", ")));
            }
        };
        for word in command {
            if let Some((_, rest)) = word.split_once("\"path\":") {
                let path = rest.trim_start().trim_start_matches('"').split('"').next().unwrap_or_default();
                compare("vfio-user socket", path, &self.sockets);
            }
            for field in word.split(',') {
                match field.split_once('=') {
                    Some(("mac", value)) if word.starts_with("vmxnet3,") => compare("MAC", value, &self.macs),
                    Some(("addr.path" | "local.path" | "remote.path", value)) => {
                        compare("network socket", value, &self.nics);
                    }
                    _ => {}
                }
            }
        }
        strangers
    }
}

/// Returns `true` if a text with `$1`, `$(...)` and so on can equal another text after expansion. Named variables have
/// the same value in both.
fn may_be(pattern: &str, text: &str) -> bool {
    let Some(at) = pattern.find("$(").into_iter().chain(find_positional(pattern)).min() else { return pattern == text };
    let (head, hole) = pattern.split_at(at);
    let Some(rest) = text.strip_prefix(head) else { return false };
    let after = after_expansion(hole);
    (0..=rest.len()).filter(|&at| rest.is_char_boundary(at)).any(|at| may_be(after, &rest[at..]))
}

fn find_positional(text: &str) -> Option<usize> {
    text.match_indices('$').map(|(at, _)| at).find(|at| text[at + 1..].starts_with(|c: char| c.is_ascii_digit()))
}

/// Returns the rest of a text that begins with an expansion.
fn after_expansion(text: &str) -> &str {
    let mut depth = 0_usize;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            return &text[at + c.len_utf8()..];
        }
    }
    ""
}
