//! Pieces of mappings.

use std::sync::Arc;

use vm_memory::mmap::MmapRegion;

/// A piece of a mapping: offset and bytes.
pub(crate) type Part = (Arc<MmapRegion>, usize, usize);
