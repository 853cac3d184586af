//! Reading of scatter/gather lists from ring elements (spec §8.1).

use pvrdma_verbs_types::Sge;
use vm_memory::VolatileSlice;

use crate::abi::layout::GuestLayout;
use crate::abi::wqe::{SGE_SIZE, SgeEntry};

/// Bytes of an element that are copied in one step; most elements are not longer.
pub(super) const HEAD: usize = 128;

/// Bytes of each further copy, for elements with many SGEs.
const CHUNK: usize = 256;

#[inline]
fn sge(bytes: &[u8; SGE_SIZE]) -> Sge {
    SgeEntry::decode(bytes).into()
}

/// Reads `count` SGEs of an element: first those at the end of `head`, which was copied already, then the rest from
/// memory behind it. No byte is read twice, because the guest could change it in between.
pub(super) fn gather(element: &VolatileSlice<'_>, head: &[u8], head_len: usize, count: u32, sges: &mut Vec<Sge>) {
    let count = count as usize;
    let (copied, _) = head.as_chunks::<SGE_SIZE>();
    sges.extend(copied.iter().take(count).map(sge));
    if sges.len() < count {
        gather_rest(element, head_len, count, sges);
    }
}

/// Reads the rest of `count` SGEs, starting at byte `at` of the element.
#[inline(never)]
fn gather_rest(element: &VolatileSlice<'_>, mut at: usize, count: usize, sges: &mut Vec<Sge>) {
    let mut chunk = [0; CHUNK];
    while sges.len() < count {
        let Ok(rest) = element.offset(at) else { return };
        let got = rest.copy_to(&mut chunk);
        let (entries, _) = chunk.as_chunks::<SGE_SIZE>();
        let left = count - sges.len();
        sges.extend(entries.iter().take(got / SGE_SIZE).take(left).map(sge));
        if got < CHUNK {
            return;
        }
        at += CHUNK;
    }
}
