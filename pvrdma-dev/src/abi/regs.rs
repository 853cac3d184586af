//! Registers (BAR 1, section 2.1), doorbells (BAR 2, section 7) and the function's identity (section 1).

/// PCI vendor id.
pub(crate) const VENDOR_ID: u16 = 0x15ad;
/// PCI device id.
pub(crate) const DEVICE_ID: u16 = 0x0820;
/// PCI class code: network controller, other.
pub(crate) const CLASS: [u8; 3] = [0x00, 0x80, 0x02];

/// Oldest device version a driver accepts.
pub(crate) const VERSION_MIN: u32 = 17;
/// First version with RoCE v2.
pub(crate) const VERSION_ROCE_V2: u32 = 18;
/// First version whose CREATE_QP response has separate fields for the QP's handle and its QPN; also the newest.
pub(crate) const VERSION_QP_HANDLE: u32 = 20;

/// Offsets of the registers.
pub(crate) mod offset {
    /// Device version; read only.
    pub(crate) const VERSION: u64 = 0x00;
    /// Low half of the DSR address; write only.
    pub(crate) const DSR_LOW: u64 = 0x04;
    /// High half of the DSR address, starts the handshake; write only.
    pub(crate) const DSR_HIGH: u64 = 0x08;
    /// Device control; write only.
    pub(crate) const CTL: u64 = 0x0c;
    /// Executes the command slot; write only.
    pub(crate) const REQUEST: u64 = 0x10;
    /// Result of the last CTL or REQUEST write; read only.
    pub(crate) const ERR: u64 = 0x14;
    /// Interrupt cause, cleared by reading; read only.
    pub(crate) const ICR: u64 = 0x18;
    /// Interrupt mask.
    pub(crate) const IMR: u64 = 0x1c;
    /// Ethernet address, first four bytes.
    pub(crate) const MAC_LOW: u64 = 0x20;
    /// Ethernet address, last two bytes.
    pub(crate) const MAC_HIGH: u64 = 0x24;
}

/// Values of the CTL register.
pub(crate) mod ctl {
    /// Starts the device.
    pub(crate) const ACTIVATE: u32 = 0;
    /// The paired network function is up.
    pub(crate) const UNQUIESCE: u32 = 1;
    /// Stops the device and destroys all state.
    pub(crate) const RESET: u32 = 2;
}

/// Doorbells: offsets in a UAR page and bits of the value.
pub(crate) mod uar {
    /// Queue pair doorbell.
    pub(crate) const QP: u64 = 0;
    /// Completion queue doorbell.
    pub(crate) const CQ: u64 = 4;
    /// Shared receive queue doorbell.
    pub(crate) const SRQ: u64 = 8;
    /// The handle in a doorbell value.
    pub(crate) const HANDLE_MASK: u32 = 0x00ff_ffff;
    /// Sends were posted.
    pub(crate) const QP_SEND: u32 = 1 << 30;
    /// Receives were posted.
    pub(crate) const QP_RECV: u32 = 1 << 31;
    /// Notify of the next solicited completion.
    pub(crate) const CQ_ARM_SOL: u32 = 1 << 29;
    /// Notify of the next completion.
    pub(crate) const CQ_ARM: u32 = 1 << 30;
    /// An empty queue was polled.
    pub(crate) const CQ_POLL: u32 = 1 << 31;
    /// Receives were posted to a shared queue.
    pub(crate) const SRQ_RECV: u32 = 1 << 30;
}
