//! A machine on its way out of this process: to a file, or to another process beside its running guest.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, anyhow, ensure};
use kvm_ioctls::Kvm;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::file;
use super::link::Link;
use super::machine::State;
use super::messages::Hello;
use super::requests::{Request, Target};
use super::source::{Committed, Round, Source};
use super::write_log::MachineLog;
use crate::memory::{Vcpu, Vm};
use crate::parts::Parts;

/// A copy of memory beside the running guest.
type Copying = JoinHandle<Result<Source<MachineLog>>>;

/// The departure of a machine. Dropping it cancels a migration.
pub(crate) struct Departure<'a> {
    request: &'a Request,
    /// Set by the machine when the request has come.
    pub(crate) requested: Arc<AtomicBool>,
    /// Set by the machine when the copy has ended.
    pub(crate) copied: Arc<AtomicBool>,
    /// Signalled when the copy has ended.
    pub(crate) end_of_copy: EventFd,
    copying: Option<Copying>,
    source: Option<Source<MachineLog>>,
}

/// Parts of a machine that a departure needs while the guest runs.
#[derive(Clone, Copy)]
pub(crate) struct Running<'a> {
    pub(crate) hello: &'a Hello,
    pub(crate) vm: &'a Arc<Vm>,
    pub(crate) parts: &'a Parts,
}

/// Result of a departure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Left {
    /// The machine is in the file.
    Saved,
    /// It runs in another process.
    Moved,
}

/// Signals the end of the copy when it is dropped, also by a panic.
struct EndOfCopy(EventFd);

impl Drop for EndOfCopy {
    fn drop(&mut self) {
        // The write fails only if the event was signalled 2^64 times without a read.
        let _ = self.0.write(1);
    }
}

impl<'a> Departure<'a> {
    /// Creates the departure of a machine that stays until it is requested.
    pub(crate) fn new(request: &'a Request) -> Result<Self> {
        Ok(Self {
            request,
            requested: Arc::default(),
            copied: Arc::default(),
            end_of_copy: EventFd::new(EFD_NONBLOCK).context("event")?,
            copying: None,
            source: None,
        })
    }

    /// Handles events of the running machine. Returns `true` if its processors must stop for the departure.
    pub(crate) fn is_due(&mut self, machine: Running<'_>) -> bool {
        if self.requested.swap(false, Ordering::AcqRel) {
            match &self.request.target {
                Target::File(_) => return true,
                Target::Socket(path, limit) if self.copying.is_none() => match self.copy(machine, path, *limit) {
                    Ok(thread) => self.copying = Some(thread),
                    Err(error) => stays(machine.hello, &error),
                },
                // The migration is in progress.
                Target::Socket(..) => {}
            }
        }
        if self.copied.swap(false, Ordering::AcqRel)
            && let Some(thread) = self.copying.take()
        {
            match thread.join().unwrap_or_else(|_| Err(anyhow!("the thread that copies memory has panicked"))) {
                Ok(source) => self.source = Some(source),
                Err(error) => stays(machine.hello, &error),
            }
        }
        self.source.is_some()
    }

    /// Starts the copy.
    fn copy(&self, machine: Running<'_>, path: &Path, limit: Duration) -> Result<Copying> {
        for (name, function) in machine.parts.functions() {
            let blockers = function.blockers();
            ensure!(blockers.is_empty(), "the {name} cannot move: {}", blockers.join("; "));
        }
        let (path, hello, vm) = (path.to_owned(), machine.hello.clone(), Arc::clone(machine.vm));
        let log = MachineLog::of(machine.vm, machine.parts);
        let (cancel, end) = (Arc::clone(&self.request.cancel), EndOfCopy(self.end_of_copy.try_clone()?));
        cancel.begin();
        println!("{}: migrates to {}", hello.name, path.display());
        let copy = move || {
            let name = hello.name.clone();
            let report = move |Round { number, pages, bytes }| {
                println!("{name}: round {number}: {pages} pages, {bytes} bytes of memory sent");
            };
            let _end = end;
            let source = Link::connect(&path, limit, cancel)
                .and_then(|link| Source::copy(link, &hello, vm.memory(), || log.start(), report));
            source.with_context(|| format!("cannot migrate to {}", path.display()))
        };
        Builder::new().name("migration".to_owned()).spawn(copy).context("cannot start a thread")
    }

    /// Saves or moves a machine whose processors have stopped. Returns `None` if it stays; its functions are paused
    /// then.
    ///
    /// # Errors
    /// The machine must not run here, and may run nowhere.
    pub(crate) fn leave(&mut self, kvm: &Kvm, machine: Running<'_>, cpus: &[Vcpu]) -> Result<Option<Left>> {
        let stopped = Instant::now();
        let state = State::collect(kvm, machine.vm, cpus, machine.parts);
        let committed = match state.and_then(|state| self.send(machine, &state)) {
            Ok(committed) => committed,
            Err(error) => {
                // If the state could not be collected, the migration is still open. This ends it.
                self.source = None;
                stays(machine.hello, &error);
                return Ok(None);
            }
        };
        // From here on nothing of this machine accesses its memory or sends a frame.
        machine.parts.leave();
        let Some(committed) = committed else { return Ok(Some(Left::Saved)) };
        committed.wait().context(
            "the machine does not run here any more, and the destination has not confirmed that it runs there",
        )?;
        println!("{}: stood still for {} ms", machine.hello.name, stopped.elapsed().as_millis());
        Ok(Some(Left::Moved))
    }

    /// Sends the rest of a machine that has stopped. Returns its migration, if it is one.
    fn send(&mut self, machine: Running<'_>, state: &State) -> Result<Option<Committed>> {
        let Running { hello, vm, .. } = machine;
        match &self.request.target {
            Target::File(path) => file::write(path, hello, vm.memory(), state).map(|()| None),
            Target::Socket(path, _) => {
                let source = self.source.take().context("there is no copy")?;
                let committed = source.finish(vm.memory(), state);
                committed.map(Some).with_context(|| format!("cannot migrate to {}", path.display()))
            }
        }
    }
}

impl Drop for Departure<'_> {
    fn drop(&mut self) {
        if let Some(thread) = self.copying.take() {
            self.request.cancel.cancel();
            let _ = thread.join();
        }
    }
}

/// Reports that the machine does not leave.
fn stays(hello: &Hello, error: &Error) {
    eprintln!("{}: {error:#}; the machine goes on", hello.name);
}
