//! The interrupt pin of a function.

use crate::InterruptSink;

/// State of the interrupt pin, which decides when the pin is asserted (PCI Local Bus 3.0, sections 2.2.6 and 6.2.2).
/// The function itself defines the causes of its interrupts, and when a cause ends.
#[derive(Debug)]
pub struct InterruptPin {
    /// The function has a pin.
    present: bool,
    msix: bool,
    /// Interrupt Disable of the command register.
    disabled: bool,
    /// Level last reported to the sink.
    asserted: bool,
}

impl InterruptPin {
    /// Creates the pin in its power-on state. `present` tells whether the function has a pin.
    pub const fn new(present: bool) -> Self {
        Self { present, msix: false, disabled: false, asserted: false }
    }

    /// Returns `true` if interrupts are sent as messages: MSI-X is enabled.
    #[inline]
    pub const fn is_msix(&self) -> bool {
        self.msix
    }

    /// Sets MSI-X Enable. The caller must call [`Self::update`] afterwards.
    pub const fn set_msix(&mut self, enabled: bool) {
        self.msix = enabled;
    }

    /// Sets Interrupt Disable. The caller must call [`Self::update`] afterwards.
    pub const fn set_disabled(&mut self, disabled: bool) {
        self.disabled = disabled;
    }

    /// Value of Interrupt Status in the status register, given whether there is a cause.
    pub const fn is_pending(&self, cause: bool) -> bool {
        self.present && cause
    }

    /// Reports the level to the sink if it has changed, given whether there is a cause.
    pub fn update(&mut self, cause: bool, sink: &dyn InterruptSink) {
        let level = self.is_pending(cause) && !self.msix && !self.disabled;
        if level != self.asserted {
            self.asserted = level;
            sink.intx(level);
        }
    }
}
