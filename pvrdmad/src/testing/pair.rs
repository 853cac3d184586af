//! Two guests with a lasting connection, and its traffic beside other actions.
#![expect(clippy::unwrap_used, reason = "for tests: a panic fails the test")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use pvrdma_dev::testing::{Buffer, Cq, Driver, Mr, Path, Qp, QpInit, RecvWr, SendWr, access, status};
use pvrdma_verbs_types::Gid;

/// Bytes of a transfer.
const LENGTH: usize = 100_001;

/// Returns the address of a guest, which is the same in each network.
pub fn gid(number: u8) -> Gid {
    let mut gid = Gid::default();
    gid.0[10..12].fill(0xff);
    gid.0[12..].copy_from_slice(&[10, 44, 0, number]);
    gid
}

/// Two guests with a connection.
#[expect(missing_debug_implementations, reason = "the drivers of tests have none")]
pub struct Pair {
    guests: [Guest; 2],
    round: u8,
}

struct Guest {
    cq: Cq,
    qp: Qp,
    buffer: Buffer,
    mr: Mr,
    _driver: Driver,
}

impl Guest {
    fn new(driver: Driver, number: u8) -> Self {
        driver.bind_gid(0, gid(number)).unwrap();
        let pd = driver.create_pd(None).unwrap();
        let cq = driver.create_cq(None, 64).unwrap();
        let qp = driver.create_qp(&QpInit::rc(&pd, &cq)).unwrap();
        let (buffer, mr) = driver.registered_buffer(&pd, LENGTH, access::ALL).unwrap();
        Self { cq, qp, buffer, mr, _driver: driver }
    }
}

impl Pair {
    /// Connects two guests with new devices of one network.
    pub fn new(drivers: [Driver; 2]) -> Self {
        Self::with_macs(drivers, [Path::to(gid(1), 0).dmac; 2])
    }

    /// Connects two guests with new devices that have these MAC addresses. They matter between networks.
    pub fn with_macs([left, right]: [Driver; 2], macs: [[u8; 6]; 2]) -> Self {
        let mut guests = [Guest::new(left, 1), Guest::new(right, 2)];
        let numbers = guests.each_ref().map(|guest| guest.qp.qpn);
        let [left, right] = &mut guests;
        // A second between two retries, so that the connection survives the actions of the test.
        left.qp.connect(&Path { timeout: 18, dmac: macs[1], ..Path::to(gid(2), numbers[1]) }).unwrap();
        right.qp.connect(&Path { timeout: 18, dmac: macs[0], ..Path::to(gid(1), numbers[0]) }).unwrap();
        Self { guests, round: 0 }
    }

    /// Returns the numbers of the queue pairs.
    pub fn numbers(&self) -> [u32; 2] {
        self.guests.each_ref().map(|guest| guest.qp.qpn)
    }

    /// Returns the pages of the second guest to which only devices write.
    pub fn written_pages(&self) -> Vec<u64> {
        let [_, right] = &self.guests;
        right.buffer.pages().to_vec()
    }

    /// Writes from the first guest to the second, and compares every byte.
    pub fn exchange(&mut self) {
        self.post();
        self.complete();
    }

    /// Posts the write, and a send after it.
    pub fn post(&mut self) {
        self.round = self.round.wrapping_add(1);
        let [left, right] = &mut self.guests;
        left.buffer.fill_pattern(self.round.into());
        let to = right.buffer.sge(&right.mr, 0, LENGTH);
        right.qp.post_recv(&[RecvWr::new(1, &[])]).unwrap();
        let from = [left.buffer.sge(&left.mr, 0, LENGTH)];
        let requests = [SendWr::write(2, &from, to.addr, right.mr.rkey), SendWr::send(3, &[])];
        left.qp.post_send(&requests).unwrap();
    }

    /// Waits until the posted requests are complete.
    pub fn complete(&mut self) {
        let [left, right] = &mut self.guests;
        assert!(left.cq.wait_many(2).iter().all(|done| done.status == status::SUCCESS));
        assert_eq!(right.cq.wait().status, status::SUCCESS);
        assert!(right.buffer.read(0, LENGTH) == left.buffer.read(0, LENGTH), "round {}", self.round);
    }
}

/// Runs `meanwhile` beside traffic of a pair. Every round of traffic is compared, including at least one before and one
/// after.
pub fn beside_traffic(pair: &mut Pair, meanwhile: impl FnOnce()) {
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let traffic = scope.spawn(|| {
            while !stop.load(Ordering::Acquire) {
                pair.exchange();
                rounds.fetch_add(1, Ordering::AcqRel);
            }
        });
        let one_more = || {
            let now = rounds.load(Ordering::Acquire);
            while rounds.load(Ordering::Acquire) < now + 2 && !traffic.is_finished() {
                thread::yield_now();
            }
        };
        one_more();
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(meanwhile));
        one_more();
        stop.store(true, Ordering::Release);
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
    });
}
