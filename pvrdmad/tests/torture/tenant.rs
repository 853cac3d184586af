//! Tenants and their traffic. Every byte of it is compared with a model, and so is memory that must not change.

use std::time::Duration;

use pvrdma_base::Counter;
use pvrdma_dev::{
    DeviceStatus, KeptStatus,
    testing::{
        AddressHandle, Buffer, Context, Cq, Driver, GuestMemory, Mr, Path, Pd, Placement, Qp, QpInit, RecvWr, SendWr,
        access, status,
    },
};
use pvrdma_verbs::testing::{gid, mac};
use pvrdma_verbs_types::Gid;
use pvrdmad::testing::{Dice, NO_LOAD, PSN, Target};

use crate::machine::Machine;
use crate::network::{BEYOND, Network};

/// Memory of a guest.
pub(crate) const MEMORY: usize = 4 << 20;
/// Operations of a batch, which is also the number of slices in each half of a buffer.
const SLOTS: usize = 4;
const SLICE: usize = 12 << 10;
/// The first half of a buffer has the sources, the second half the targets.
const HALF: usize = SLOTS * SLICE;
/// Longest transfer.
const LONGEST: usize = SLICE / 2;
/// Bytes before the payload of a datagram.
const GRH: usize = 40;
/// The only secret; attackers know everything else.
const QKEY: u32 = 0x0bad_cafe;
/// Longest duration of a batch. In virtual time it includes retries; with threads it is CPU time, which only a hang
/// exceeds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Further counters that stay at zero: tenants do not flush, run out of receives, or bind other addresses.
const NEVER_HERE: [&str; 4] = ["gids_refused", "flushed", "ud_dropped_no_receive", "ud_too_long"];

/// A well-behaved guest.
pub(crate) struct Tenant {
    pub(crate) number: u8,
    pub(crate) gid: Gid,
    pub(crate) machine: Machine,
    pub(crate) driver: Driver,
}

impl Tenant {
    pub(crate) fn new(network: &Network, number: u8, seed: u64) -> Self {
        Self::begin(network.machine(number, GuestMemory::new(MEMORY), seed), number)
    }

    /// Creates a tenant on a machine without a driver.
    pub(crate) fn begin(machine: Machine, number: u8) -> Self {
        let driver = machine.driver();
        driver.bind_gid(0, gid(number)).unwrap();
        Self { number, gid: gid(number), machine, driver }
    }

    pub(crate) fn status(&self) -> DeviceStatus {
        self.machine.test.device.status()
    }

    /// Returns the resources that the process holds for the guest.
    pub(crate) fn kept(&self) -> KeptStatus {
        self.status().kept
    }

    /// Checks that no counter of errors or attacks has increased.
    pub(crate) fn check_counters(&self) {
        let DeviceStatus { counters, adapter, .. } = self.status();
        let all: Vec<Counter> = [counters, adapter].concat();
        for name in NO_LOAD.into_iter().chain(NEVER_HERE) {
            let count = all.iter().find(|count| count.name == name).unwrap_or_else(|| panic!("no counter {name}"));
            assert_eq!(count.value, 0, "{name} of guest {}", self.number);
        }
    }
}

/// One end of a connection.
pub(crate) struct End {
    number: u8,
    gid: Gid,
    context: Context,
    pd: Pd,
    cq: Cq,
    qp: Qp,
    /// Queue pair for datagrams.
    ud: Qp,
    buffer: Buffer,
    mr: Mr,
    /// Expected content of the buffer.
    model: Vec<u8>,
    /// Memory that only its owner may access.
    private: Buffer,
    private_mr: Mr,
    /// Identifiers of requests that have not completed, and of receives.
    sends: Vec<u64>,
    receives: Vec<u64>,
    /// Offsets of datagram headers (GRH), whose content the model does not predict.
    headers: Vec<usize>,
    driver: Driver,
}

impl End {
    fn new(tenant: &Tenant, dice: &mut Dice) -> Self {
        let driver = &tenant.driver;
        let context = driver.open().unwrap();
        let pd = driver.create_pd(Some(&context)).unwrap();
        let cq = driver.create_cq(Some(&context), 64).unwrap();
        let qp = driver.create_qp(&QpInit::rc(&pd, &cq)).unwrap();
        let mut ud = driver.create_qp(&QpInit::ud(&pd, &cq)).unwrap();
        ud.start_datagrams(QKEY).unwrap();
        let buffer = driver.buffer(2 * HALF, dice.below(4096), Placement::Scattered);
        let mr = driver.reg_mr(&pd, &buffer, access::ALL).unwrap();
        let model = dice.bytes(buffer.len());
        buffer.write(0, &model);
        let (private, private_mr) = driver.registered_buffer(&pd, 8192, access::LOCAL_WRITE).unwrap();
        private.fill_pattern(7);
        let (sends, receives, headers) = (Vec::new(), Vec::new(), Vec::new());
        let (number, gid, driver) = (tenant.number, tenant.gid, driver.clone());
        Self {
            number,
            gid,
            context,
            pd,
            cq,
            qp,
            ud,
            buffer,
            mr,
            model,
            private,
            private_mr,
            sends,
            receives,
            headers,
            driver,
        }
    }

    fn connect(&mut self, peer: &Target, timeout: u8) {
        let path = Path { dmac: mac(peer.number).0, timeout, ..Path::to(peer.gid, peer.qpn) };
        self.qp.connect(&path).unwrap();
    }

    fn target(&self, peer: &Self) -> Target {
        Target {
            number: self.number,
            gid: self.gid,
            qpn: self.qp.qpn,
            datagram_qpn: self.ud.qpn,
            psn: PSN,
            addr: self.buffer.va(),
            rkey: self.mr.rkey,
            peer: peer.gid,
            peer_qpn: peer.qp.qpn,
        }
    }

    /// Writes to the buffer and the model.
    fn store(&mut self, at: usize, bytes: &[u8]) {
        self.buffer.write(at, bytes);
        self.expect(at, bytes);
    }

    /// Records data that the peer will write in the model.
    fn expect(&mut self, at: usize, bytes: &[u8]) {
        self.model[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Polls completions.
    fn poll(&mut self) {
        while let Some(cqe) = self.cq.poll() {
            assert_eq!(cqe.status, status::SUCCESS, "guest {}: {cqe:?}", self.number);
            let waiting = if cqe.opcode >= 128 { &mut self.receives } else { &mut self.sends };
            let at = waiting.iter().position(|&name| name == cqe.wr_id);
            waiting.remove(at.unwrap_or_else(|| panic!("no request waits for {cqe:?}")));
        }
        // Polls like the kernel's interrupt handlers.
        self.driver.notifications();
    }

    /// Moves the queue pairs to the error state, which flushes all requests.
    pub(crate) fn fail(&mut self) {
        [&mut self.qp, &mut self.ud].into_iter().for_each(|qp| qp.to_error().unwrap());
    }

    /// Polls completions while the peer is gone. Returns their statuses.
    pub(crate) fn poll_any(&mut self) -> Vec<u32> {
        let mut statuses = Vec::new();
        while let Some(cqe) = self.cq.poll() {
            let waiting = [&mut self.sends, &mut self.receives];
            let known = waiting.into_iter().find_map(|list| {
                let at = list.iter().position(|&name| name == cqe.wr_id)?;
                Some(list.remove(at))
            });
            assert!(known.is_some(), "no request waits for {cqe:?}");
            statuses.push(cqe.status);
        }
        self.driver.notifications();
        self.driver.async_events();
        statuses
    }

    /// Sends to a peer that is gone.
    pub(crate) fn send_into_the_void(&mut self, name: u64) {
        self.sends.push(name);
        let request = SendWr::send(name, &[self.buffer.sge(&self.mr, 0, SLICE)]);
        self.qp.publish_send(&[request]).unwrap();
        self.qp.ring_send();
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.sends.is_empty() && self.receives.is_empty()
    }

    /// Destroys all objects.
    pub(crate) fn end(self) {
        let Self { context, pd, cq, qp, ud, buffer, mr, private, private_mr, .. } = self;
        [qp, ud].into_iter().for_each(|qp| qp.destroy().unwrap());
        [mr, private_mr].into_iter().for_each(|mr| mr.destroy().unwrap());
        cq.destroy().unwrap();
        pd.destroy().unwrap();
        context.close().unwrap();
        [buffer, private].into_iter().for_each(Buffer::free);
    }

    pub(crate) fn check(&mut self) {
        for at in std::mem::take(&mut self.headers) {
            let header = self.buffer.read(at, GRH);
            self.expect(at, &header);
        }
        assert!(self.buffer.read(0, 2 * HALF) == self.model, "bytes of guest {} are wrong", self.number);
        self.check_private();
    }

    pub(crate) fn check_private(&self) {
        assert!(self.private.read(0, 8192) == Buffer::pattern(7, 8192), "memory of guest {} was changed", self.number);
    }
}

/// A connection with verified traffic.
pub(crate) struct Flow {
    ends: [End; 2],
    dice: Dice,
    /// Start of the batch in progress.
    since: Option<Duration>,
    pub(crate) batches: u64,
    /// Datagrams are part of the traffic, because no link loses them.
    datagrams: bool,
    /// Ends that have sent a request to the other end. From then on the connection has an identity.
    has_asked: [bool; 2],
}

impl Flow {
    /// `timeout`: the code of the ACK timeout.
    pub(crate) fn new(left: &Tenant, right: &Tenant, timeout: u8, mut dice: Dice) -> Self {
        let mut ends = [left, right].map(|tenant| End::new(tenant, &mut dice));
        let targets = Self::targets_of(&ends);
        ends[0].connect(&targets[1], timeout);
        ends[1].connect(&targets[0], timeout);
        let datagrams = ends.iter().all(|end| end.number != BEYOND);
        Self { ends, dice, since: None, batches: 0, datagrams, has_asked: [false; 2] }
    }

    fn targets_of(ends: &[End; 2]) -> [Target; 2] {
        let [left, right] = ends;
        [left.target(right), right.target(left)]
    }

    pub(crate) fn targets(&self) -> [Target; 2] {
        Self::targets_of(&self.ends)
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.since.is_none()
    }

    /// Returns `true` if both ends know each other's identity and no request is outstanding. Otherwise the first
    /// request would be checked by its PSN alone, which attackers know here.
    pub(crate) fn is_settled(&self) -> bool {
        self.is_idle() && self.has_asked == [true; 2]
    }

    /// Returns the end that remains when a guest leaves, whatever requests are outstanding.
    pub(crate) fn part(self, gone: u8) -> (End, Target) {
        let [left, right] = self.targets();
        let [first, second] = self.ends;
        if first.number == gone { (second, right) } else { (first, left) }
    }

    /// Starts a batch, or checks the one in progress.
    pub(crate) fn step(&mut self, now: Duration) {
        match self.since {
            None => self.start(now),
            Some(_) => self.look(now),
        }
    }

    /// Checks the batch in progress, if any.
    pub(crate) fn look(&mut self, now: Duration) {
        let Some(since) = self.since else { return };
        self.ends.iter_mut().for_each(End::poll);
        if self.ends.iter().all(|end| end.sends.is_empty() && end.receives.is_empty()) {
            self.ends.iter_mut().for_each(End::check);
            self.since = None;
            self.batches += 1;
        } else {
            let [left, right] = self.ends.each_ref().map(|end| (end.number, &end.sends, &end.receives));
            assert!(now < since + PATIENCE, "no completion: {left:?} {right:?}");
        }
    }

    fn start(&mut self, now: Duration) {
        let Self { ends: [left, right], dice, datagrams, has_asked, .. } = self;
        let (me, peer, has_asked) =
            if dice.one_in(2) { (left, right, &mut has_asked[0]) } else { (right, left, &mut has_asked[1]) };
        let (rkey, to) = (peer.mr.rkey, AddressHandle::new(me.pd.handle, peer.gid));
        for slot in 0..=dice.below(SLOTS) {
            let name = self.batches << 8 | slot as u64;
            let (from, to_at) = (slot * SLICE + dice.below(LONGEST), HALF + slot * SLICE + dice.below(LONGEST));
            let len = dice.below(LONGEST + 1);
            let bytes = dice.bytes(len);
            let remote = |end: &End, at: usize| end.buffer.va() + at as u64;
            let mut datagram = false;
            let request = match dice.below(if *datagrams { 6 } else { 5 }) {
                0 => {
                    me.store(from, &bytes);
                    peer.expect(to_at, &bytes);
                    SendWr::write(name, &[me.buffer.sge(&me.mr, from, len)], remote(peer, to_at), rkey)
                }
                1 => {
                    peer.store(from, &bytes);
                    me.expect(to_at, &bytes);
                    SendWr::read(name, &[me.buffer.sge(&me.mr, to_at, len)], remote(peer, from), rkey)
                }
                2 => {
                    // Atomic operations use the address of a word.
                    let at = from + (8 - (remote(peer, from) % 8) as usize) % 8;
                    let old: [u8; 8] = peer.model[at..at + 8].try_into().unwrap();
                    let add = dice.long();
                    peer.expect(at, &u64::from_le_bytes(old).wrapping_add(add).to_le_bytes());
                    me.expect(to_at, &old);
                    SendWr::fetch_add(name, me.buffer.sge(&me.mr, to_at, 8), remote(peer, at), rkey, add)
                }
                3 | 4 => {
                    peer.qp.post_recv(&[RecvWr::new(name, &[peer.buffer.sge(&peer.mr, to_at, len)])]).unwrap();
                    peer.receives.push(name);
                    me.store(from, &bytes);
                    peer.expect(to_at, &bytes);
                    // The message is sent from two SGEs.
                    let cut = dice.below(len + 1);
                    let pieces = [(from, cut), (from + cut, len - cut)];
                    SendWr::send(name, &pieces.map(|(at, len)| me.buffer.sge(&me.mr, at, len)))
                }
                _ => {
                    let len = len.min(1000);
                    let room = peer.buffer.sge(&peer.mr, to_at, GRH + len);
                    peer.ud.post_recv(&[RecvWr::new(name, &[room])]).unwrap();
                    peer.receives.push(name);
                    me.store(from, &bytes[..len]);
                    peer.headers.push(to_at);
                    peer.expect(to_at + GRH, &bytes[..len]);
                    datagram = true;
                    SendWr::datagram(name, &[me.buffer.sge(&me.mr, from, len)], &to, peer.ud.qpn, QKEY)
                }
            };
            me.sends.push(name);
            *has_asked |= !datagram;
            let qp = if datagram { &mut me.ud } else { &mut me.qp };
            qp.publish_send(&[request]).unwrap();
            // Sometimes one doorbell announces several requests.
            if dice.one_in(2) {
                qp.ring_send();
            }
        }
        me.qp.ring_send();
        me.ud.ring_send();
        self.since = Some(now);
    }
}
