//! Messages of the software adapter: memory regions and queue pairs. Kinds `0x02xx`.

use crate::record::records;

/// The table of memory regions, without the regions.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RegionTable {
    /// Index of the first slot in keys.
    #[prost(uint32, tag = "1")]
    pub base: u32,
    /// The last key byte of each slot that was ever used.
    #[prost(bytes = "vec", tag = "2")]
    pub keys: Vec<u8>,
    /// Free slots, in the order in which they are used.
    #[prost(uint32, repeated, tag = "3")]
    pub free: Vec<u32>,
}

records! {
    0x0201 => RegionTable,
}
