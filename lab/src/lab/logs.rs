//! Logs of a run.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::guests::Guests;
use super::outcome::Outcome;
use crate::interrupt;

/// A folder for logs.
#[derive(Debug)]
pub(super) struct Logs {
    path: PathBuf,
    /// Used if the caller names no folder. Removed unless something has failed.
    temporary: Option<TempDir>,
}

impl Logs {
    /// Opens the folder, and creates it if it does not exist.
    pub(super) fn new(named: Option<&Path>) -> Result<Self> {
        if let Some(path) = named {
            fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display()))?;
            return Ok(Self { path: path.to_owned(), temporary: None });
        }
        let directory = tempfile::Builder::new().prefix("pvrdma-lab-logs-").tempdir();
        let directory = directory.context("cannot create a directory for logs")?;
        Ok(Self { path: directory.path().to_owned(), temporary: Some(directory) })
    }

    /// Returns the path of a log.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Removes the folder if it is temporary; returns its path then.
    pub(super) fn remove(self) -> Option<PathBuf> {
        self.temporary.and_then(removed)
    }

    /// Collects the logs if they are wanted, and prints their path.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn keep(&mut self, guests: &Guests, outcome: &Outcome) -> Result<()> {
        if self.temporary.is_some() && (outcome.is_success() || interrupt::is_requested()) {
            return Ok(());
        }
        self.path = match self.temporary.take() {
            Some(directory) => directory.keep(),
            None => self.path.clone(),
        };
        let write = |name: &str, text: &str| {
            let path = self.path(name);
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
        };
        let copy = |from: &Path| {
            let name = from.file_name().unwrap_or_default().to_string_lossy();
            // A machine that did not start has no log.
            write(&name, &String::from_utf8_lossy(&fs::read(from).unwrap_or_default()))
        };
        for vm in guests.vms() {
            vm.log_files().into_iter().try_for_each(copy)?;
            if vm.is_running() && vm.has_booted() && !vm.has_panicked() {
                match vm.exec("dmesg", Duration::from_secs(10)) {
                    Ok(output) => write(&format!("{}.dmesg", vm.name()), &output.text)?,
                    Err(error) => log::debug!("{}: no kernel log: {error:#}", vm.name()),
                }
            }
        }
        copy(guests.daemon_log())?;
        match guests.status() {
            Ok(status) => write("status.json", &serde_json::to_string_pretty(&status)?)?,
            Err(error) => log::debug!("no status: {error:#}"),
        }
        eprintln!("pvrdma-lab: logs are in {}", self.path.display());
        Ok(())
    }
}

/// Removes a folder; returns its path unless that fails.
pub(super) fn removed(folder: TempDir) -> Option<PathBuf> {
    let path = folder.path().to_owned();
    match folder.close() {
        Ok(()) => Some(path),
        Err(error) => {
            log::warn!("cannot remove {}: {error}", path.display());
            None
        }
    }
}
