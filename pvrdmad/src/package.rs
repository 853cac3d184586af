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
            .with_context(|| format!("completions of {shell}"))?;
    }
    Ok(())
}

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
