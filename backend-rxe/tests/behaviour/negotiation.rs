//! Negotiation between two devices of this engine. Other implementations see only reserved bits.

use std::sync::Arc;

use pvrdma_roce::wire::{ACCEPT, Bth, OFFER, Packet, build};
use pvrdma_rxe::PortRules;
use pvrdma_verbs_types::{QpType, SendOp, WcStatus};

use crate::tap::{Tap, tapped};
use crate::world::*;

/// Executes two writes and a READ from node 1, one after the other. Returns the frames that both ends sent.
fn exchange(negotiate: [bool; 2]) -> [Vec<Vec<u8>>; 2] {
    let (world, taps) = tapped(negotiate.map(|negotiate| PortRules::default().with_negotiate(negotiate)));
    let (a, b) = (world.node(1), world.node(2));
    let (left, right) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    left.connect(&right, |_| {});
    right.connect(&left, |_| {});
    let (mine, theirs) = (a.buffer(10_000), b.buffer(10_000));
    for (wr_id, op) in [write(theirs.remote(0)), write(theirs.remote(0)), SendOp::Read { remote: theirs.remote(0) }]
        .into_iter()
        .enumerate()
    {
        left.submit(wr_id as u64, op, &[mine.all()]);
        world.settle();
        assert_eq!(left.scq.one().status, WcStatus::Success);
    }
    taps.map(|tap: Arc<Tap>| tap.sent.lock().iter().map(<[u8]>::to_vec).collect())
}

fn bits(frames: &[Vec<u8>]) -> Vec<u8> {
    frames.iter().map(|frame| Packet::parse(frame).unwrap().header.bth.reserved7).collect()
}

/// The same frames without the bits.
fn without(frames: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let plain = |frame: &Vec<u8>| {
        let packet = Packet::parse(frame).unwrap();
        let mut header = packet.header;
        header.bth = Bth { reserved7: 0, ..header.bth };
        build(&header, packet.payload).unwrap()
    };
    frames.iter().map(plain).collect()
}

#[test]
fn an_agreement_is_in_reserved_bits_alone() {
    let off = exchange([false, false]);
    assert!(off.iter().all(|frames| !frames.is_empty() && bits(frames).iter().all(|&bits| bits == 0)));
    // The first write has been sent before the first response arrives, so its packets carry the offer.
    let both = exchange([true, true]);
    let requests = bits(&both[0]);
    let offers = requests.iter().take_while(|&&bits| bits == OFFER).count();
    assert!(offers > 0 && requests[offers..].iter().all(|&bits| bits == 0), "{requests:02x?}");
    assert!(requests.len() > offers + 3, "{requests:02x?}");
    assert!(bits(&both[1]).iter().all(|&bits| bits == ACCEPT));
    // A peer that does not answer the offer gets no further offers.
    let one = exchange([true, false]);
    assert_eq!(bits(&one[0]), bits(&both[0]));
    assert!(bits(&one[1]).iter().all(|&bits| bits == 0));
    assert!(bits(&exchange([false, true]).concat()).iter().all(|&bits| bits == 0));
    for frames in [&both, &one] {
        assert_eq!(frames.each_ref().map(|frames| without(frames)), off);
    }
}
