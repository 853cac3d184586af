//! Doorbells that are caught without stopping the guest's processor.

use std::io;
use std::sync::Arc;

use log::debug;
use pvrdma_pci_function::Doorbell;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Signals an eventfd when the guest writes to an address, without stopping its processor: KVM's ioeventfds.
pub trait DoorbellCatcher: Send + Sync {
    /// Signals `event` from now on when the guest writes to the address; with `value`, only when it writes these 32
    /// bits.
    ///
    /// # Errors
    /// There are too many, or the system refuses. Such writes trap, as before.
    fn catch(&self, address: u64, value: Option<u32>, event: &EventFd) -> io::Result<()>;

    /// Ends the effect of [`Self::catch`].
    ///
    /// # Errors
    /// The doorbell was not caught.
    fn release(&self, address: u64, value: Option<u32>, event: &EventFd) -> io::Result<()>;
}

/// A doorbell that can be caught.
pub(crate) struct Bell {
    pub(crate) function: usize,
    pub(crate) doorbell: Doorbell,
    pub(crate) event: EventFd,
    /// Address at which it is caught now.
    address: Option<u64>,
}

/// The doorbells of a slot, and the catcher that they use.
#[derive(Default)]
pub(crate) struct Bells {
    catcher: Option<Arc<dyn DoorbellCatcher>>,
    pub(crate) list: Vec<Bell>,
}

impl Bells {
    /// Creates the set. No doorbell is caught yet.
    pub(crate) fn new(
        catcher: Arc<dyn DoorbellCatcher>,
        doorbells: impl Iterator<Item = (usize, Doorbell)>,
    ) -> io::Result<Self> {
        let bell =
            |(function, doorbell)| Ok(Bell { function, doorbell, event: EventFd::new(EFD_NONBLOCK)?, address: None });
        Ok(Self { catcher: Some(catcher), list: doorbells.map(bell).collect::<io::Result<_>>()? })
    }

    /// Catches the doorbells of a function at their current addresses. `place` maps a BAR and an offset to an address.
    pub(crate) fn follow(&mut self, function: usize, place: impl Fn(usize, u64) -> Option<u64>) {
        let Some(catcher) = &self.catcher else { return };
        for bell in self.list.iter_mut().filter(|bell| bell.function == function) {
            let Doorbell { bar, offset, value } = bell.doorbell;
            let wanted = place(bar, offset);
            if wanted == bell.address {
                continue;
            }
            if let Some(address) = bell.address.take()
                && let Err(error) = catcher.release(address, value, &bell.event)
            {
                debug!("doorbell at {address:#x}: {error}");
            }
            let Some(address) = wanted else { continue };
            match catcher.catch(address, value, &bell.event) {
                Ok(()) => bell.address = wanted,
                // Without the catcher the write traps, which works as before.
                Err(error) => debug!("doorbell at {address:#x}: {error}"),
            }
        }
    }
}

impl Drop for Bells {
    fn drop(&mut self) {
        for function in 0..8 {
            self.follow(function, |_, _| None);
        }
    }
}
