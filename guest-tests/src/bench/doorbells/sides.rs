//! Compared sides, and the placement of threads on processors.

use anyhow::{Context, Result, ensure};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Name of the baseline for mapped doorbells.
pub(super) const TRAPPED: &str = "doorbells that trap";

/// Set of processors.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    /// Processors of guests, or of the process that acts as one.
    Guest,
    /// Spare processor, on which only the device runs.
    Spare,
    /// All processors.
    Anywhere,
}

impl Place {
    fn set(self) -> Result<CpuSet> {
        // Queried of the main thread, which is never moved.
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

    /// Moves this thread there, until it ends.
    pub(super) fn of_this_thread(self) -> Result<()> {
        sched_setaffinity(None, &self.set()?).context("cannot choose a processor")
    }

    /// Moves all threads of a process there.
    pub(super) fn of_process(self, process: u32) -> Result<()> {
        let (set, mut moved) = (self.set()?, 0);
        for task in std::fs::read_dir(format!("/proc/{process}/task")).context("no such process")? {
            let name = task?.file_name();
            let thread = name.to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
            // The call fails for a thread that has just ended.
            moved += i32::from(sched_setaffinity(thread, &set).is_ok());
        }
        ensure!(moved > 0, "no thread of process {process} could be moved");
        Ok(())
    }
}
