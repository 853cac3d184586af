use super::*;
use crate::memory::{self, MemoryLink};
use crate::offload::sample::{carried, data, long_tcp, open_checksum};
use crate::{LinkInspect, Offload};

const TO: [u8; 6] = [2, 0, 0, 0, 0, 2];
const FROM: [u8; 6] = [2, 0, 0, 0, 0, 1];

fn receive(link: &MemoryLink, most: usize) -> Vec<Vec<u8>> {
    let mut frames = Frames::default();
    link.receive(&mut frames, most);
    assert!(!frames.has_offloads());
    frames.iter().map(<[u8]>::to_vec).collect()
}

fn plain(number: u8) -> Vec<u8> {
    [&TO[..], &FROM, &[0x88, 0xb5], &[number; 46]].concat()
}

#[test]
fn offloads_that_the_link_lacks_are_performed() {
    let (ours, theirs) = memory::pair(100).unwrap();
    let link = GsoLink::new(Arc::new(ours));
    let (bytes, left) = (data(5000), long_tcp(TO, FROM, &data(900), 1448).0);
    let (long, segmentation) = long_tcp(TO, FROM, &bytes, 1448);
    let mut frames = Frames::default();
    frames.push(&plain(1));
    frames.push_with_offload(&long, segmentation);
    frames.push_with_offload(&left, open_checksum(&left));
    frames.push(&plain(2));
    assert_eq!((link.send(&frames, 1), link.unsent()), (3, false));
    let got = receive(&theirs, 100);
    assert_eq!(got.iter().map(Vec::len).collect::<Vec<_>>(), [1502, 1502, 1502, 54 + 656, 954, 60]);
    assert_eq!(carried(&got[..4]), bytes);
    assert_eq!(carried(&got[4..5]), data(900));
    assert_eq!(got[5], plain(2));
    // An offload of another frame does not find its headers in this one, so the frame is lost.
    frames.clear();
    frames.push_with_offload(&plain(3), segmentation);
    frames.push_with_offload(&plain(4), open_checksum(&left));
    frames.push(&plain(5));
    assert_eq!((link.send(&frames, 0), receive(&theirs, 100)), (3, vec![plain(5)]));
}

/// Segments that find no room are sent before any other frame, and exactly once.
#[test]
fn the_rest_waits_and_goes_first() {
    let (ours, theirs) = memory::pair(2).unwrap();
    let link = GsoLink::new(Arc::new(ours));
    let bytes = data(9000);
    let (long, segmentation) = long_tcp(TO, FROM, &bytes, 1000);
    let mut frames = Frames::default();
    frames.push_with_offload(&long, segmentation);
    assert_eq!((link.send(&frames, 0), link.unsent()), (1, true));
    let (mut later, mut got) = (Frames::default(), Vec::new());
    later.push(&plain(7));
    assert_eq!(link.send(&later, 0), 0, "there is no room before the rest has left");
    while link.unsent() {
        got.extend(receive(&theirs, 2));
        assert_eq!(link.send(&Frames::default(), 0), 0);
    }
    got.extend(receive(&theirs, 2));
    assert_eq!((got.len(), carried(&got)), (9, bytes));
    assert_eq!((link.send(&later, 0), receive(&theirs, 9)), (1, vec![plain(7)]));
}

/// Even for a long batch, no more is prepared than the link takes at a time.
#[test]
fn a_full_link_is_given_no_more() {
    let (ours, theirs) = memory::pair(1).unwrap();
    let link = GsoLink::new(Arc::new(ours));
    let (long, segmentation) = long_tcp(TO, FROM, &data(60_000), 1448);
    let mut frames = Frames::default();
    (0..20).for_each(|_| frames.push_with_offload(&long, segmentation));
    let taken = link.send(&frames, 0);
    assert!((1..=6).contains(&taken), "{taken}");
    let mut got = receive(&theirs, 9).len();
    let mut from = taken;
    while from < frames.len() || link.unsent() {
        from += link.send(&frames, from);
        got += receive(&theirs, 9).len();
    }
    assert_eq!(got, 20 * 42);
}

/// A link that accepts long frames.
#[derive(Debug)]
struct Takes(MemoryLink);

impl Link for Takes {
    fn receive(&self, frames: &mut Frames, most: usize) {
        self.0.receive(frames, most);
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        self.0.send(frames, from)
    }

    fn takes(&self, _frame: &[u8], offload: Offload) -> bool {
        offload.mss().is_some()
    }

    fn readiness(&self) -> Readiness {
        self.0.readiness()
    }

    fn lost(&self) -> u64 {
        0
    }

    fn inspect(&self) -> LinkInspect {
        self.0.inspect()
    }
}

#[test]
fn offloads_of_the_link_are_left_to_it() {
    let (ours, theirs) = memory::pair(100).unwrap();
    let link = GsoLink::new(Arc::new(Takes(ours)));
    let (long, segmentation) = long_tcp(TO, FROM, &data(9000), 1000);
    let (short, _) = long_tcp(TO, FROM, &data(500), 1000);
    let mut frames = Frames::default();
    frames.push_with_offload(&long, segmentation);
    assert_eq!((link.send(&frames, 0), receive(&theirs, 9)), (1, vec![long.clone()]));
    frames.push_with_offload(&short, open_checksum(&short));
    assert_eq!(link.send(&frames, 0), 2);
    let got = receive(&theirs, 9);
    assert_eq!((got.len(), &got[0]), (2, &long));
    assert_eq!(carried(&got[1..]), data(500), "the checksum was calculated");
}
