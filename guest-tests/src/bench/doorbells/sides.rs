//! What is compared, and who runs where meanwhile.

use anyhow::{Context, Result, ensure};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// What mapped doorbells are compared with.
pub(super) const TRAPPED: &str = "doorbells that trap";

/// The processor of guests, and the one that is to spare.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    /// Where guests run, or what plays one.
    Guest,
    /// Where only the device runs.
    Spare,
    /// On all of them.
    Anywhere,
}

impl Place {
    fn set(self) -> Result<CpuSet> {
        // Asked of the main thread, which is never moved.
        let all = sched_getaffinity(Pid::from_raw(rustix::process::getpid().as_raw_nonzero().get()))?;
        let mut there = (0..CpuSet::MAX_CPU).filter(|&cpu| all.is_set(cpu));
        let (first, second) = (there.next(), there.next());
        let (Some(first), Some(second)) = (first, second) else { anyhow::bail!("it takes two processors") };
        let mut set = CpuSet::new();
        match self {
            Self::Guest => set.set(first),
            Self::Spare => set.set(second),
            Self::Anywhere => [first, second].into_iter().for_each(|cpu| set.set(cpu)),
        }
        Ok(set)
    }

    /// Has this thread run there, until it ends.
    pub(super) fn of_this_thread(self) -> Result<()> {
        sched_setaffinity(None, &self.set()?).context("cannot choose a processor")
    }

    /// Has all threads of a process run there.
    pub(super) fn of_process(self, process: u32) -> Result<()> {
        let (set, mut moved) = (self.set()?, 0);
        for task in std::fs::read_dir(format!("/proc/{process}/task")).context("no such process")? {
            let name = task?.file_name();
            let thread = name.to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
            // One that has just ended runs nowhere.
            moved += i32::from(sched_setaffinity(thread, &set).is_ok());
        }
        ensure!(moved > 0, "no thread of process {process} could be moved");
        Ok(())
    }
}
