//! A hostile process in a tenant's guest. It controls its queues and its doorbell page, but not the kernel.
#![expect(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "for tests: a panic fails the test")]

use pvrdma_dev::testing::{Buffer, Context, Cq, Driver, DriverRing, Mr, Path, Pd, Qp, QpInit, SendWr, access};
use pvrdma_verbs_types::Gid;

use super::{Dice, PSN, Target, Targets};

/// The process.
#[expect(missing_debug_implementations, reason = "the drivers of tests have none")]
pub struct HostileProcess {
    own: Gid,
    driver: Driver,
    context: Context,
    pd: Pd,
    cq: Cq,
    qps: Vec<Qp>,
    buffer: Buffer,
    mr: Mr,
    regions: Vec<Mr>,
    targets: Targets,
    dice: Dice,
}

impl HostileProcess {
    /// Starts the process in the guest of this driver, which has this address.
    pub fn new(driver: &Driver, own: Gid, targets: Targets, dice: Dice) -> Self {
        let context = driver.open().unwrap();
        let pd = driver.create_pd(Some(&context)).unwrap();
        let cq = driver.create_cq(Some(&context), 64).unwrap();
        let (buffer, mr) = driver.registered_buffer(&pd, 16 << 10, access::ALL).unwrap();
        let (driver, qps, regions) = (driver.clone(), Vec::new(), Vec::new());
        Self { own, driver, context, pd, cq, qps, buffer, mr, regions, targets, dice }
    }

    /// Does one random thing.
    pub fn step(&mut self) {
        match self.dice.below(32) {
            0 => self.create(),
            1 => self.destroy(),
            2 | 8 | 9 => self.modify(),
            3 => self.register(),
            4 => {
                let (page, value) = (self.context.uar, self.dice.word() & 0xff00_0000 | self.dice.number() & 0xff_ffff);
                self.driver.pci().doorbell(page, 4 * self.dice.below(5) as u64, value);
            }
            5 => self.index(),
            6 => {
                // Polls like the kernel's interrupt handlers.
                drop(self.driver.async_events());
                drop(self.driver.notifications());
            }
            7 => {
                let rings = self.rings();
                let ring = &rings[self.dice.below(rings.len())];
                let at = ring.slot(self.dice.word() % ring.entries()) + 4 * self.dice.below(4) as u64;
                self.driver.memory().store(at, self.dice.number());
            }
            _ => self.post(),
        }
    }

    /// Destroys all objects of the process.
    pub fn end(self) {
        self.qps.into_iter().for_each(|qp| qp.destroy().unwrap());
        self.regions.into_iter().chain([self.mr]).for_each(|mr| mr.destroy().unwrap());
        self.cq.destroy().unwrap();
        self.pd.destroy().unwrap();
        self.context.close().unwrap();
        self.buffer.free();
        drop(self.driver.async_events());
    }

    fn rings(&self) -> Vec<DriverRing> {
        let rings = self.qps.iter().flat_map(|qp| [qp.send_ring().clone(), qp.recv_ring().clone()]);
        rings.chain([self.cq.ring().clone()]).collect()
    }

    fn create(&mut self) {
        if self.qps.len() < 6 {
            let init = if self.dice.one_in(3) { QpInit::ud } else { QpInit::rc };
            let mut qp = self.driver.create_qp(&init(&self.pd, &self.cq)).unwrap();
            let target = self.targets.pick(&mut self.dice);
            // Depending on the kind of the queue pair, one of these is refused.
            let _ = qp.connect(&Path { rq_psn: target.psn, ..Path::to(target.gid, target.qpn) });
            let _ = qp.start_datagrams(self.dice.number());
            self.qps.push(qp);
        }
    }

    fn destroy(&mut self) {
        if !self.qps.is_empty() {
            let at = self.dice.below(self.qps.len());
            self.qps.swap_remove(at).destroy().unwrap();
        }
    }

    fn modify(&mut self) {
        let target = self.targets.pick(&mut self.dice);
        let Some(at) = self.qps.len().checked_sub(1).map(|last| self.dice.below(last + 1)) else { return };
        // Connects to a queue pair of its own, or of a victim.
        let (to, peer) = match self.dice.below(3) {
            0 => (target.gid, target.qpn),
            1 => (self.own, self.qps[at].qpn),
            _ => (self.own, self.qps[self.dice.below(self.qps.len())].qpn),
        };
        let qp = &mut self.qps[at];
        let _ = match self.dice.below(4) {
            0 => qp.to_error(),
            1 => qp.to_reset(),
            _ => qp.to_reset().and_then(|()| {
                let timeout = self.dice.pick(&[0, 1, 14]);
                let rq_psn = if self.dice.one_in(4) { self.dice.word() & 0xff_ffff } else { target.psn };
                qp.connect(&Path { timeout, rq_psn, ..Path::to(to, peer) })
            }),
        };
    }

    fn register(&mut self) {
        if self.regions.len() < 8 {
            let pages = self.buffer.pages().to_vec();
            let (start, rights) = (self.dice.long(), self.dice.number());
            // Any addresses for its own pages, which the kernel pins for it.
            let length = (4096 * pages.len()) as u64 - start % 4096;
            self.regions.extend(self.driver.reg_mr_pages(&self.pd, start, length, &pages, rights));
        } else {
            let at = self.dice.below(self.regions.len());
            self.regions.swap_remove(at).destroy().unwrap();
        }
    }

    /// Stores an index of a ring: its own, or the device's.
    fn index(&mut self) {
        let rings = self.rings();
        let ring = &rings[self.dice.below(rings.len())];
        let value = self.dice.number();
        if self.dice.one_in(2) { ring.set_prod_tail(value) } else { ring.set_cons_head(value) }
    }

    /// Writes a partly valid random element, and publishes it.
    fn post(&mut self) {
        let Some(at) = self.qps.len().checked_sub(1).map(|last| self.dice.below(last + 1)) else { return };
        // Most requests end their queue pair, and later ones would have no effect.
        if self.dice.one_in(2) {
            let (qp, psn) = (&mut self.qps[at], PSN);
            let path = Path { rq_psn: psn, sq_psn: psn, ..Path::to(self.own, qp.qpn) };
            let _ = qp.to_reset().and_then(|()| qp.connect(&path));
        }
        let (qp, dice) = (&self.qps[at], &mut self.dice);
        let target = self.targets.pick(dice);
        let mut bytes = element(dice, &target, self.pd.handle, self.buffer.va(), self.mr.lkey);
        let send = dice.below(4) != 0;
        let ring = if send { qp.send_ring() } else { qp.recv_ring() };
        if !send {
            // A receive element starts like a send element, but its list of SGEs starts earlier.
            drop(bytes.drain(16..80));
        }
        bytes.truncate(ring.stride() as usize);
        let tail = ring.prod_tail();
        self.driver.memory().write(ring.slot(tail % ring.entries()), &bytes);
        ring.set_prod_tail(ring.next(tail));
        match dice.below(3) {
            0 => {}
            1 => qp.ring_send(),
            _ => qp.ring_recv(),
        }
    }
}

/// Returns a send element that may be valid. Keys and addresses are those of a victim, or the attacker's own.
pub fn element(dice: &mut Dice, target: &Target, pd: u32, own: u64, key: u32) -> Vec<u8> {
    let mut bytes = SendWr::write(dice.long(), &[], target.addr + dice.below(4096) as u64, target.rkey).encode(true);
    bytes.extend(dice.bytes(64));
    let lawful = dice.one_in(2);
    let (count, code) = if lawful { (1, dice.pick(&[0, 2, 4])) } else { (dice.number() % 7, dice.word() % 13) };
    bytes[8..12].copy_from_slice(&count.to_le_bytes());
    bytes[16..20].copy_from_slice(&code.to_le_bytes());
    bytes[20..24].copy_from_slice(&dice.number().to_le_bytes());
    if !lawful && dice.one_in(3) {
        // To a datagram queue pair, with a wrong Q_Key.
        bytes[32..36].copy_from_slice(&dice.pick(&[target.datagram_qpn, target.qpn, 1]).to_le_bytes());
        bytes[36..40].copy_from_slice(&dice.number().to_le_bytes());
        bytes[40..44].copy_from_slice(&(pd | 1 << 24).to_le_bytes());
        bytes[48..64].copy_from_slice(&target.gid.0);
    }
    for at in (80..144).step_by(16) {
        let (address, key) = if dice.one_in(4) { (target.addr, target.rkey) } else { (own, key) };
        bytes[at..at + 8].copy_from_slice(&address.to_le_bytes());
        bytes[at + 8..at + 12].copy_from_slice(&(dice.number() % 5000).to_le_bytes());
        bytes[at + 12..at + 16].copy_from_slice(&key.to_le_bytes());
    }
    bytes
}
