//! Packets that are sent again alone and out of turn, because the responder keeps what came behind them.

use super::Seq;

/// Packets of which we know at a time, at most. Of others the responder tells when it gets there.
const MOST: usize = 64;

/// A packet that did not arrive.
#[derive(Clone, Copy, Debug)]
struct Missing {
    seq: Seq,
    sent: bool,
}

/// What is missing, in the order of PSNs.
#[derive(Debug, Default)]
pub(super) struct Repairs {
    missing: Vec<Missing>,
}

impl Repairs {
    /// Has a packet sent again, unless it was already.
    pub(super) fn add(&mut self, seq: Seq) {
        if let Err(at) = self.missing.binary_search_by_key(&seq, |missing| missing.seq)
            && self.missing.len() < MOST
        {
            self.missing.insert(at, Missing { seq, sent: false });
        }
    }

    /// Whether this is known.
    pub(super) fn contains(&self, seq: Seq) -> bool {
        self.missing.binary_search_by_key(&seq, |missing| missing.seq).is_ok()
    }

    /// The next packet to send.
    pub(super) fn due(&self) -> Option<Seq> {
        self.missing.iter().find(|missing| !missing.sent).map(|missing| missing.seq)
    }

    /// Takes the next packet to send.
    pub(super) fn take(&mut self) -> Option<Seq> {
        let next = self.missing.iter_mut().find(|missing| !missing.sent)?;
        next.sent = true;
        Some(next.seq)
    }

    /// Everything before `seq` has arrived.
    pub(super) fn confirm(&mut self, seq: Seq) {
        self.missing.retain(|missing| missing.seq >= seq);
    }

    /// Everything is sent again.
    pub(super) fn clear(&mut self) {
        self.missing.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_sent_once_in_order() {
        let mut repairs = Repairs::default();
        [30, 10, 20, 10].into_iter().for_each(|seq| repairs.add(seq));
        assert_eq!((repairs.due(), repairs.take()), (Some(10), Some(10)));
        repairs.add(10);
        assert!(repairs.contains(10) && !repairs.contains(11));
        repairs.confirm(11);
        assert_eq!([repairs.take(), repairs.take(), repairs.take()], [Some(20), Some(30), None]);
        repairs.confirm(31);
        (100..200).for_each(|seq| repairs.add(seq));
        assert_eq!(std::iter::from_fn(|| repairs.take()).count(), MOST);
        repairs.clear();
        repairs.add(100);
        assert_eq!(repairs.due(), Some(100));
    }
}
