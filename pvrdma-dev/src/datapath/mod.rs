//! The data plane: elements of the guest's rings to work requests, completions to elements (spec §6 to §9).
//!
//! Nothing here allocates per request except a fast registration, which brings a page list.

mod complete;
mod recv;
mod send;

use pvrdma_verbs::Sge;
use vm_memory::VolatileSlice;

pub(crate) use complete::CqRing;
pub(crate) use recv::RecvRing;
pub(crate) use send::{SendRing, SendRingParams};

use crate::abi::layout::GuestLayout;
use crate::abi::wqe::{SGE_SIZE, SgeEntry};

/// Bytes of an element that are copied at once; most elements are no longer.
const HEAD: usize = 128;

/// Bytes of each further copy, for elements with many SGEs.
const CHUNK: usize = 256;

#[inline]
fn sge(bytes: &[u8; SGE_SIZE]) -> Sge {
    SgeEntry::decode(bytes).into()
}

/// Takes `count` SGEs of an element: those at the end of `head`, which was copied already, and the rest from memory behind
/// it. No byte is read twice.
fn gather(element: &VolatileSlice<'_>, head: &[u8], head_len: usize, count: u32, sges: &mut Vec<Sge>) {
    let count = count as usize;
    let (copied, _) = head.as_chunks::<SGE_SIZE>();
    sges.extend(copied.iter().take(count).map(sge));
    let mut at = head_len;
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
