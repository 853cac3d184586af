//! The traits between a PCI function and its VMM: this is the whole face of a device towards its host.

/// One base address register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bar {
    /// Bytes, a power of two.
    pub size: u64,
    /// `true` if it takes two register slots.
    pub is_64bit: bool,
}

/// A PCI function as a VMM drives it.
///
/// Accesses never fail: what the function does not know reads as zero and ignores writes, whatever its size. Every call
/// returns in bounded time. Calls may come from several threads.
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

    /// Number of MSI-X vectors.
    fn msix_vectors(&self) -> u16;

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
