//! A guest's machine: a device and its environment, with doorbells that are trapped or mapped.

use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_dev::testing::{Driver, MappedPages, TestDevice};
use pvrdma_link::Clock;
use pvrdma_pci_function::PciFunction;
use pvrdma_rxe::Rxe;
use pvrdmad::testing::Dice;

/// A machine. Its driver can be started again and again.
pub(crate) struct Machine {
    pub(crate) test: TestDevice<Rxe>,
    /// Doorbell pages of the guest's processes, if they are mapped.
    pages: Option<Arc<MappedPages>>,
}

impl Machine {
    /// Creates a machine with trapped doorbells: each one is a message.
    pub(crate) const fn trapping(test: TestDevice<Rxe>) -> Self {
        Self { test, pages: None }
    }

    /// Creates a machine with mapped doorbells, which `watcher` polls.
    pub(crate) fn mapped(test: TestDevice<Rxe>, watcher: &Watcher) -> Self {
        let pages = MappedPages::new(&test.device);
        watcher.add(&pages);
        Self { test, pages: Some(pages) }
    }

    /// Probes the device as the kernel driver does.
    pub(crate) fn driver(&self) -> Driver {
        let function = match &self.pages {
            Some(pages) => Arc::clone(pages) as Arc<dyn PciFunction>,
            None => self.test.function(),
        };
        Driver::probe(function, &self.test.memory, &self.test.irqs).unwrap()
    }
}

/// Polls the rings of machines with mapped doorbells.
pub(crate) struct Watcher {
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
}

struct State {
    pages: Vec<Arc<MappedPages>>,
    dice: Dice,
}

impl Watcher {
    /// Creates a watcher without machines.
    pub(crate) fn new(clock: Arc<dyn Clock>, dice: Dice) -> Self {
        Self { clock, state: Mutex::new(State { pages: Vec::new(), dice }) }
    }

    fn add(&self, pages: &Arc<MappedPages>) {
        self.state.lock().pages.push(Arc::clone(pages));
    }

    /// Visits each machine once. A random choice decides whether it polls, goes idle, or takes the pages away. Returns
    /// the number of rings with new work.
    pub(crate) fn look(&self) -> u32 {
        let State { pages, dice } = &mut *self.state.lock();
        let now = u64::try_from(self.clock.now().as_nanos()).unwrap();
        let looks = pages.iter().map(|pages| {
            pages.advance(now.saturating_sub(pages.now()));
            match dice.below(8) {
                0 => pages.idle(),
                1 => pages.rest(),
                _ => pages.pass(),
            }
        });
        looks.map(|outcome| outcome.moved).sum()
    }
}
