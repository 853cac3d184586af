//! Local delivery: the way to a peer of the same process.

pub(crate) mod rc;
pub(crate) mod ud;

use parking_lot::RwLockReadGuard;
use pvrdma_guest_memory::DmaView;

use crate::gather::Memory;
use crate::hca::Adapter;
use crate::mr::MrTable;

/// Guest memory of one or two adapters, held: maps in the order of their spaces, then region tables in the order of their
/// adapters (see the crate documentation). Adapters on the same space share one view.
#[derive(Debug)]
pub(crate) struct Held<'a> {
    own_view: DmaView<'a>,
    own_mrs: RwLockReadGuard<'a, MrTable>,
    /// `None` when the space is ours.
    peer_view: Option<DmaView<'a>>,
    /// `None` when the adapter is ours, or there is no peer.
    peer_mrs: Option<RwLockReadGuard<'a, MrTable>>,
}

impl<'a> Held<'a> {
    pub(crate) fn open(own: &'a Adapter, peer: Option<&'a Adapter>) -> Self {
        let peer = peer.filter(|peer| peer.id != own.id);
        let (own_view, peer_view) = match peer.filter(|peer| peer.memory.id() != own.memory.id()) {
            None => (own.memory.view(), None),
            Some(peer) if own.memory.id() < peer.memory.id() => {
                let view = own.memory.view();
                (view, Some(peer.memory.view()))
            }
            Some(peer) => {
                let view = peer.memory.view();
                (own.memory.view(), Some(view))
            }
        };
        let (own_mrs, peer_mrs) = match peer {
            None => (own.mrs.read(), None),
            Some(peer) if own.id < peer.id => {
                let mrs = own.mrs.read();
                (mrs, Some(peer.mrs.read()))
            }
            Some(peer) => {
                let mrs = peer.mrs.read();
                (own.mrs.read(), Some(mrs))
            }
        };
        Self { own_view, own_mrs, peer_view, peer_mrs }
    }

    /// The adapter's own memory.
    #[inline]
    pub(crate) fn own(&self) -> Memory<'_> {
        Memory { view: &self.own_view, mrs: &self.own_mrs }
    }

    /// The peer's memory, which may be our own.
    #[inline]
    pub(crate) fn peer(&self) -> Memory<'_> {
        Memory {
            view: self.peer_view.as_ref().unwrap_or(&self.own_view),
            mrs: self.peer_mrs.as_ref().unwrap_or(&self.own_mrs),
        }
    }
}
