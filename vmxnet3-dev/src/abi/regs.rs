//! PCI identity and registers.

/// PCI vendor ID of VMware.
pub(crate) const VENDOR_ID: u16 = 0x15ad;
/// PCI device ID of vmxnet3.
pub(crate) const DEVICE_ID: u16 = 0x07b0;
/// PCI revision ID of the function.
pub(crate) const REVISION_ID: u8 = 1;
/// Programming interface, subclass and base class: an Ethernet controller.
pub(crate) const CLASS: [u8; 3] = [0, 0, 2];

/// Revisions of the interface that the device supports, one bit each: 1, 2 and 3.
pub(crate) const REVISIONS: u32 = 0b111;
/// Versions of UPT that the device supports: 1.
pub(crate) const UPT_VERSIONS: u32 = 1;

/// Maximum number of queues per direction.
pub(crate) const MAX_QUEUES: u8 = 8;
/// Maximum number of interrupt vectors.
pub(crate) const MAX_VECTORS: u16 = 25;

/// BAR 0: registers of the data path, one every eight bytes.
pub(crate) mod queue {
    /// Interrupt mask of vector 0.
    pub(crate) const INTERRUPT_MASK: u64 = 0x000;
    /// Producer index of transmit queue 0.
    pub(crate) const TX_PRODUCER: u64 = 0x600;
    /// Producer index of ring 1 of receive queue 0.
    pub(crate) const RX_PRODUCER: u64 = 0x800;
    /// Producer index of ring 2 of receive queue 0.
    pub(crate) const RX_PRODUCER_2: u64 = 0xa00;
    /// Distance between two registers, in bytes.
    pub(crate) const STRIDE: u64 = 8;
}

/// BAR 1: the control plane.
pub(crate) mod control {
    /// Supported revisions (read) and the chosen one (write).
    pub(crate) const REVISION: u64 = 0x00;
    /// Supported UPT versions (read) and the chosen one (write).
    pub(crate) const UPT_VERSION: u64 = 0x08;
    /// Bus address of the shared area, low half.
    pub(crate) const SHARED_LOW: u64 = 0x10;
    /// Bus address of the shared area, high half.
    pub(crate) const SHARED_HIGH: u64 = 0x18;
    /// Command (write) and its result (read).
    pub(crate) const COMMAND: u64 = 0x20;
    /// Current MAC address, first four bytes.
    pub(crate) const MAC_LOW: u64 = 0x28;
    /// Current MAC address, last two bytes.
    pub(crate) const MAC_HIGH: u64 = 0x30;
    /// Cause of a legacy interrupt; reading clears it.
    pub(crate) const INTERRUPT_CAUSE: u64 = 0x38;
    /// Events to acknowledge.
    pub(crate) const EVENT_CAUSE: u64 = 0x40;
}

/// Events (`ecr` of the shared area).
pub(crate) mod event {
    /// A receive queue has stopped.
    pub(crate) const RX_QUEUE: u32 = 1 << 0;
    /// A transmit queue has stopped.
    pub(crate) const TX_QUEUE: u32 = 1 << 1;
    /// The link state has changed.
    pub(crate) const LINK: u32 = 1 << 2;
}
