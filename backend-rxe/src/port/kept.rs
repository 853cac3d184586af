//! Packets of peers that are kept for later: those ahead of a lost one, and those that must not overtake responses.
//! Each keeps the batch in which it arrived, or is a copy that is charged by size.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pvrdma_guest_memory::{Charge, Kept, MemoryBudget};

/// Maximum number of bytes of packets that a device keeps.
const MOST: u64 = 16 << 20;
/// Bytes charged for a packet beyond its frame: two queue entries, because the queue may have doubled, and the overhead
/// of the heap.
const BESIDE: u64 = 144;

/// Budget in bytes for the copied packets of all of a device's peers.
///
/// It is carved out of the device's memory budget, so that peers can never take the rest from the guest, no matter how
/// much they send.
#[derive(Debug)]
pub(crate) struct PacketBudget {
    memory: Arc<MemoryBudget>,
    used: AtomicU64,
    limit: u64,
}

impl PacketBudget {
    /// Creates a budget of a quarter of `memory`, at most 16 MiB.
    pub(crate) fn new(memory: &Arc<MemoryBudget>) -> Arc<Self> {
        let limit = (memory.limit() / 4).min(MOST);
        Arc::new(Self { memory: Arc::clone(memory), used: AtomicU64::new(0), limit })
    }

    /// Returns the number of bytes in use.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Copies a frame. Returns `None` if there is no room for it.
    pub(crate) fn keep(self: &Arc<Self>, frame: &[u8]) -> Option<CopiedPacket> {
        let bytes = (frame.len() as u64).saturating_add(BESIDE);
        let fits = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= self.limit);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        let Ok(charge) = self.memory.charge(Kept::Packets, bytes) else {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
            return None;
        };
        Some(CopiedPacket { frame: frame.into(), charge, budget: Arc::clone(self) })
    }
}

/// Copy of a frame, charged until it is dropped.
#[derive(Debug)]
pub(crate) struct CopiedPacket {
    frame: Box<[u8]>,
    charge: Charge,
    budget: Arc<PacketBudget>,
}

impl Deref for CopiedPacket {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.frame
    }
}

impl Drop for CopiedPacket {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.charge.bytes(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_take_a_quarter_of_the_device_and_give_it_back() {
        let memory = MemoryBudget::new(4 << 20);
        let budget = PacketBudget::new(&memory);
        let kept: Vec<_> = (0..1000).map_while(|_| budget.keep(&[7; 4000])).collect();
        assert_eq!(kept.len() as u64, (1 << 20) / (4000 + BESIDE));
        assert!(kept.iter().all(|packet| **packet == [7; 4000]));
        assert_eq!((memory.used_for(Kept::Packets), memory.used()), (budget.used(), budget.used()));
        drop(kept);
        assert_eq!((memory.used(), budget.used()), (0, 0));
        // The guest may have used the whole budget.
        let _objects = memory.charge(Kept::Objects, 4 << 20).unwrap();
        assert!(budget.keep(&[7; 4000]).is_none());
        assert_eq!((budget.used(), memory.refused(Kept::Packets)), (0, 1));
    }

    #[test]
    fn the_overhead_of_a_kept_packet_is_charged() {
        let place = size_of::<(pvrdma_verbs_types::Psn, super::super::KeptPacket)>() as u64;
        assert!(2 * place + 24 <= BESIDE, "{place}");
    }
}
