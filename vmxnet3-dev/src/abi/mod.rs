//! The vmxnet3 interface, parsed into types that can only hold valid values.
//!
//! Sources: VMware's `vmxnet3_defs.h` and `upt1_defs.h` ("definitions shared by device emulation and guest drivers",
//! BSD licence, in DPDK). All numbers are little-endian.

pub(crate) mod command;
pub(crate) mod completion;
pub(crate) mod queue_desc;
pub(crate) mod regs;
pub(crate) mod rss_conf;
pub(crate) mod rx_desc;
pub(crate) mod shared;
pub(crate) mod tx_desc;

/// Returns the byte at `at`. Missing bytes count as zero, here and below.
pub(crate) fn byte(bytes: &[u8], at: usize) -> u8 {
    bytes.get(at).copied().unwrap_or(0)
}

/// Returns the 16-bit number at `at`.
pub(crate) fn le16(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |chunk| u16::from_le_bytes(*chunk))
}

/// Returns the 32-bit number at `at`.
pub(crate) fn le32(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |chunk| u32::from_le_bytes(*chunk))
}

/// Returns the 64-bit number at `at`.
pub(crate) fn le64(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |chunk| u64::from_le_bytes(*chunk))
}

/// Returns the lowest `bits` bits of a number, at most 16.
pub(crate) const fn low_bits(word: u32, bits: u32) -> u16 {
    let kept = word & ((1 << bits) - 1) & 0xffff;
    kept as u16
}
