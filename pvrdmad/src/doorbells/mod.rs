//! Doorbell pages that are memory of the VMM's, so that a guest's doorbells cost no exit (docs/doorbells.md).
//!
//! The pages are those of a file that this process serves to the kernel ([`fuse`]). The kernel asks for a page when it
//! is touched and not there, and takes it away when it is told to: so whoever looks at rings ([`watcher`]) can sleep
//! and is woken by the next store. The file is made by whoever may mount ([`PageFile`]); it has no content, and whoever
//! serves it parses what the kernel says, and nothing of a guest's.

mod fuse;
mod host;
mod open;
mod pacer;
mod pages;
pub mod stand_in;
#[cfg(test)]
mod tests;
mod watcher;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use pvrdma_dev::{DoorbellWatcher, MappedDoorbells};
use pvrdma_verbs::counters;
use serde::{Deserialize, Serialize};

pub use host::HostFacts;
pub use open::PageFile;
pub(crate) use stand_in::{entrust, tell_end};
use watcher::{Watch, Watcher};

counters! {
    /// What became of the doorbell pages that a device lends to its VMM.
    pub struct DoorbellCounters {
        /// Doorbell pages of processes that were touched while they were away. Each is a fault of the guest's.
        doorbell_faults,
        /// Doorbell pages that were taken away because nothing came.
        doorbell_arms,
        /// Times that something was found after the pages were taken away: it was posted a moment before.
        doorbell_arms_late,
        /// Doorbell pages that the kernel could not take away.
        doorbell_arms_failed,
        /// Naps of the thread that looks at rings.
        doorbell_naps,
        /// Sleeps of the thread that looks at rings, while all pages were away.
        doorbell_sleeps,
    }
}

/// What becomes of the doorbells of a guest's processes, as it is decided for a device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DoorbellSetup {
    /// They are messages of the VMM's.
    Trapped {
        /// Why they are not memory, if that was not what the configuration says.
        reason: Option<String>,
    },
    /// They are stores to memory of the VMM's.
    Mapped {
        /// There may be a processor to spare for looking at rings again and again.
        spins: bool,
        /// Why the VMM may end with the process that serves the pages, if it may.
        #[serde(default)]
        unguarded: Option<String>,
    },
}

impl Default for DoorbellSetup {
    fn default() -> Self {
        Self::Trapped { reason: None }
    }
}

/// A file of doorbell pages for who serves it.
#[derive(Debug)]
pub struct ServedFile {
    /// The file.
    pub file: PageFile,
    /// Kept for as long as it is served: when it is closed, somebody else serves it.
    pub life: Option<OwnedFd>,
}

/// Doorbell pages as a status has them.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DoorbellReport {
    /// `trapped` or `mapped`.
    pub mode: String,
    /// Why they are not mapped, if the configuration leaves that open.
    #[serde(default)]
    pub reason: Option<String>,
    /// What the thread does that looks at rings: `cold` (it sleeps), `warm`, `hot` (it spins) or `polled` (a guest
    /// spins and posts nothing).
    #[serde(default)]
    pub watcher: Option<String>,
    /// Why the VMM may end with the process of the network, if it may.
    #[serde(default)]
    pub unguarded: Option<String>,
}

impl From<&DoorbellSetup> for DoorbellReport {
    fn from(setup: &DoorbellSetup) -> Self {
        match setup {
            DoorbellSetup::Trapped { reason } => {
                Self { mode: "trapped".to_owned(), reason: reason.clone(), watcher: None, unguarded: None }
            }
            DoorbellSetup::Mapped { unguarded, .. } => {
                Self { mode: "mapped".to_owned(), reason: None, watcher: None, unguarded: unguarded.clone() }
            }
        }
    }
}

/// The doorbell pages of a device. Dropping it ends who looks at rings; the pages are served on while somebody has
/// them mapped.
#[derive(Debug)]
pub(crate) struct Doorbells {
    setup: DoorbellSetup,
    lent: Option<Lent>,
}

#[derive(Debug)]
struct Lent {
    file: Arc<OwnedFd>,
    watch: Arc<Watch>,
    watcher: Option<Watcher>,
    counts: Arc<DoorbellCounters>,
}

impl Doorbells {
    /// Those of a device of this name: with `file`, which has so many pages, if they are mapped.
    ///
    /// # Errors
    /// There is no room for a thread or a descriptor.
    pub(crate) fn new(name: &str, setup: DoorbellSetup, file: Option<ServedFile>, pages: u32) -> io::Result<Self> {
        let serve = |ServedFile { file: PageFile { device, file }, life }| -> io::Result<Lent> {
            let counts = Arc::<DoorbellCounters>::default();
            let watch = Watch::new(name, device, life, pages, Arc::clone(&counts))?;
            Ok(Lent { file: Arc::new(file), watch, watcher: None, counts })
        };
        Ok(Self { setup, lent: file.map(serve).transpose()? })
    }

    /// Who watches, for the device. None if its doorbells trap.
    pub(crate) fn watcher(&self) -> Option<Arc<dyn DoorbellWatcher>> {
        self.lent.as_ref().map(|lent| Arc::<Watch>::clone(&lent.watch) as _)
    }

    /// Looks at the rings of the device that has [`Self::watcher`].
    ///
    /// # Errors
    /// There is no room for a thread.
    pub(crate) fn watch(&mut self, device: Arc<dyn MappedDoorbells>) -> io::Result<()> {
        if let Some(lent) = &mut self.lent {
            let spins = matches!(self.setup, DoorbellSetup::Mapped { spins: true, .. });
            lent.watcher = Some(Watcher::start(&lent.watch, device, spins)?);
        }
        Ok(())
    }

    /// The file that clients get.
    pub(crate) fn file(&self) -> Option<Arc<OwnedFd>> {
        self.lent.as_ref().map(|lent| Arc::clone(&lent.file))
    }

    /// What they do now.
    pub(crate) fn report(&self) -> DoorbellReport {
        let watcher = self.lent.as_ref().map(|lent| lent.watch.state().to_owned());
        DoorbellReport { watcher, ..DoorbellReport::from(&self.setup) }
    }

    /// What became of the pages.
    pub(crate) fn counters(&self) -> Vec<pvrdma_verbs::Counter> {
        self.lent.as_ref().map_or_else(|| DoorbellCounters::default().list(), |lent| lent.counts.list())
    }
}
