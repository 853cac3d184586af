//! Recovery of a device whose process has crashed.
//!
//! All objects are lost. The device is in reset, with the configuration space of its VM. An active driver does not know
//! that, so it is told by the asynchronous event DEVICE_FATAL (section 10). Its event ring is found as by a handshake:
//! from the shared region to the page directory of the ring. The position in the ring was in the memory of the process
//! and is lost; the copy in the guest's memory is used in its place. The guest can change all of this, so it is checked
//! like everything that a guest writes, and a guest with invalid addresses is not notified.

use pvrdma_guest_memory::DmaError;
use pvrdma_pci_function::{CONFIG_SIZE, Outline, Switches};
use pvrdma_verbs::{Hca, QueueError};
use thiserror::Error;

use crate::abi::ring::{Eqe, eqe};
use crate::control::{Control, State};
use crate::device::PvrdmaDevice;
use crate::dsr;
use crate::error::HandshakeError;
use crate::events;
use crate::intr::Vector;
use crate::ring::RingShapeError;
use crate::stats::RecoveryStatus;

/// Reason why the driver is not told that the device has failed.
#[derive(Debug, Error)]
pub(crate) enum RecoverError {
    /// The outline is that of another device.
    #[error("configuration space is that of another device")]
    Config,
    /// The shared region, or the ring, cannot be read.
    #[error(transparent)]
    Region(#[from] HandshakeError),
    /// The ring does not fit its pages, or the position is not one of the ring.
    #[error("asynchronous event ring: {0}")]
    Shape(#[from] RingShapeError),
    /// The state page of the ring cannot be read.
    #[error("asynchronous event ring: {0}")]
    Memory(#[from] DmaError),
    /// The consumer's index is invalid.
    #[error("asynchronous event ring: {0}")]
    Index(#[from] QueueError),
    /// The driver has not consumed its events.
    #[error("asynchronous event ring: it is full")]
    Full,
}

impl<H: Hca> PvrdmaDevice<H> {
    /// Writes configuration space as a whole, and applies it. Returns the settings, or `None` if it is that of another
    /// function; nothing has changed then.
    pub(crate) fn load_config_space(&self, bytes: &[u8]) -> Option<Switches> {
        let mut pci = self.pci.lock();
        let mut identity = [0; 4];
        pci.read(0, &mut identity, false);
        if bytes.len() != CONFIG_SIZE || !bytes.starts_with(&identity) {
            return None;
        }
        let before = pci.switches();
        pci.write(0, bytes);
        self.apply_command_register(before, pci.switches());
        Some(pci.switches())
    }

    pub(crate) fn read_outline(&self) -> Outline {
        self.outline_of(&self.control.lock())
    }

    fn outline_of(&self, control: &Control) -> Outline {
        let restored = control.restored.as_deref();
        let session = match (&control.state, restored.and_then(|restored| restored.session.as_ref())) {
            (State::Active(session), _) | (_, Some((session, _, true))) => Some(session),
            _ => None,
        };
        let mask = restored.map_or_else(|| self.core().interrupts.mask(), |restored| restored.interrupts.mask);
        let mut outline = Outline {
            config: [0; CONFIG_SIZE],
            interrupt_mask: mask,
            shared_region: session.map_or(0, |session| session.shared_region),
        };
        self.pci.lock().read(0, &mut outline.config, false);
        outline
    }

    pub(crate) fn recover_from(&self, outline: &Outline) -> Result<(), RecoverError> {
        self.recover_locked(&mut self.control.lock(), outline)
    }

    /// Makes the device fail as a crash of its process does: all objects are lost, the device is in reset, and an
    /// active driver is told by DEVICE_FATAL. Waits for the command in progress. A device that is paused fails when the
    /// pause ends, because the memory and the state of a paused device may be copied.
    pub fn fail(&self) {
        let mut control = self.control.lock();
        if self.core().is_paused() {
            control.fails = true;
        } else {
            self.fail_locked(&mut control);
        }
    }

    /// As [`Self::fail`], for a device that is not paused.
    pub(crate) fn fail_locked(&self, control: &mut Control) {
        let outline = self.outline_of(control);
        let log = &self.core().log;
        match self.recover_locked(control, &outline) {
            Ok(()) => log.warn(module_path!(), format_args!("failed on request")),
            Err(error) => log.warn(module_path!(), format_args!("failed on request; the driver is not told: {error}")),
        }
    }

    fn recover_locked(&self, control: &mut Control, outline: &Outline) -> Result<(), RecoverError> {
        self.power_on(control);
        let told = self.tell_driver(outline);
        let problem = told.as_ref().err().map(RecoverError::to_string);
        *self.recovery.lock() = Some(RecoveryStatus { told: problem.is_none(), problem });
        self.publish_phase(control);
        told
    }

    /// Restores configuration space, and posts DEVICE_FATAL if a driver was active.
    fn tell_driver(&self, outline: &Outline) -> Result<(), RecoverError> {
        let core = self.core();
        self.load_config_space(&outline.config).ok_or(RecoverError::Config)?;
        if outline.shared_region == 0 {
            return Ok(());
        }
        let view = core.memory.view();
        let mut ring = events::asynchronous_ring(dsr::asynchronous_pages(&view, outline.shared_region)?)?;
        let tail = ring.words().producer_index(&view)?;
        ring = ring.at(tail)?;
        let event = Eqe { kind: eqe::DEVICE_FATAL, info: 0 };
        if !ring.push(&view, &event.to_bytes())? {
            return Err(RecoverError::Full);
        }
        drop(view);
        core.interrupts.set_mask(outline.interrupt_mask);
        core.interrupts.raise(Vector::Async);
        // The device is in reset, so its interrupts are left as CTL=RESET leaves them.
        core.interrupts.reset();
        Ok(())
    }
}
