//! Every byte, over scattered and unaligned memory.

use proptest::prelude::*;
use pvrdma_verbs_types::{RecvWr, SendOp, Sge, WcStatus};

use crate::world::*;

#[derive(Clone, Copy, Debug)]
enum Kind {
    Send,
    Write,
    Read,
}

/// A message: kind, start of the remote range, pieces of the local list as (gap, length).
fn message() -> impl Strategy<Value = (Kind, u64, u64, Vec<(u64, u64)>)> {
    let kind = prop_oneof![Just(Kind::Send), Just(Kind::Write), Just(Kind::Read)];
    let piece = (0u64..50, prop_oneof![Just(0u64), 1u64..20, 1u64..9000]);
    (kind, 0u64..4096, 0u64..4096, proptest::collection::vec(piece, 0..8))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// The target holds exactly the sent bytes, and the bytes around it are unchanged.
    #[test]
    fn messages_arrive_whole(
        (kind, local_offset, remote_offset, pieces) in message(),
        inline in prop_oneof![Just(1u64 << 20), 1u64..5000],
        cuts in proptest::collection::vec(1u64..3000, 1..6),
    ) {
        let world = World::with(|config| (config.inline_bytes, config.worker_bytes) = (inline, inline));
        let pair = Pair::with(world, |_| {}, |_| {});
        let mine = pair.a.buffer_at(local_offset, 80_000, ALL);
        let theirs = pair.b.buffer_at(remote_offset, 80_000, ALL);
        let (before_mine, before_theirs) = (pattern(1, 80_000), pattern(2, 80_000));
        mine.write(0, &before_mine);
        theirs.write(0, &before_theirs);
        let mut at = 0;
        let mut local = Vec::new();
        for (gap, length) in pieces {
            at += gap;
            local.push((at, length));
            at += length;
        }
        let total: u64 = local.iter().map(|(_, length)| length).sum();
        let sges: Vec<Sge> = local.iter().map(|&(offset, length)| mine.sge(offset, length)).collect();
        let start = usize::try_from(remote_offset % 1000).unwrap();
        // Place of the message in the memory of the peer.
        let mut remote = Vec::new();
        match kind {
            Kind::Send => {
                let (mut at, mut left) = (start as u64, total);
                for cut in cuts.iter().cycle() {
                    let length = left.min(*cut);
                    remote.push((at, length));
                    at += length + 3;
                    left -= length;
                    if left == 0 { break; }
                    if remote.len() == 15 {
                        remote.push((at, left));
                        break;
                    }
                }
                let list = remote.iter().map(|&(offset, length)| theirs.sge(offset, length)).collect();
                pair.right.receives.posted.lock().push_back(RecvWr { wr_id: 1, sges: list, malformed: false });
                pair.left.send(1, &sges);
            }
            Kind::Write => {
                remote.push((start as u64, total));
                pair.left.submit(1, write(theirs.remote(start as u64)), &sges);
            }
            Kind::Read => {
                remote.push((start as u64, total));
                pair.left.submit(1, SendOp::Read { remote: theirs.remote(start as u64) }, &sges);
            }
        }
        pair.settle();
        prop_assert_eq!(pair.left.scq.one().status, WcStatus::Success);
        let bytes = |list: &[(u64, u64)]| -> Vec<usize> {
            list.iter().flat_map(|&(at, length)| at..at + length).map(|i| usize::try_from(i).unwrap()).collect()
        };
        let (mut expect_mine, mut expect_theirs) = (before_mine.clone(), before_theirs.clone());
        for (l, r) in bytes(&local).into_iter().zip(bytes(&remote)) {
            match kind {
                Kind::Send | Kind::Write => expect_theirs[r] = before_mine[l],
                Kind::Read => expect_mine[l] = before_theirs[r],
            }
        }
        prop_assert!(mine.read(0, 80_000) == expect_mine, "local memory differs");
        prop_assert!(theirs.read(0, 80_000) == expect_theirs, "remote memory differs");
    }
}

#[test]
fn sixteen_mebibytes_in_chunks() {
    const LEN: u64 = 16 << 20;
    let pair = Pair::new();
    let (mine, theirs) = (pair.a.buffer_at(13, LEN, ALL), pair.b.buffer_at(99, LEN, ALL));
    let data = pattern(9, LEN);
    mine.write(0, &data);
    pair.left.submit(1, write(theirs.remote(0)), &[mine.all()]);
    assert!(pair.left.scq.poll().is_empty());
    pair.settle();
    assert_eq!(pair.left.scq.one().status, WcStatus::Success);
    assert!(theirs.read(0, LEN) == data);
    theirs.write(0, &vec![0; 1 << 24]);
    pair.right.recv(1, &[theirs.sge(0, LEN - 5), theirs.sge(LEN - 5, 5)]);
    pair.left.send(2, &[mine.all()]);
    pair.settle();
    assert_eq!(u64::from(pair.right.rcq.one().byte_len), LEN);
    assert!(theirs.read(0, LEN) == data);
}
