//! How a device is set up.

use pvrdma_packet::MacAddr;

/// How a device is set up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Vmxnet3Config {
    /// Name in logs and status.
    pub name: String,
    /// Burnt-in MAC address. The guest may choose another.
    pub mac: MacAddr,
    /// Number of MSI-X vectors, 3 to 25. A driver with a vector for each pair of queues wants one more than pairs.
    pub vectors: u16,
    /// Whether the function has a legacy interrupt pin.
    pub intx: bool,
    /// Whether the slot has more functions: bit 7 of the header type, which matters in function 0.
    pub multifunction: bool,
    /// Megabits a second that the guest is told, at most 65,535.
    pub speed: u16,
}

impl Vmxnet3Config {
    /// Sixteen vectors (as many as some clients of vfio-user can pass), no interrupt pin, alone in its slot, 10 Gb/s.
    pub fn new(name: impl Into<String>, mac: MacAddr) -> Self {
        Self { name: name.into(), mac, vectors: 16, intx: false, multifunction: false, speed: 10_000 }
    }
}
