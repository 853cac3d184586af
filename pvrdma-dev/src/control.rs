//! State behind the registers.

use pvrdma_packet::MacAddr;
use pvrdma_pages::PageList;

use crate::dsr::Session;
use crate::events::EventRings;
use crate::intr::SavedInterrupts;
use crate::stats::Phase;

/// State behind the registers.
#[derive(Debug)]
pub(crate) struct Control {
    /// Phase of the driver, with the state of that phase.
    pub(crate) state: State,
    /// Register DSRLOW.
    pub(crate) dsr_low: u32,
    /// Register ERR.
    pub(crate) err: u32,
    /// Registers MACL and MACH.
    pub(crate) mac: [u32; 2],
    /// A state that was read and takes effect when the restore is finished.
    pub(crate) restored: Option<Box<Restored>>,
    /// Value of [`SaveHca::twins`](pvrdma_verbs::SaveHca::twins) when the state was saved, until the device resumes.
    pub(crate) twins: Option<u64>,
    /// The device fails when its pause ends.
    pub(crate) fails: bool,
}

#[derive(Debug)]
pub(crate) enum State {
    /// No shared region is installed.
    Reset,
    /// The shared region was accepted. The rings are kept here, so that nothing can write to them before ACTIVATE.
    Ready(Session, Box<EventRings>),
    /// Commands are served.
    Active(Session),
}

impl Control {
    /// Creates the power-on state.
    pub(crate) fn new(MacAddr([a, b, c, d, e, f]): MacAddr) -> Self {
        let mac = [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, 0, 0])];
        Self { state: State::Reset, dsr_low: 0, err: 0, mac, restored: None, twins: None, fails: false }
    }

    /// Returns the phase of the driver.
    pub(crate) const fn phase(&self) -> Phase {
        match self.state {
            State::Reset => Phase::Reset,
            State::Ready(..) => Phase::Handshake,
            State::Active(_) => Phase::Active,
        }
    }
}

/// State that was read, and takes effect when the restore is finished.
#[derive(Debug)]
pub(crate) struct Restored {
    /// The session with its event rings, and `true` if it is active. `None`: the device is in reset.
    pub(crate) session: Option<(Session, EventRings, bool)>,
    /// Registers of the interrupts.
    pub(crate) interrupts: SavedInterrupts,
    /// Pages of all rings.
    pub(crate) rings: Vec<PageList>,
}

/// Treatment of the connections of a restored device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Connections {
    /// They continue: all devices of the network move at the same moment.
    Keep,
    /// They continue on the network if the state is that of a live migration. Otherwise they end.
    MoveOrEnd,
}
