//! Decides which devices export their doorbell pages to the VMM. The decision is made when a device is added, and holds
//! for its lifetime.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use anyhow::{Result, bail};
use log::warn;

use super::program::Program;
use super::stand_in::StandIns;
use crate::config::{BackendSpec, Device, DoorbellMode, Feature, SandboxMode};
use crate::doorbells::{DoorbellSetup, HostFacts, PageFile};

/// Facts about the host, collected on first use.
#[derive(Debug, Default)]
pub(super) struct DoorbellHost {
    facts: OnceLock<HostFacts>,
    /// Program of workers and of the processes that guard their pages. `None`: networks have no processes.
    program: Option<Program>,
}

impl DoorbellHost {
    pub(super) fn new(program: Option<Program>) -> Self {
        Self { facts: OnceLock::new(), program }
    }

    /// Returns the facts, and collects them at the first call.
    fn facts(&self) -> &HostFacts {
        self.facts.get_or_init(|| {
            let facts = HostFacts::look();
            let without_processes = || "networks have no processes of their own (isolate=none)".to_owned();
            let without_stand_in = self.program.is_none().then(without_processes).or(facts.without_stand_in);
            HostFacts { without_stand_in, ..facts }
        })
    }

    /// Returns the fallback servers for the pages of a network.
    pub(super) fn stand_ins(&self, sandbox: SandboxMode, network: &str) -> StandIns {
        let program = match (&self.facts().without_stand_in, &self.program) {
            (None, Some(program)) => Ok(program.path.clone()),
            (reason, _) => Err(reason.clone().unwrap_or_default()),
        };
        StandIns::new(program, sandbox, network)
    }

    /// Returns the program of keepers, or `None` if there are none.
    pub(super) fn keepers(&self) -> Option<Program> {
        // Lets tests observe a worker without keepers that a client wedges.
        let without = cfg!(feature = "testing") && std::env::var_os("PVRDMAD_WITHOUT_KEEPERS").is_some();
        self.program.clone().filter(|_| !without)
    }

    /// Decides how the doorbells of a device are implemented.
    ///
    /// # Errors
    /// The configuration requires a mode that is impossible here.
    pub(super) fn decide(&self, device: &Device, backend: &BackendSpec) -> Result<DoorbellSetup> {
        let wanted = device.doorbells;
        if wanted == DoorbellMode::Trapped {
            return Ok(DoorbellSetup::Trapped { reason: None });
        }
        if wanted == DoorbellMode::Auto
            && let Err(reason) = backend.settings().has(Feature::MeasuredDoorbells)
        {
            return Ok(DoorbellSetup::Trapped { reason: Some(reason.to_owned()) });
        }
        let facts = self.facts();
        match (wanted, &facts.without_file) {
            (DoorbellMode::Mapped, Some(reason)) => bail!("doorbells=mapped: {reason}"),
            (DoorbellMode::Mapped, None) => Ok(DoorbellSetup::Mapped { spins: facts.may_spin(), unguarded: None }),
            _ => Ok(match facts.obstacle() {
                Some(reason) => DoorbellSetup::Trapped { reason: Some(reason) },
                None => DoorbellSetup::Mapped { spins: facts.spins(), unguarded: None },
            }),
        }
    }
}

/// Returns the doorbell setup for a worker, with the descriptors of a new doorbell page file if pages are exported.
///
/// If no file can be made, or no fallback server guards it, the doorbells trap: this is better than no worker.
pub(super) fn lend(
    device: &Device,
    setup: &DoorbellSetup,
    stand_ins: &StandIns,
) -> io::Result<(DoorbellSetup, Vec<OwnedFd>)> {
    let DoorbellSetup::Mapped { spins, .. } = *setup else { return Ok((setup.clone(), Vec::new())) };
    let pages = device.config.limits.max_uar;
    let made = PageFile::make(pages).map(|file| {
        let guard = stand_ins.guard(pages, &file.device);
        (file, guard)
    });
    match made {
        Ok((PageFile { device, file }, Ok(life))) => {
            Ok((DoorbellSetup::Mapped { spins, unguarded: None }, vec![device, file, life]))
        }
        // A configuration that requires mapped doorbells accepts the risk of having no fallback server.
        Ok((PageFile { device: connection, file }, Err(error))) if device.doorbells == DoorbellMode::Mapped => {
            let unguarded = Some(error.to_string());
            Ok((DoorbellSetup::Mapped { spins, unguarded }, vec![connection, file]))
        }
        Ok((_, Err(error))) | Err(error) => {
            // Log: once for each start of a worker.
            warn!("{}: doorbells trap: {error}", device.config.name);
            Ok((DoorbellSetup::Trapped { reason: Some(error.to_string()) }, Vec::new()))
        }
    }
}
