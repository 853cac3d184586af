//! Device configuration.

use pvrdma_packet::MacAddr;

/// Configuration of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Vmxnet3Config {
    /// Name in logs and status.
    pub name: String,
    /// Permanent MAC address. The guest may set another.
    pub mac: MacAddr,
    /// Number of MSI-X vectors, 3 to 25. A driver that uses a vector for each queue pair needs one more for events.
    pub vectors: u16,
    /// The function has a legacy interrupt pin.
    pub intx: bool,
    /// The slot has more functions: bit 7 of the header type, which is relevant in function 0.
    pub multifunction: bool,
    /// Link speed reported to the guest, in Mbit/s, at most 65,535.
    pub speed: u16,
}

impl Vmxnet3Config {
    /// Returns a configuration with 16 vectors (the most that some vfio-user clients support), no interrupt pin, a
    /// single function in its slot, and 10 Gbit/s.
    pub fn new(name: impl Into<String>, mac: MacAddr) -> Self {
        Self { name: name.into(), mac, vectors: 16, intx: false, multifunction: false, speed: 10_000 }
    }
}

pvrdma_base::setters!(Vmxnet3Config {
    with_vectors => vectors: u16,
    with_intx => intx: bool,
    with_multifunction => multifunction: bool,
    with_speed => speed: u16,
});
