//! A gibibyte of mixed operations between two devices, every byte compared.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod common;

use common::{Process, connect, rxe_pair};
use pvrdma_dev::testing::{Buffer, Driver, Mr, Placement, Qp, QpInit, RecvWr, SendWr, access, status};
use pvrdma_verbs_types::Sge;

/// Bytes to move.
const TOTAL: usize = 1 << 30;
/// Longest message.
const LONGEST: usize = 16 << 20;
/// Size of the registered memory of each end. It fits messages with gaps between their pieces.
const MEMORY: usize = 20 << 20;
/// Most pieces of a list.
const PIECES: usize = 16;

/// A xorshift generator: the same steps in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() >> 16).unwrap() % limit.max(1)
    }

    fn length(&mut self) -> usize {
        match self.below(8) {
            0 => 0,
            1 | 2 => self.below(300),
            3 | 4 => self.below(70_000),
            5 => LONGEST,
            _ => self.below(LONGEST),
        }
    }

    /// Cuts `len` bytes into pieces with gaps between them. Returns the offset and length of each.
    fn pieces(&mut self, len: usize) -> Vec<(usize, usize)> {
        let count = 1 + self.below(PIECES.min(len.max(1)));
        let gap = (MEMORY - len) / count;
        let mut left = len;
        let mut at = 0;
        (0..count)
            .map(|i| {
                at += self.below(gap);
                let piece = if i + 1 == count { left } else { self.below(left) };
                let start = at;
                at += piece;
                left -= piece;
                (start, piece)
            })
            .collect()
    }
}

/// One end: a queue pair, its memory, and the expected content.
struct Endpoint {
    process: Process,
    qp: Qp,
    buffer: Buffer,
    mr: Mr,
    expected: Vec<u8>,
}

impl Endpoint {
    fn new(driver: &Driver) -> Self {
        let process = Process::new(driver, true, 64);
        let init = QpInit {
            max_send_sge: u32::try_from(PIECES).unwrap(),
            max_recv_sge: u32::try_from(PIECES).unwrap(),
            ..QpInit::rc(&process.pd, &process.cq)
        };
        let qp = driver.create_qp(&init).unwrap();
        // No two pages are adjacent, and the first byte is in the middle of a page.
        let buffer = driver.buffer(MEMORY, 1234, Placement::Scattered);
        buffer.fill_pattern(qp.qpn.into());
        let expected = buffer.read(0, MEMORY);
        let mr = driver.reg_mr(&process.pd, &buffer, access::ALL).unwrap();
        Self { process, qp, buffer, mr, expected }
    }

    fn sges(&self, pieces: &[(usize, usize)]) -> Vec<Sge> {
        pieces.iter().map(|&(at, len)| self.buffer.sge(&self.mr, at, len)).collect()
    }

    /// Puts data into pieces of our memory.
    fn fill(&mut self, pieces: &[(usize, usize)], data: &[u8]) {
        self.expect(pieces, data);
        let mut done = 0;
        for &(at, len) in pieces {
            self.buffer.write(at, &data[done..done + len]);
            done += len;
        }
    }

    /// Records the expected content of pieces of this end's memory.
    fn expect(&mut self, pieces: &[(usize, usize)], data: &[u8]) {
        let mut done = 0;
        for &(at, len) in pieces {
            self.expected[at..at + len].copy_from_slice(&data[done..done + len]);
            done += len;
        }
    }

    /// Compares pieces and the bytes around them.
    fn check(&self, pieces: &[(usize, usize)], what: &str) {
        for &(at, len) in pieces {
            let (from, to) = (at.saturating_sub(64), (at + len + 64).min(MEMORY));
            assert!(self.buffer.read(from, to - from) == self.expected[from..to], "{what}: {len} bytes at {at}");
        }
    }

    fn complete(&mut self, what: &str) {
        let cqe = self.process.cq.wait();
        assert_eq!(cqe.status, status::SUCCESS, "{what}: {cqe:?}");
    }
}

#[test]
fn a_gibibyte_of_mixed_operations() {
    let [(_test_a, driver_a), (_test_b, driver_b)] = rxe_pair();
    let (mut a, mut b) = (Endpoint::new(&driver_a), Endpoint::new(&driver_b));
    connect(&mut a.qp, 1, &mut b.qp, 2);
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut moved = 0;
    while moved < TOTAL {
        let kind = random.below(7);
        let len = if kind >= 5 { 8 } else { random.length() };
        let data = Buffer::pattern(random.next(), len);
        let near = if kind >= 5 { vec![(random.below(MEMORY - 8), 8)] } else { random.pieces(len) };
        let aligned = |at: usize| at - usize::try_from((b.buffer.va() + at as u64) % 8).unwrap();
        let remote = if kind >= 5 { aligned(8 + random.below(MEMORY - 16)) } else { random.below(MEMORY - len) };
        let far = vec![(remote, len)];
        let (addr, rkey) = (b.buffer.va() + remote as u64, b.mr.rkey);
        let what = format!("operation {kind} of {len} bytes");
        let sges = a.sges(&near);
        match kind {
            0 | 1 => {
                a.fill(&near, &data);
                b.expect(&far, &data);
                let write = SendWr::write(1, &sges, addr, rkey);
                if kind == 1 {
                    b.qp.post_recv(&[RecvWr::new(2, &[])]).unwrap();
                    a.qp.post_send(&[write.immediate([1, 2, 3, 4])]).unwrap();
                    b.complete(&what);
                } else {
                    a.qp.post_send(&[write]).unwrap();
                }
                a.complete(&what);
                b.check(&far, &what);
            }
            2 => {
                b.fill(&far, &data);
                a.expect(&near, &data);
                a.qp.post_send(&[SendWr::read(1, &sges, addr, rkey)]).unwrap();
                a.complete(&what);
                a.check(&near, &what);
            }
            3 | 4 => {
                let far = random.pieces(len);
                a.fill(&near, &data);
                b.expect(&far, &data);
                b.qp.post_recv(&[RecvWr::new(2, &b.sges(&far))]).unwrap();
                let send = SendWr::send(1, &sges);
                a.qp.post_send(&[if kind == 4 { send.immediate([4, 3, 2, 1]) } else { send }]).unwrap();
                a.complete(&what);
                b.complete(&what);
                b.check(&far, &what);
            }
            _ => {
                let before = b.buffer.read(remote, 8);
                let old = u64::from_le_bytes(before.as_slice().try_into().unwrap());
                let operand = random.next();
                let (request, new) = if kind == 5 {
                    (SendWr::fetch_add(1, sges[0], addr, rkey, operand), old.wrapping_add(operand))
                } else if operand.is_multiple_of(2) {
                    (SendWr::compare_swap(1, sges[0], addr, rkey, old, operand), operand)
                } else {
                    (SendWr::compare_swap(1, sges[0], addr, rkey, !old, operand), old)
                };
                a.expect(&near, &before);
                b.expect(&far, &new.to_le_bytes());
                a.qp.post_send(&[request]).unwrap();
                a.complete(&what);
                a.check(&near, &what);
                b.check(&far, &what);
            }
        }
        moved += len;
    }
    // No other memory was written.
    assert!(a.buffer.read(0, MEMORY) == a.expected);
    assert!(b.buffer.read(0, MEMORY) == b.expected);
}
