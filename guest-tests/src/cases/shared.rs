//! Machines shared by several cases: booted by the first one that runs, dropped with the last.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};

use super::case::{Case, Skipped};
use super::kernel_log;
use super::runner::causes;
use crate::image::GuestImage;
use crate::vm::Vm;

/// Machines that can be shared.
pub(crate) trait Machines: 'static {
    /// The guests.
    fn vms(&self) -> [&Vm; 2];

    /// Returns information that helps to understand a failure, in addition to the output of programs and guests.
    fn diagnosis(&self) -> String;

    /// Returns `true` if the host under them has broken down, so that a failure is not the test's.
    fn are_lost(&self) -> bool {
        false
    }
}

/// Maximum number of attempts of a test whose host breaks down, as a machine that emulates virtualisation sometimes
/// does.
const ATTEMPTS: u32 = 3;
/// Log message of such a failure.
const LOST: &str = "the host has broken down, it is booted once more";

/// Starts machines and brings everything up.
type Boot<M> = Box<dyn Fn(&GuestImage) -> Result<M>>;

/// Machines that are started on first use.
pub(crate) struct Shared<M> {
    boot: Boot<M>,
    machines: RefCell<Option<M>>,
    boot_failures: Cell<u32>,
}

impl<M: Machines> Shared<M> {
    /// Creates it without machines. `boot` starts them.
    pub(crate) fn new(boot: impl Fn(&GuestImage) -> Result<M> + 'static) -> Rc<Self> {
        Rc::new(Self { boot: Box::new(boot), machines: RefCell::new(None), boot_failures: Cell::new(0) })
    }

    /// A case in these machines.
    pub(crate) fn case(self: &Rc<Self>, name: impl Into<String>, run: impl Fn(&M) -> Result<String> + 'static) -> Case {
        let shared = Rc::clone(self);
        Case::alone(name, move |image| shared.run(image, &run))
    }

    /// Returns the case that ends these machines: it checks the logs itself, and the machines are dropped with it.
    pub(crate) fn last_case(
        self: &Rc<Self>,
        name: impl Into<String>,
        run: impl Fn(&mut M) -> Result<String> + 'static,
    ) -> Case {
        let shared = Rc::clone(self);
        Case::alone(name, move |image| {
            let kept = shared.machines.borrow_mut().take();
            let mut machines = kept.map_or_else(|| shared.start(image), Ok)?;
            for _ in 1..ATTEMPTS {
                match run(&mut machines) {
                    Err(error) if machines.are_lost() => log::warn!("{LOST}: {}", causes(&error)),
                    result => return result.with_context(|| machines.diagnosis()),
                }
                machines = shared.start(image)?;
            }
            run(&mut machines).with_context(|| machines.diagnosis())
        })
    }

    fn run(&self, image: &GuestImage, run: &dyn Fn(&M) -> Result<String>) -> Result<String> {
        let mut slot = self.machines.borrow_mut();
        let mut attempts = 1..ATTEMPTS;
        let (machines, error) = loop {
            let machines = match slot.take() {
                Some(machines) => machines,
                None => self.start(image)?,
            };
            let machines = slot.insert(machines);
            match judge(machines, run) {
                Err(error) if machines.are_lost() && attempts.next().is_some() => {
                    log::warn!("{LOST}: {}", causes(&error));
                    *slot = None;
                }
                Err(error) => break (machines, error),
                passed => return passed,
            }
        };
        let mut text = machines.diagnosis();
        let broken: Vec<String> = machines.vms().into_iter().filter(|vm| !is_healthy(vm)).map(Vm::diagnosis).collect();
        // A guest that no longer answers must not fail the other cases as well.
        if !broken.is_empty() {
            text = format!("{text}\n{}\nthe guests are replaced", broken.join("\n"));
            *slot = None;
        }
        // The error stays the root cause, because the summary prints its last line.
        Err(error.context(text))
    }

    fn start(&self, image: &GuestImage) -> Result<M> {
        // Guests that do not come up fail every case. A second attempt rules out a sporadic failure.
        if self.boot_failures.get() >= 2 {
            return Err(anyhow!("not run: the guests cannot be booted, see above"));
        }
        for _ in 1..ATTEMPTS {
            let booted = self.boot(image)?;
            match check_logs(&booted).context("at boot") {
                Err(error) if booted.are_lost() => log::warn!("{LOST}: {}", causes(&error)),
                checked => return checked.map(|()| booted),
            }
        }
        self.boot(image)
    }

    fn boot(&self, image: &GuestImage) -> Result<M> {
        (self.boot)(image).inspect_err(|error| {
            // A case that cannot run here has not failed.
            if error.downcast_ref::<Skipped>().is_none() {
                self.boot_failures.set(self.boot_failures.get() + 1);
            }
        })
    }
}

/// Runs a case, ends all programs and checks the kernel logs.
fn judge<M: Machines>(machines: &M, run: &dyn Fn(&M) -> Result<String>) -> Result<String> {
    let result = run(machines);
    for vm in machines.vms() {
        if vm.is_running() {
            vm.kill_jobs()?;
        }
    }
    let note = result?;
    check_logs(machines)?;
    Ok(note)
}

fn check_logs<M: Machines>(machines: &M) -> Result<()> {
    for vm in machines.vms() {
        kernel_log::check(vm)?;
    }
    Ok(())
}

fn is_healthy(vm: &Vm) -> bool {
    // The log is cleared, so that its messages are not attributed to the next case.
    vm.is_running() && vm.exec("dmesg --clear", Duration::from_secs(15)).is_ok_and(|output| output.code == 0)
}
