//! The MSN of responses, compared with a model: the number of messages that were complete when the packet that the
//! response answers was executed (IBA 9.7.7.1). Some requesters use the MSN to find the request that is done.

use pvrdma_roce::wire::{Operation, Packet};
use pvrdma_verbs_types::{Psn, RemoteAddress, SendData, SendFlags, SendOp, SendWr, Sge};

use super::host::KEY;
use super::net::{Pair, Random, Setup};

const REMOTE: RemoteAddress = RemoteAddress { addr: 0x5000, rkey: KEY };

/// Messages of a requester, by the PSN whose execution completes them.
#[derive(Default)]
struct Model(Vec<Psn>);

impl Model {
    fn request(&mut self, packet: &Packet<'_>) {
        let info = packet.header.bth.opcode.info().unwrap();
        if info.operation == Operation::ReadRequest || info.position.ends() {
            self.0.push(packet.header.bth.psn);
        }
    }

    /// The MSN of a response to the packet at `psn`.
    fn msn(&self, psn: Psn) -> u32 {
        u32::try_from(self.0.iter().filter(|done| !psn.precedes(**done)).count()).unwrap()
    }
}

/// Lets the requests arrive in one batch, as the port delivers them, and returns the number of compared responses.
fn check(works: impl IntoIterator<Item = SendOp>, length: u32) -> usize {
    let mut setup = Setup::default();
    (setup.attrs.max_rd_atomic, setup.attrs.max_dest_rd_atomic) = (16, 16);
    let mut pair = Pair::new(&setup, 1);
    let now = pair.now;
    let [ours, peer] = &mut pair.ends;
    let mut model = Model::default();
    for (wr_id, op) in (0..).zip(works) {
        peer.host.post_receive(wr_id, 0x9_0000, 10_000);
        let sges = vec![Sge { addr: 0x1000, length, lkey: KEY }];
        ours.post(SendWr { wr_id, op, flags: SendFlags::SIGNALED, sges });
    }
    let requests = ours.transmit(now);
    for frame in &requests {
        model.request(&Packet::parse(frame).unwrap());
    }
    requests.iter().for_each(|frame| peer.receive(now, frame));
    let mut compared = 0;
    loop {
        let responses = peer.transmit(now);
        if responses.is_empty() {
            return compared;
        }
        for frame in &responses {
            let packet = Packet::parse(frame).unwrap();
            if let Some(aeth) = packet.header.extension.aeth() {
                assert_eq!(aeth.msn, model.msn(packet.header.bth.psn), "{packet}");
                compared += 1;
            }
        }
        // Handles packets that had to wait until these responses were sent.
        peer.receive(now, &[]);
    }
}

#[test]
fn responses_to_a_batch_count_what_was_complete_then() {
    let read = || SendOp::Read { remote: REMOTE };
    let add = || SendOp::FetchAdd { remote: REMOTE, add: 1 };
    let send = || SendOp::Send { data: SendData::None, to: None };
    assert_eq!(check((0..8).map(|_| read()), 3000), 16);
    assert_eq!(check((0..8).map(|_| add()), 8), 8);
    assert_eq!(check([send(), read()], 3000), 3);
    assert_eq!(check([read(), send(), read(), add()], 8), 4);
}

#[test]
fn responses_to_any_batch() {
    let mut compared = 0;
    for seed in 0..200 {
        let mut random = Random(seed);
        let works: Vec<_> = (0..12)
            .map(|_| match random.below(4) {
                0 => SendOp::Read { remote: REMOTE },
                1 => SendOp::FetchAdd { remote: REMOTE, add: 1 },
                2 => SendOp::Send { data: SendData::None, to: None },
                _ => SendOp::Write { remote: REMOTE, immediate: None },
            })
            .collect();
        compared += check(works, 8);
    }
    assert!(compared > 1000, "{compared}");
}
