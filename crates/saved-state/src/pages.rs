//! Lists of guest pages, as other messages contain them.

/// Runs of adjacent pages, in order: two lists of equal length. A list that is too long for one record is divided by
/// its owner.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct PageList {
    /// Number of the first page of each run: its bus address divided by 4096.
    #[prost(uint64, repeated, tag = "1")]
    pub first: Vec<u64>,
    /// Number of pages of each run.
    #[prost(uint32, repeated, tag = "2")]
    pub count: Vec<u32>,
}
