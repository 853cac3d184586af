//! Offloads: checksums, TCP segmentation and VLAN tags.

pub(crate) mod checksum;
pub(crate) mod headers;
pub(crate) mod segment;
#[cfg(test)]
mod tests;
