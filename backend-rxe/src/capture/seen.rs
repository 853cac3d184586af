//! What is kept of a frame that was seen.

/// Where a frame was seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Interface {
    /// On the device's uplink.
    Uplink,
    /// Between devices of this process; the frame is what would have been on the wire.
    Local,
}

/// Which way a frame went, seen from the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// Towards the device.
    Inbound,
    /// Away from it.
    Outbound,
}

/// How much is kept of what is seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CaptureConfig {
    /// Bytes of a frame that are kept.
    pub snaplen: usize,
    /// Bytes that wait for the reader at most.
    pub buffer: usize,
}
