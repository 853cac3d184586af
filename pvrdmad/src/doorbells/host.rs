//! Decides whether a host benefits from doorbells that do not trap.

use std::env::consts::ARCH;
use std::thread;

use super::fuse::Notifier;
use super::open::PageFile;

/// Number of processors for which this pays: two that spin for a guest, one that polls its rings, and one for
/// everything else.
const PROCESSORS: usize = 4;

/// Facts about a host.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostFacts {
    /// Name of its architecture.
    pub architecture: &'static str,
    /// Processors that this process may use.
    pub processors: usize,
    /// Reason why no fallback server can guard pages, if none can: VMMs then end with the process of their network.
    pub without_stand_in: Option<String>,
    /// Reason why no file of doorbell pages can be created, if none can.
    pub without_file: Option<String>,
}

impl HostFacts {
    /// Examines this host.
    #[must_use]
    pub fn look() -> Self {
        let file = PageFile::make(1);
        Self {
            architecture: ARCH,
            processors: thread::available_parallelism().map_or(1, usize::from),
            without_stand_in: file.as_ref().ok().and_then(|file| asks_again(file).err()),
            without_file: file.err().map(|error| error.to_string()),
        }
    }

    /// Returns `true` if there is a processor to spare for spinning.
    #[must_use]
    pub const fn spins(&self) -> bool {
        self.processors >= PROCESSORS
    }

    /// Returns `true` if a watcher may try to spin where the configuration requires mapped doorbells. It stops when it
    /// is preempted.
    #[must_use]
    pub const fn may_spin(&self) -> bool {
        self.processors > 1
    }

    /// Explains why `doorbells=auto` means `trapped` here.
    #[must_use]
    pub fn obstacle(&self) -> Option<String> {
        if self.architecture != "x86_64" {
            return Some(format!("not on {}: its stores are ordered otherwise", self.architecture));
        }
        if !self.spins() {
            return Some(format!("{} processors, at least {PROCESSORS} are needed", self.processors));
        }
        self.without_file.clone().or_else(|| self.without_stand_in.clone())
    }
}

/// Checks that the kernel can repeat requests that a process had read before it ended.
fn asks_again(file: &PageFile) -> Result<(), String> {
    let asked = Notifier::of(&file.device).and_then(|notifier| notifier.ask_again());
    asked.map_err(|error| format!("a request of the kernel's would be lost with its process: {error} (Linux 6.9)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doorbells_are_mapped_where_all_is_there() {
        let good = HostFacts { architecture: "x86_64", processors: 4, without_stand_in: None, without_file: None };
        assert_eq!((good.obstacle(), good.spins()), (None, true));
        let few = |processors| HostFacts { processors, ..good.clone() };
        assert_eq!([1, 2, 3, 4].map(|number| few(number).may_spin()), [false, true, true, true]);
        assert_eq!([1, 2, 3, 4].map(|number| few(number).obstacle().is_none()), [false, false, false, true]);
        let why = |facts: HostFacts| facts.obstacle().unwrap();
        assert!(why(HostFacts { architecture: "aarch64", ..good.clone() }).contains("aarch64"));
        assert!(why(HostFacts { processors: 3, ..good.clone() }).contains("3 processors"));
        assert_eq!(why(HostFacts { without_file: Some("no /dev/fuse".to_owned()), ..good.clone() }), "no /dev/fuse");
        assert_eq!(why(HostFacts { without_stand_in: Some("an old kernel".to_owned()), ..good }), "an old kernel");
    }
}
