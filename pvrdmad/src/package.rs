//! Manual pages and completions for a package, generated from the definition of the command line.

use std::path::Path;
use std::{fs, io};

use anyhow::{Context, Result};
use clap::{Command, CommandFactory};
use clap_complete::Shell;

use crate::cli::Cli;
use crate::config::reference;
use crate::man;

/// Shells with completions.
const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Fish, Shell::Zsh];

/// Writes them to folders `man` and `completions` in `directory`.
///
/// # Errors
/// A file cannot be written.
pub fn write(directory: &Path) -> Result<()> {
    let folder = |name: &str| {
        let folder = directory.join(name);
        fs::create_dir_all(&folder).map(|()| folder)
    };
    let man = folder("man").with_context(|| directory.display().to_string())?;
    let completions = folder("completions").with_context(|| directory.display().to_string())?;
    clap_mangen::generate_to(shown(Cli::command()), &man).context("manual pages")?;
    complete(&man).context("manual pages")?;
    for shell in SHELLS {
        clap_complete::generate_to(shell, &mut shown(Cli::command()), "pvrdmad", &completions)
            .and_then(|path| extend(shell, &path))
            .with_context(|| format!("completions of {shell}"))?;
    }
    Ok(())
}

/// Extends generated completions by those that only the program knows, which [`crate::complete`] determines.
fn extend(shell: Shell, path: &Path) -> io::Result<()> {
    let text = fs::read_to_string(path)?;
    let text = match shell {
        Shell::Bash => text + include_str!("../packaging/complete.bash"),
        Shell::Fish => text + include_str!("../packaging/complete.fish"),
        Shell::Zsh => zsh(&text),
        _ => text,
    };
    fs::write(path, text)
}

/// Replaces the action for values of options and arguments that the program knows.
fn zsh(text: &str) -> String {
    let mut text = text.replacen("\n_pvrdmad() {", &(ZSH.to_owned() + "\n_pvrdmad() {"), 1);
    for form in ["NAME", "KEY=VALUE,...", "BACKEND"] {
        text = text.replace(&format!(":{form}:_default"), &format!(":{form}:_pvrdmad_known"));
    }
    let is_known = |line: &str| line.starts_with("':device -- ") || line.starts_with("'*::set -- ");
    let replaced =
        |line: &str| if is_known(line) { line.replace(":_default'", ":_pvrdmad_known'") } else { line.into() };
    text.split_inclusive('\n').map(replaced).collect()
}

/// Completion function of zsh.
const ZSH: &str = include_str!("../packaging/complete.zsh");

/// Adds the sections that the definition does not have, and the page of the configuration file.
fn complete(man: &Path) -> io::Result<()> {
    for entry in fs::read_dir(man)? {
        let path = entry?.path();
        let page = path.file_stem().unwrap_or_default().to_string_lossy();
        let text = fs::read_to_string(&path)? + &man::sections(&page);
        fs::write(path, text)?;
    }
    fs::write(man.join("pvrdmad.toml.5"), man::configuration(&reference::sections()))
}

/// Returns the command line without commands for the daemon itself and for packagers. Generators of completions ignore
/// the attribute `hidden`.
fn shown(command: Command) -> Command {
    let is_shown = |sub: &&Command| !sub.is_hide_set();
    let subcommands: Vec<_> = command.get_subcommands().filter(is_shown).cloned().collect();
    let mut only = Command::new("pvrdmad")
        .version(env!("CARGO_PKG_VERSION"))
        .args_conflicts_with_subcommands(true)
        .args(command.get_arguments().cloned())
        .subcommands(subcommands);
    if let Some(about) = command.get_about() {
        only = only.about(about.clone());
    }
    if let Some(after) = command.get_after_long_help() {
        only = only.after_long_help(after.clone());
    }
    only
}
