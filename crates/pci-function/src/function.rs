//! The traits between a PCI function and its VMM: the complete interface of a device towards its host.

use crate::StateError;
use crate::doorbell_window::DoorbellPages;
#[cfg(doc)]
use crate::doorbell_window::DoorbellWindow;
use crate::outline::Outline;

/// One base address register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bar {
    /// Size in bytes, a power of two.
    pub size: u64,
    /// `true` for a 64-bit BAR, which takes two register slots.
    pub is_64bit: bool,
}

/// Location of the MSI-X capability, the table and the pending bits. The VMM implements table and pending bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MsixPlace {
    /// Offset of the capability in configuration space.
    pub capability: u8,
    /// Number of vectors, 1 to 2,048.
    pub vectors: u16,
    /// BAR of table and pending bits, 0 to 5.
    pub bar: u8,
    /// Offset of the table in the BAR, in bytes: a multiple of eight.
    pub table: u32,
    /// Offset of the pending bits in the BAR, in bytes: a multiple of eight.
    pub pending: u32,
}

/// A register whose writes only notify the function. A VMM may let the guest continue at once, and forward the write
/// later, from any thread, and once for several writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Doorbell {
    /// BAR of the register, 0 to 5.
    pub bar: usize,
    /// Offset of the register in the BAR, in bytes.
    pub offset: u64,
    /// The only 32-bit value for which a write is a doorbell. `None`: the written value is ignored.
    pub value: Option<u32>,
}

/// A PCI function as a VMM drives it.
///
/// Accesses never fail: an unknown register reads as zero and ignores writes, at any access size. Every call returns in
/// bounded time. Calls may come from several threads.
///
/// A VMM has four duties: it decodes the BARs only while Memory Space Enable of the command register is set, calls
/// [`Self::run_deferred`] after each write to a BAR, calls [`Self::reset`] when the machine is reset, and never calls
/// back into the function from its [`InterruptSink`]. The crate `pvrdma-pci-slot` does all but the reset.
pub trait PciFunction: Send + Sync {
    /// Base address registers by index.
    fn bars(&self) -> [Option<Bar>; 6];

    /// Size of configuration space in bytes.
    fn config_size(&self) -> usize;

    /// Reads configuration space.
    fn config_read(&self, offset: usize, data: &mut [u8]);

    /// Writes configuration space. If this clears Bus Master Enable, all DMA and interrupts have stopped when it
    /// returns.
    fn config_write(&self, offset: usize, data: &[u8]);

    /// Reads from a BAR.
    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]);

    /// Writes to a BAR. Registers have taken effect when this returns; doorbells may leave work behind, see
    /// [`Self::run_deferred`].
    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]);

    /// Does a bounded amount of the work that doorbells left behind. The VMM calls it after the guest's write has
    /// completed, so that the guest's processor does not wait for its own transfer.
    fn run_deferred(&self);

    /// Location of MSI-X, if the function has it. Never changes.
    fn msix(&self) -> Option<MsixPlace>;

    /// Doorbells that are known before a guest runs. Never changes. A VMM that ignores them and uses
    /// [`Self::bar_write`] only loses speed.
    fn doorbells(&self) -> Vec<Doorbell> {
        Vec::new()
    }

    /// Doorbell pages that may temporarily be memory, if the function has any: see [`DoorbellWindow`]. Never changes.
    fn doorbell_window(&self) -> Option<DoorbellPages> {
        None
    }

    /// Number of the BAR whose writes can change the [`Outline`]. Never changes.
    fn outline_bar(&self) -> Option<usize> {
        None
    }

    /// Outline of the function as it is now. `None`: the function cannot be recovered.
    fn outline(&self) -> Option<Outline> {
        None
    }

    /// Resets the function, restores configuration space from the outline of another instance whose process has
    /// crashed, and tells the driver that was active there, if there was one, that the device has failed. The function
    /// is in reset afterwards, until a driver starts it again. Guest memory is mapped already.
    ///
    /// The outline and guest memory are untrusted.
    ///
    /// # Errors
    /// The function is in reset, but the driver could not be told.
    fn recover(&self, _: &Outline) -> Result<(), StateError> {
        Err("the function cannot be recovered".into())
    }

    /// Returns to the power-on state. There is no DMA and no interrupt after this returns.
    fn reset(&self);
}

/// Receiver of a function's interrupts.
pub trait InterruptSink: Send + Sync {
    /// Raises an MSI-X vector. The VMM implements the per-vector mask.
    fn msix(&self, vector: u16);

    /// Sets the level of the legacy interrupt line.
    fn intx(&self, asserted: bool);
}
