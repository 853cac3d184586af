//! Doorbell pages mapped into the VMM, so that a guest's doorbells cause no VM exit (docs/doorbells.md).
//!
//! The pages belong to a file that this process serves to the kernel ([`fuse`]). The kernel sends a request when an
//! absent page is touched, and removes a page on demand. The thread that polls the rings ([`watcher`]) can therefore
//! sleep until the next store wakes it. The file is created by the process that has the privilege to mount
//! ([`PageFile`]). It has no content: the process that serves it parses messages of the kernel, and no data of a guest.

mod counts;
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

use anyhow::{Context, bail};
use pvrdma_dev::{DoorbellWatcher, MappedDoorbells};
use serde::{Deserialize, Serialize};

pub use counts::DoorbellCounters;
pub use host::HostFacts;
pub use open::PageFile;
use pages::StoppedPages;
pub(crate) use stand_in::{entrust, tell_end};
use watcher::{Watch, Watcher};

/// Implementation of the doorbells of guest processes, as decided for a device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DoorbellSetup {
    /// Stores trap and arrive as messages of the VMM.
    Trapped {
        /// Reason why they are not mapped, if the configuration does not ask for this.
        reason: Option<String>,
    },
    /// Stores go to memory that the VMM has mapped.
    Mapped {
        /// A processor may be free to poll the rings continuously.
        spins: bool,
        /// Reason why the VMM ends together with the process that serves the pages, if it does.
        #[serde(default)]
        unguarded: Option<String>,
    },
}

impl Default for DoorbellSetup {
    fn default() -> Self {
        Self::Trapped { reason: None }
    }
}

/// A file of doorbell pages, for the process that serves it.
#[derive(Debug)]
pub struct ServedFile {
    /// The file.
    pub file: PageFile,
    /// Kept open while this process serves the file. When it is closed, the fallback server takes over.
    pub life: Option<OwnedFd>,
}

impl ServedFile {
    /// Takes the file of doorbell pages from the descriptors of a device, if it has one.
    ///
    /// # Errors
    /// A descriptor is missing.
    pub(crate) fn take(setup: &DoorbellSetup, fds: &mut impl Iterator<Item = OwnedFd>) -> anyhow::Result<Option<Self>> {
        Ok(match setup {
            DoorbellSetup::Trapped { .. } => None,
            DoorbellSetup::Mapped { unguarded, .. } => {
                let (Some(device), Some(file)) = (fds.next(), fds.next()) else { bail!("no file of doorbell pages") };
                let life = match unguarded {
                    Some(_) => None,
                    None => Some(fds.next().context("no descriptor that ends with the server of doorbell pages")?),
                };
                Some(Self { file: PageFile { device, file }, life })
            }
        })
    }
}

/// Doorbell pages in a status.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DoorbellReport {
    /// `trapped` or `mapped`.
    pub mode: String,
    /// Reason why they are not mapped, if the configuration permits both.
    #[serde(default)]
    pub reason: Option<String>,
    /// State of the polling thread: `cold` (it sleeps), `warm`, `hot` (it spins) or `polled` (a guest keeps touching
    /// its page but posts nothing).
    #[serde(default)]
    pub watcher: Option<String>,
    /// Reason why the VMM ends together with the process of the network, if it does.
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

/// Doorbell pages of a device. Dropping it ends the thread that polls the rings. The pages are served for as long as a
/// process maps them.
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

/// Doorbell pages that a worker gives to the next one, without their descriptors.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GivenPages {
    /// A processor may be free to poll the rings continuously.
    spins: bool,
    /// Reason why there is no fallback server, if there is none.
    unguarded: Option<String>,
    /// A client has touched a page. Any page may be present then.
    touched: bool,
}

impl GivenPages {
    /// Returns the number of its descriptors: the connection to the kernel, the file, and the end of the pipe to the
    /// fallback server, if there is one.
    pub(crate) const fn descriptors(&self) -> usize {
        if self.unguarded.is_some() { 2 } else { 3 }
    }

    /// Combines the pages with their descriptors. Also returns `true` if a client has touched a page.
    ///
    /// Nothing checks that the first descriptor is a connection to the kernel: a worker that sends another one gains
    /// nothing, because the messages that are read from it and written to it concern the pages of its own devices.
    ///
    /// # Errors
    /// A descriptor is missing.
    pub(crate) fn with(self, fds: Vec<OwnedFd>) -> anyhow::Result<(DoorbellSetup, ServedFile, bool)> {
        let Self { spins, unguarded, touched } = self;
        let setup = DoorbellSetup::Mapped { spins, unguarded };
        let file = ServedFile::take(&setup, &mut fds.into_iter())?.context("no file of doorbell pages")?;
        Ok((setup, file, touched))
    }
}

/// Doorbell pages that are not served, so that another worker can serve them. Dropping it serves them again.
#[derive(Debug)]
pub(crate) struct HeldPages<'a> {
    lent: &'a Lent,
    given: GivenPages,
    stopped: StoppedPages<'a>,
}

impl HeldPages<'_> {
    /// Returns the pages and their descriptors for the other worker.
    ///
    /// # Errors
    /// No descriptors are available.
    pub(crate) fn give(&self) -> io::Result<(GivenPages, Vec<OwnedFd>)> {
        let (connection, life) = self.lent.watch.pages().duplicates()?;
        Ok((self.given.clone(), [connection, self.lent.file.try_clone()?].into_iter().chain(life).collect()))
    }

    /// Leaves the pages to the other worker.
    pub(crate) fn give_away(self) {
        std::mem::forget(self.stopped);
    }
}

/// Doorbell pages that another worker still serves. Dropping it leaves them to that worker.
pub(crate) struct ArrivingPages {
    watch: Arc<Watch>,
    touched: bool,
    device: Arc<dyn MappedDoorbells>,
}

impl ArrivingPages {
    /// Serves the pages from now on. The device is still paused.
    pub(crate) fn serve(self) {
        self.watch.take_over(self.touched);
        // The watcher's thread does the same, but perhaps after the device has resumed. The guest would then be
        // notified once more of completions in its queues.
        if self.touched {
            self.device.doorbell_pages().for_each(|page| self.device.page_touched(page));
        }
    }
}

impl Drop for ArrivingPages {
    fn drop(&mut self) {
        self.watch.pages().leave();
    }
}

impl Doorbells {
    /// Creates the pages of the device `name`. If they are mapped, they belong to `file`, which has `pages` pages. They
    /// are not served yet.
    ///
    /// # Errors
    /// No thread or descriptor is available.
    pub(crate) fn new(name: &str, setup: DoorbellSetup, file: Option<ServedFile>, pages: u32) -> io::Result<Self> {
        let serve = |ServedFile { file: PageFile { device, file }, life }| -> io::Result<Lent> {
            let counts = Arc::<DoorbellCounters>::default();
            let watch = Watch::new(name, device, life, pages, Arc::clone(&counts))?;
            Ok(Lent { file: Arc::new(file), watch, watcher: None, counts })
        };
        Ok(Self { setup, lent: file.map(serve).transpose()? })
    }

    /// Returns the watcher for the device, or `None` if its doorbells trap.
    pub(crate) fn watcher(&self) -> Option<Arc<dyn DoorbellWatcher>> {
        self.lent.as_ref().map(|lent| Arc::<Watch>::clone(&lent.watch) as _)
    }

    /// Starts to poll the rings of the device that was given [`Self::watcher`].
    ///
    /// # Errors
    /// No thread can be started.
    pub(crate) fn watch(&mut self, device: Arc<dyn MappedDoorbells>) -> io::Result<()> {
        if let Some(lent) = &mut self.lent {
            let spins = matches!(self.setup, DoorbellSetup::Mapped { spins: true, .. });
            lent.watcher = Some(Watcher::start(&lent.watch, device, spins)?);
        }
        Ok(())
    }

    /// Begins to serve pages that no process has served.
    pub(crate) fn serve(&self) {
        if let Some(lent) = &self.lent {
            lent.watch.take_over(false);
        }
    }

    /// Stops serving pages that may be given to another worker. Returns `None` if doorbells trap.
    ///
    /// # Errors
    /// The thread that serves the pages is stuck or has ended.
    pub(crate) fn hold(&self) -> io::Result<Option<HeldPages<'_>>> {
        let (Some(lent), DoorbellSetup::Mapped { spins, unguarded }) = (&self.lent, &self.setup) else {
            return Ok(None);
        };
        let stopped = lent.watch.pages().stop()?;
        let given = GivenPages { spins: *spins, unguarded: unguarded.clone(), touched: lent.watch.is_touched() };
        Ok(Some(HeldPages { lent, given, stopped }))
    }

    /// Returns the pages for the time at which they arrive: another worker has served them until then. `touched`: a
    /// client has touched one.
    pub(crate) fn arriving(&self, touched: bool, device: Arc<dyn MappedDoorbells>) -> Option<ArrivingPages> {
        self.lent.as_ref().map(|lent| ArrivingPages { watch: Arc::clone(&lent.watch), touched, device })
    }

    /// Returns the file for clients.
    pub(crate) fn file(&self) -> Option<Arc<OwnedFd>> {
        self.lent.as_ref().map(|lent| Arc::clone(&lent.file))
    }

    /// Returns the current state.
    pub(crate) fn report(&self) -> DoorbellReport {
        let watcher = self.lent.as_ref().map(|lent| lent.watch.state().to_owned());
        DoorbellReport { watcher, ..DoorbellReport::from(&self.setup) }
    }

    /// Returns the counters of the pages.
    pub(crate) fn counters(&self) -> Vec<pvrdma_base::Counter> {
        self.lent.as_ref().map_or_else(|| DoorbellCounters::default().list(), |lent| lent.counts.list())
    }
}
