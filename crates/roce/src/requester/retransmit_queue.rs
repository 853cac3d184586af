//! Packets that are retransmitted alone and out of turn, because the responder buffers what came behind them.

use super::send_state::Seq;

/// Packets of which we know at a time, at most. Of others the responder tells when it gets there.
const CAPACITY: usize = 64;

/// A packet that did not arrive.
#[derive(Clone, Copy, Debug)]
struct Lost {
    seq: Seq,
    retransmitted: bool,
}

/// What is missing at the responder, in the order of PSNs.
#[derive(Debug, Default)]
pub(super) struct RetransmitQueue {
    lost: Vec<Lost>,
}

impl RetransmitQueue {
    /// Queues a packet, unless it is known already.
    pub(super) fn push(&mut self, seq: Seq) {
        if let Err(at) = self.lost.binary_search_by_key(&seq, |lost| lost.seq)
            && self.lost.len() < CAPACITY
        {
            self.lost.insert(at, Lost { seq, retransmitted: false });
        }
    }

    /// Returns `true` if this packet is known to be missing, whether it was retransmitted or not.
    pub(super) fn contains(&self, seq: Seq) -> bool {
        self.lost.binary_search_by_key(&seq, |lost| lost.seq).is_ok()
    }

    /// The next packet to retransmit.
    pub(super) fn peek(&self) -> Option<Seq> {
        self.lost.iter().find(|lost| !lost.retransmitted).map(|lost| lost.seq)
    }

    /// Takes the next packet to retransmit. It stays known until it is acknowledged.
    pub(super) fn pop(&mut self) -> Option<Seq> {
        let next = self.lost.iter_mut().find(|lost| !lost.retransmitted)?;
        next.retransmitted = true;
        Some(next.seq)
    }

    /// Everything before `una` has arrived.
    pub(super) fn on_acked(&mut self, una: Seq) {
        self.lost.retain(|lost| lost.seq >= una);
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        self.lost.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_retransmitted_once_in_order() {
        let mut queue = RetransmitQueue::default();
        [30, 10, 20, 10].into_iter().for_each(|seq| queue.push(seq));
        assert_eq!((queue.peek(), queue.pop()), (Some(10), Some(10)));
        queue.push(10);
        assert!(queue.contains(10) && !queue.contains(11));
        queue.on_acked(11);
        assert_eq!([queue.pop(), queue.pop(), queue.pop()], [Some(20), Some(30), None]);
        queue.on_acked(31);
        (100..200).for_each(|seq| queue.push(seq));
        assert_eq!(std::iter::from_fn(|| queue.pop()).count(), CAPACITY);
        queue.clear();
        queue.push(100);
        assert_eq!(queue.peek(), Some(100));
    }
}
