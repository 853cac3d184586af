//! Two ends and the bytes between them.

use std::time::Duration;

use pvrdma_iwarp::wire::fpdu;
use pvrdma_iwarp::{Finished, Negotiated, Role, Rtr, Stream, Tuning};
use pvrdma_verbs_types::{RemoteAddress, SendData, SendFlags, SendOp, SendWr, Sge};

use crate::host::{Host, KEY};

/// A generator of test data (SplitMix64).
#[derive(Clone, Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ value >> 31
    }

    pub(crate) fn fill(&mut self, bytes: &mut [u8]) {
        for byte in bytes {
            *byte = u8::try_from(self.next() & 0xff).unwrap();
        }
    }

    /// A number of `0..=most`.
    pub(crate) fn up_to(&mut self, most: usize) -> usize {
        usize::try_from(self.next() % (most as u64 + 1)).unwrap()
    }
}

/// One end, with the bytes that it has built and TCP has not accepted, and those that have arrived and are not
/// processed.
pub(crate) struct End {
    pub(crate) stream: Stream,
    pub(crate) host: Host,
    pub(crate) outbox: Vec<u8>,
    pub(crate) inbox: Vec<u8>,
    pub(crate) now: Duration,
}

impl End {
    pub(crate) fn new(negotiated: Negotiated, tuning: Tuning, memory: usize) -> Self {
        Self {
            stream: Stream::new(negotiated, tuning),
            host: Host::new(memory),
            outbox: Vec::new(),
            inbox: Vec::new(),
            now: Duration::from_secs(100),
        }
    }

    pub(crate) fn post(&mut self, wr: SendWr) {
        self.stream.post(wr, &mut self.host);
    }

    /// Builds the next FPDU.
    pub(crate) fn transmit(&mut self) -> bool {
        let mut out = vec![0xee; fpdu::MAX_FPDU];
        let Some(len) = self.stream.poll_transmit(&mut out, &mut self.host) else { return false };
        self.outbox.extend(&out[..len]);
        true
    }

    /// Builds everything that can be sent.
    pub(crate) fn transmit_all(&mut self) -> usize {
        std::iter::repeat_with(|| self.transmit()).take_while(|&sent| sent).count()
    }

    /// Makes TCP accept up to `bytes` bytes, and returns them.
    pub(crate) fn take(&mut self, bytes: usize) -> Vec<u8> {
        let taken: Vec<u8> = self.outbox.drain(..bytes.min(self.outbox.len())).collect();
        self.stream.taken(taken.len(), &mut self.host);
        taken
    }

    /// Processes bytes that have arrived.
    pub(crate) fn deliver(&mut self, bytes: &[u8]) {
        self.inbox.extend(bytes);
        let used = self.stream.receive(self.now, &self.inbox, &mut self.host);
        self.inbox.drain(..used);
        assert!(self.stream.waits_for_receive() || self.inbox.len() < fpdu::MAX_FPDU);
    }

    pub(crate) fn finished(&mut self, how: Finished) {
        self.stream.finished(how, &mut self.host);
    }

    /// Builds, hands over and returns all bytes that can be sent.
    pub(crate) fn sent(&mut self) -> Vec<u8> {
        self.transmit_all();
        self.take(usize::MAX)
    }
}

pub(crate) const fn negotiated(role: Role) -> Negotiated {
    Negotiated { role, crc: true, ird: 16, ord: 16, rtr: None }
}

/// An initiator and a responder.
pub(crate) struct Pair(pub(crate) [End; 2]);

impl Pair {
    pub(crate) fn new(memory: usize) -> Self {
        Self::with(negotiated(Role::Initiator), Tuning::default(), memory)
    }

    /// A pair with these properties; `ird` and `ord` are those of the initiator.
    pub(crate) fn with(properties: Negotiated, tuning: Tuning, memory: usize) -> Self {
        let Negotiated { ird, ord, .. } = properties;
        let initiator = Negotiated { role: Role::Initiator, ..properties };
        let responder = Negotiated { role: Role::Responder, ird: ord, ord: ird, ..properties };
        Self([End::new(initiator, tuning, memory), End::new(responder, tuning.with_seed(77), memory)])
    }

    /// A pair whose responder may send, because the ready-to-receive message has arrived.
    pub(crate) fn open(memory: usize) -> Self {
        let properties = Negotiated { rtr: Some(Rtr::Read), ..negotiated(Role::Initiator) };
        let mut pair = Self::with(properties, Tuning::default(), memory);
        pair.settle();
        pair
    }

    /// Moves all bytes until both ends have nothing to send.
    pub(crate) fn settle(&mut self) {
        let [a, b] = &mut self.0;
        loop {
            let (from_a, from_b) = (a.sent(), b.sent());
            if from_a.is_empty() && from_b.is_empty() {
                return;
            }
            b.deliver(&from_a);
            a.deliver(&from_b);
        }
    }
}

pub(crate) fn sge(addr: usize, length: usize) -> Sge {
    Sge { addr: addr as u64, length: u32::try_from(length).unwrap(), lkey: KEY }
}

pub(crate) fn remote(addr: usize) -> RemoteAddress {
    RemoteAddress { addr: addr as u64, rkey: KEY }
}

pub(crate) fn request(wr_id: u64, op: SendOp, sges: Vec<Sge>) -> SendWr {
    SendWr { wr_id, op, flags: SendFlags::SIGNALED, sges }
}

pub(crate) fn send(wr_id: u64, sges: Vec<Sge>) -> SendWr {
    request(wr_id, SendOp::Send { data: SendData::None, to: None }, sges)
}

pub(crate) fn write(wr_id: u64, to: usize, sges: Vec<Sge>) -> SendWr {
    request(wr_id, SendOp::Write { remote: remote(to), immediate: None }, sges)
}

pub(crate) fn read(wr_id: u64, from: usize, sges: Vec<Sge>) -> SendWr {
    request(wr_id, SendOp::Read { remote: remote(from) }, sges)
}
