//! Parameters of captures.

/// Place where a frame was captured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Interface {
    /// On the device's uplink.
    Uplink,
    /// Between devices of this process; the frame is the packet that would have been on the wire.
    Local,
}

/// Direction of a frame, relative to the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// To the device.
    Inbound,
    /// From the device.
    Outbound,
}

/// Limits of a capture.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct CaptureConfig {
    /// Maximum number of bytes that are kept of a frame.
    pub snaplen: usize,
    /// Maximum number of bytes that wait for the reader.
    pub buffer: usize,
}

impl CaptureConfig {
    /// Creates a configuration from its limits, both in bytes.
    pub const fn new(snaplen: usize, buffer: usize) -> Self {
        Self { snaplen, buffer }
    }
}
