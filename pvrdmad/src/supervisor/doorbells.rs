//! Which devices lend their doorbell pages to the VMM: decided when a device comes, for as long as it is there.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use anyhow::{Result, bail};
use log::warn;

use super::plan::Program;
use super::stand_in::StandIns;
use crate::config::{BackendSpec, Device, DoorbellMode, SandboxMode};
use crate::doorbells::{DoorbellSetup, HostFacts, PageFile};

/// What is known of the host, once somebody asks.
#[derive(Debug, Default)]
pub(super) struct DoorbellHost {
    facts: OnceLock<HostFacts>,
    /// What workers run, and who guards their pages. None: networks have no processes.
    program: Option<Program>,
}

impl DoorbellHost {
    pub(super) fn new(program: Option<Program>) -> Self {
        Self { facts: OnceLock::new(), program }
    }

    /// What is known.
    fn facts(&self) -> &HostFacts {
        self.facts.get_or_init(|| {
            let facts = HostFacts::look();
            let without_processes = || "networks have no processes of their own (isolate=none)".to_owned();
            let without_stand_in = self.program.is_none().then(without_processes).or(facts.without_stand_in);
            HostFacts { without_stand_in, ..facts }
        })
    }

    /// Who guards the pages of a network.
    pub(super) fn stand_ins(&self, sandbox: SandboxMode, network: &str) -> StandIns {
        let program = match (&self.facts().without_stand_in, &self.program) {
            (None, Some(program)) => Ok(program.path.clone()),
            (reason, _) => Err(reason.clone().unwrap_or_default()),
        };
        StandIns::new(program, sandbox, network)
    }

    /// What keepers run. None: there are none.
    pub(super) fn keepers(&self) -> Option<Program> {
        // For tests of what a worker does that a client has wedged.
        let without = cfg!(feature = "testing") && std::env::var_os("PVRDMAD_WITHOUT_KEEPERS").is_some();
        self.program.clone().filter(|_| !without)
    }

    /// What becomes of the doorbells of a device.
    ///
    /// # Errors
    /// The configuration wants what cannot be.
    pub(super) fn decide(&self, device: &Device, backend: &BackendSpec) -> Result<DoorbellSetup> {
        let wanted = device.doorbells;
        if wanted == DoorbellMode::Trapped {
            return Ok(DoorbellSetup::Trapped { reason: None });
        }
        if *backend != BackendSpec::Rxe && wanted == DoorbellMode::Auto {
            let reason = "nobody has measured it on the host's adapter";
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

/// What a worker is given: the descriptors of a new file of doorbell pages, if they are mapped.
///
/// A worker that starts later has doorbells that trap rather than none.
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
        // Whoever asks for it by name takes the risk.
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
