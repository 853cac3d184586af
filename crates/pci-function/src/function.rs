//! The traits between a PCI function and its VMM: this is the whole face of a device towards its host.

use crate::doorbell_window::DoorbellPages;
#[cfg(doc)]
use crate::doorbell_window::DoorbellWindow;

/// One base address register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bar {
    /// Bytes, a power of two.
    pub size: u64,
    /// `true` if it takes two register slots.
    pub is_64bit: bool,
}

/// Where the MSI-X capability, the table and the pending bits are. The VMM keeps the last two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MsixPlace {
    /// Where in configuration space the capability is.
    pub capability: u8,
    /// Number of vectors, 1 to 2,048.
    pub vectors: u16,
    /// BAR of table and pending bits, 0 to 5.
    pub bar: u8,
    /// Where in the BAR the table starts, in bytes: a multiple of eight.
    pub table: u32,
    /// Where in the BAR the pending bits start, in bytes: a multiple of eight.
    pub pending: u32,
}

/// A register whose writes only say "look here". A VMM may let the guest go on at once and pass them on later, from any
/// thread, and once for several.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Doorbell {
    /// BAR of the register, 0 to 5.
    pub bar: usize,
    /// Where in the BAR it is, in bytes.
    pub offset: u64,
    /// The only value of 32 bits whose writes are meant; none: what is written does not matter.
    pub value: Option<u32>,
}

/// A PCI function as a VMM drives it.
///
/// Accesses never fail: what the function does not know reads as zero and ignores writes, whatever its size. Every call
/// returns in bounded time. Calls may come from several threads.
///
/// A VMM has four duties: it decides by Memory Space Enable of the command register whether the BARs answer, calls
/// [`Self::run_deferred`] after each write to a BAR, calls [`Self::reset`] when the machine is reset, and never calls
/// back into the function from its [`InterruptSink`]. The crate `pvrdma-pci-slot` does all but the reset.
pub trait PciFunction: Send + Sync {
    /// The base address registers by index.
    fn bars(&self) -> [Option<Bar>; 6];

    /// Bytes of configuration space.
    fn config_size(&self) -> usize;

    /// Reads configuration space.
    fn config_read(&self, offset: usize, data: &mut [u8]);

    /// Writes configuration space. A cleared Bus Master Enable has stopped all DMA and interrupts when this returns.
    fn config_write(&self, offset: usize, data: &[u8]);

    /// Reads from a BAR.
    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]);

    /// Writes to a BAR. Registers have taken effect when this returns; doorbells may have left work behind, see
    /// [`Self::run_deferred`].
    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]);

    /// Does a bounded amount of the work that doorbells left behind. Call it after the guest's write has completed,
    /// so that the guest's processor does not wait for its own transfer.
    fn run_deferred(&self);

    /// Its MSI-X vectors, if it has any. Never changes.
    fn msix(&self) -> Option<MsixPlace>;

    /// Its doorbells, as far as they can be known before there is a guest. Never changes. Whoever leaves them to
    /// [`Self::bar_write`] loses nothing but time.
    fn doorbells(&self) -> Vec<Doorbell> {
        Vec::new()
    }

    /// Its pages of doorbells that may be memory at times, if it has any: see [`DoorbellWindow`]. Never changes.
    fn doorbell_window(&self) -> Option<DoorbellPages> {
        None
    }

    /// Back to power-on state. No DMA and no interrupt after this returns.
    fn reset(&self);
}

/// Where interrupts go.
pub trait InterruptSink: Send + Sync {
    /// Raises an MSI-X vector. Masking per vector is the VMM's business.
    fn msix(&self, vector: u16);

    /// Sets the level of the legacy interrupt line.
    fn intx(&self, asserted: bool);
}
