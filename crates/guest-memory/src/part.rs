//! Parts of mappings.

use std::sync::Arc;

use vm_memory::mmap::MmapRegion;

/// Part of a mapping: the mapping, the offset and the length in bytes.
pub(crate) type Part = (Arc<MmapRegion>, usize, usize);
