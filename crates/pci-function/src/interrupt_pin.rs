//! The interrupt pin of a function.

use crate::InterruptSink;

/// When a function asserts its interrupt pin (PCI Local Bus 3.0, sections 2.2.6 and 6.2.2). What causes an interrupt,
/// and until when, is the function's affair.
#[derive(Debug)]
pub struct InterruptPin {
    /// The function has one.
    present: bool,
    msix: bool,
    /// Interrupt Disable of the command register.
    disabled: bool,
    /// Level that the sink was told last.
    asserted: bool,
}

impl InterruptPin {
    /// As after power-on. `present` tells whether the function has a pin.
    pub const fn new(present: bool) -> Self {
        Self { present, msix: false, disabled: false, asserted: false }
    }

    /// Returns `true` if interrupts are messages: MSI-X is enabled.
    #[inline]
    pub const fn is_msix(&self) -> bool {
        self.msix
    }

    /// MSI-X Enable. [`Self::update`] is to follow.
    pub const fn set_msix(&mut self, enabled: bool) {
        self.msix = enabled;
    }

    /// Interrupt Disable. [`Self::update`] is to follow.
    pub const fn set_disabled(&mut self, disabled: bool) {
        self.disabled = disabled;
    }

    /// Interrupt Status of the status register, while there is a cause or none.
    pub const fn is_pending(&self, cause: bool) -> bool {
        self.present && cause
    }

    /// Tells the sink the level that follows from there being a cause or none, if it has changed.
    pub fn update(&mut self, cause: bool, sink: &dyn InterruptSink) {
        let level = self.is_pending(cause) && !self.msix && !self.disabled;
        if level != self.asserted {
            self.asserted = level;
            sink.intx(level);
        }
    }
}
