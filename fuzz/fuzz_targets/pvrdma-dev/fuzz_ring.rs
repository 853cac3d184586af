//! Two guests with connected queue pairs that write anything to their rings at any time.
//!
//! The device may write its indices, completions, events, and registered memory. All other memory is compared.
#![no_main]

use std::ops::Range;
use std::time::Duration;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use pvrdma_dev::testing::{
    AddressHandle, Buffer, Context, Cq, Driver, DriverRing, FastMr, MEMORY_BASE, Mr, Path, Pd, Qp, QpAttr, QpInit,
    RecvWr, SendWr, Srq, access,
};
use pvrdma_fuzz::{
    input::{Many, Steps},
    pvrdma_dev::{Guest, PAGE, Word, World, gid},
};
use pvrdma_pci_function::PciFunction;
use pvrdma_verbs_types::Sge;

const MEMORY: usize = 256 << 10;
const QKEY: u32 = 0x1234;
const QPS: u8 = 4;

#[derive(Arbitrary, Debug)]
struct Input {
    /// The queues of each guest belong to a process, and otherwise to its kernel.
    user: [bool; 2],
    steps: Steps<(bool, Step)>,
}

/// A scatter/gather entry.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Piece {
    /// In the registered buffer.
    Inside(u16, u16),
    /// Perhaps across its end.
    Across(i16, u16),
    /// With the wrong key.
    Key(u8),
    Any(u64, u32, u32),
}

impl Piece {
    /// A piece of the registered buffer.
    const fn tame(self) -> Self {
        match self {
            Self::Inside(at, len) => Self::Inside(at, len),
            Self::Across(at, len) => Self::Inside(at.unsigned_abs(), len),
            Self::Key(at) => Self::Inside(at as u16, 8),
            Self::Any(at, len, _) => Self::Inside(at as u16, len as u16),
        }
    }
}

/// Decides whether an input is used unchanged. Most requests are made valid, because an invalid one often ends its
/// queue pair.
#[derive(Arbitrary, Clone, Copy, Debug)]
struct Wild(u8);

impl Wild {
    const fn is_wild(self) -> bool {
        self.0 >= 200
    }
}

#[derive(Arbitrary, Debug)]
enum Element {
    Write(Vec<Piece>, i16),
    Read(Vec<Piece>, i16),
    Send(Vec<Piece>),
    Atomic(Piece, i16, bool),
    Datagram(Vec<Piece>, u8, Word),
    FastRegister { key: u8, pages: u8, length: u16, directory: bool },
    Invalidate(u8),
    Any(Vec<Piece>, Many<u8>),
}

#[derive(Arbitrary, Debug)]
enum Step {
    /// Posts an element: queue pair, element, flags, immediate, changes of single bytes, doorbell.
    Send(Wild, u8, Element, u8, bool, Vec<(u8, u8)>, bool),
    /// Posts a receive element, with the same fields. Queue pair 1 has the shared queue.
    Receive(Wild, u8, Vec<Piece>, Option<Word>, bool),
    /// Writes an index of a ring: ring, which of the two, value.
    Index(u8, bool, Word),
    /// Bytes of the pages of a ring.
    Octets(u8, u16, Many<u8>),
    /// Takes all completions.
    Consume,
    Doorbell(u8, u8, u8, Word),
    Arm(bool),
    /// Requests a state, with the attributes of that transition.
    Modify(u8, u8),
    /// Once more from RESET to RTS.
    Reconnect(u8),
    Destroy(u8),
    Limit(Word),
    /// A part of memory goes or comes back.
    Plug(u8),
    BusMaster(bool),
    Reset,
    Time(u16),
}

/// One guest with everything in it.
struct Side {
    guest: Guest,
    driver: Driver,
    user: bool,
    qps: [Option<Qp>; QPS as usize],
    peers: [u32; QPS as usize],
    cq: Option<Cq>,
    srq: Option<Srq>,
    mr: Option<Mr>,
    fast: Option<FastMr>,
    buffer: Buffer,
    rings: Vec<DriverRing>,
    pd: Pd,
    _context: Option<Context>,
    host: u8,
    /// Expected content of memory, except where the device may write.
    shadow: Vec<u8>,
    /// Room for memory as it is.
    now: Vec<u8>,
    /// Nothing may be written at all.
    frozen: bool,
    /// Destroyed objects, see [`Side::destroy`]: the device must not write to their memory.
    dead: [bool; 8],
    unplugged: [bool; 4],
}

impl Side {
    fn new(world: &World, host: u8, user: bool) -> Self {
        let guest = world.guest(host, MEMORY);
        let driver = guest.probe();
        driver.bind_gid(0, gid(host)).unwrap();
        let context = user.then(|| driver.open().unwrap());
        let pd = driver.create_pd(context.as_ref()).unwrap();
        let cq = driver.create_cq(context.as_ref(), 64).unwrap();
        let srq = driver.create_srq(&pd, 8, 2, 1).unwrap();
        let (buffer, mr) = driver.registered_buffer(&pd, 5 * PAGE as usize, access::ALL).unwrap();
        let fast = (!user).then(|| driver.fast_mr(&pd, 4).unwrap());
        let small = QpInit { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 3, max_recv_sge: 2, ..QpInit::rc(&pd, &cq) };
        let qps = [
            small,
            QpInit { srq: Some(&srq), ..small },
            QpInit { max_send_wr: 1, max_recv_wr: 2, signal_all: true, ..small },
            QpInit { qp_type: 4, ..small },
        ]
        .map(|init| driver.create_qp(&init).unwrap());
        let mut rings = vec![cq.ring().clone(), srq.ring().clone()];
        rings.extend(qps.iter().map(|qp| qp.send_ring().clone()));
        rings.extend([0, 2, 3].map(|index: usize| qps[index].recv_ring().clone()));
        rings.extend([driver.async_ring().clone(), driver.notification_ring().clone()]);
        Self {
            guest,
            user,
            qps: qps.map(Some),
            peers: [0; QPS as usize],
            cq: Some(cq),
            srq: Some(srq),
            mr: Some(mr),
            fast,
            buffer,
            rings,
            pd,
            _context: context,
            host,
            shadow: Vec::new(),
            now: Vec::new(),
            frozen: false,
            dead: [false; 8],
            unplugged: [false; 4],
            driver,
        }
    }

    fn connect(&mut self, index: usize, other: u8) {
        let peer = self.peers[index];
        let Some(qp) = &mut self.qps[index] else { return };
        // Refused by a QP in an unexpected state, or by a device that is off.
        let _ = qp.to_reset();
        let connected = if index == 3 {
            qp.start_datagrams(QKEY)
        } else {
            qp.connect(&Path { access: access::ALL, rnr_retry: 3, retry_cnt: 2, ..Path::to(gid(other), peer) })
        };
        if connected.is_ok() {
            self.receive(index);
        }
        self.accept_indices();
    }

    /// Posts receives that take any message.
    fn receive(&mut self, index: usize) {
        let queue = [6, 1, 7, 8][index];
        let request = RecvWr::new(21, &[self.sge(Piece::Inside(0, 0x4fff))]).encode();
        for _ in 0..2 {
            self.publish(&self.rings[queue].clone(), &request);
        }
        self.accept_indices();
    }

    /// Accepts changes of memory that the guest itself made through the driver.
    fn accept_indices(&mut self) {
        let words: Vec<u64> = self.rings.iter().map(DriverRing::prod_tail_address).collect();
        for address in words {
            self.accept(address..address + 8);
        }
    }

    /// Takes memory as it is.
    fn accept(&mut self, range: Range<u64>) {
        let at = (range.start - MEMORY_BASE) as usize;
        if let Some(shadow) = self.shadow.get_mut(at..at + (range.end - range.start) as usize) {
            self.guest.memory.read(range.start, shadow);
        }
    }

    /// Writes as the guest does.
    fn poke(&mut self, address: u64, bytes: &[u8]) {
        pvrdma_fuzz::pvrdma_dev::poke(&self.guest.memory, address, bytes);
        let at = (address - MEMORY_BASE) as usize;
        if let Some(shadow) = self.shadow.get_mut(at..) {
            let len = bytes.len().min(shadow.len());
            shadow[..len].copy_from_slice(&bytes[..len]);
        }
    }

    /// Compares memory with the expected content.
    fn check(&mut self) {
        let page = |page: u64| page..page + PAGE;
        let driver = self.driver.clone();
        // The request slot belongs to the driver, and so does the list of a registration.
        self.accept(page(driver.slots()[0]));
        if let Some(table) = self.fast.as_ref().and_then(|fast| Some(fast.mr.directory()?.tables[0])) {
            self.accept(page(table));
        }
        if !self.frozen {
            if !self.user {
                // A kernel may register any part of its memory with one request.
                self.guest.memory.read(MEMORY_BASE, &mut self.shadow);
            }
            self.accept(page(driver.slots()[1]));
            // The object of each ring. Event rings always belong to the device.
            let owners = [4, 5, 0, 1, 2, 3, 0, 2, 3];
            for index in 0..self.rings.len() {
                if owners.get(index).is_some_and(|&owner: &usize| self.dead[owner]) {
                    continue;
                }
                let ring = &self.rings[index];
                let (tail, head) = (ring.prod_tail_address(), ring.cons_head_address());
                // Completions and events are produced by the device, all other elements by the guest.
                if index == 0 || index >= self.rings.len() - 2 {
                    let per_page = (PAGE / ring.stride()) as usize;
                    let pages: Vec<u64> = (0..ring.entries()).step_by(per_page).map(|slot| ring.slot(slot)).collect();
                    self.accept(tail..tail + 4);
                    pages.into_iter().for_each(|at| self.accept(page(at)));
                } else {
                    self.accept(head..head + 4);
                }
            }
            if !self.dead[6] {
                for at in self.buffer.pages().to_vec() {
                    self.accept(page(at));
                }
            }
        }
        self.now.resize(self.shadow.len(), 0);
        self.guest.memory.read(MEMORY_BASE, &mut self.now);
        if self.now != self.shadow {
            let at = self.now.iter().zip(&self.shadow).position(|(a, b)| a != b).unwrap_or_default();
            panic!("guest {}: byte {:#x} was written (frozen: {})", self.host, MEMORY_BASE + at as u64, self.frozen);
        }
    }

    /// Records whether the device may write from now on.
    fn update_frozen(&mut self, frozen: bool) {
        self.check();
        self.frozen = frozen;
    }

    fn sge(&self, piece: Piece) -> Sge {
        let lkey = self.mr.as_ref().map_or(0x100, |mr| mr.lkey);
        let (va, len) = (self.buffer.va(), self.buffer.len() as u64);
        match piece {
            Piece::Inside(at, length) => {
                let at = u64::from(at) % len;
                Sge { addr: va + at, length: (u64::from(length) % (len - at)) as u32, lkey }
            }
            Piece::Across(at, length) => Sge { addr: va.wrapping_add_signed(at.into()), length: length.into(), lkey },
            Piece::Key(off) => Sge { addr: va, length: 8, lkey: lkey ^ u32::from(off) },
            Piece::Any(addr, length, lkey) => Sge { addr, length, lkey },
        }
    }

    fn sges(&self, wild: Wild, pieces: &[Piece], most: usize) -> Vec<Sge> {
        let (tame, most) = (|piece: Piece| if wild.is_wild() { piece } else { piece.tame() }, most);
        pieces.iter().take(if wild.is_wild() { 5 } else { most }).map(|&piece| self.sge(tame(piece))).collect()
    }

    fn fast_key(&self, off: u8) -> u32 {
        self.fast.as_ref().map_or(0x100, |fast| fast.mr.rkey & !3 | u32::from(off % 4))
    }

    /// Returns an element with this buffer for the other side.
    fn element(&self, wild: Wild, datagram: bool, element: &Element, peer: &Self) -> SendWr {
        let key = peer.mr.as_ref().map_or(0x100, |mr| mr.rkey);
        let target = |at: i16| {
            let inside = peer.buffer.va() + u64::from(at.unsigned_abs() & 0xff8);
            if wild.is_wild() { peer.buffer.va().wrapping_add_signed(at.into()) } else { inside }
        };
        let sges = |pieces: &[Piece]| self.sges(wild, pieces, 3);
        let word = |piece: &Piece| match piece {
            _ if wild.is_wild() => self.sge(*piece),
            _ => Sge { length: 8, ..self.sge(Piece::Inside(64, 8)) },
        };
        match element {
            Element::Datagram(pieces, index, qkey) => {
                let to = AddressHandle::new(self.pd.handle, gid(peer.host));
                let qkey = if *index < 200 { QKEY } else { qkey.get() };
                SendWr::datagram(6, &sges(pieces), &to, self.peers[3], qkey)
            }
            // Requests that would only end the queue pair.
            Element::Write(pieces, _) | Element::Read(pieces, _) | Element::Send(pieces) | Element::Any(pieces, _)
                if datagram && !wild.is_wild() =>
            {
                let to = AddressHandle::new(self.pd.handle, gid(peer.host));
                let small: Vec<Sge> =
                    sges(pieces).into_iter().map(|sge| Sge { length: sge.length % 900, ..sge }).collect();
                SendWr::datagram(6, &small, &to, self.peers[3], QKEY)
            }
            Element::FastRegister { .. } | Element::Invalidate(_) if self.user && !wild.is_wild() => {
                SendWr::send(3, &[])
            }
            Element::Write(pieces, at) => SendWr::write(1, &sges(pieces), target(*at), key),
            Element::Read(pieces, at) => SendWr::read(2, &sges(pieces), target(*at), key),
            Element::Send(pieces) => SendWr::send(3, &sges(pieces)),
            Element::Atomic(piece, at, true) => SendWr::fetch_add(4, word(piece), target(*at & !7), key, 7),
            Element::Atomic(piece, at, false) => SendWr::compare_swap(5, word(piece), target(*at), key, 0, 9),
            Element::FastRegister { key, pages, length, directory } => {
                let (directory, key) = match &self.fast {
                    Some(fast) if *directory || !wild.is_wild() => {
                        (fast.set_pages(&self.buffer.pages()[..4]), self.fast_key(*key))
                    }
                    _ => (self.buffer.pages()[0], self.fast_key(*key)),
                };
                let pages = u32::from(pages % 6);
                SendWr::fast_register(7, key, 0x7000_0000, directory, pages, u32::from(*length), access::ALL)
            }
            Element::Invalidate(key) => SendWr::local_invalidate(8, self.fast_key(*key)),
            Element::Any(pieces, body) => {
                let opcode = body.0.first().copied().unwrap_or(11).into();
                let mut request = SendWr::new(9, opcode, &sges(pieces));
                request.body = body.0.iter().copied().take(48).collect();
                if wild.is_wild() { request } else { SendWr::write(9, &request.sges, target(0), key) }
            }
        }
    }

    /// Publishes an element in a ring as the driver does, if its indices make sense.
    fn publish(&mut self, ring: &DriverRing, bytes: &[u8]) {
        let tail = ring.prod_tail();
        let Some(slot) = ring.slot_of(tail) else { return };
        let len = bytes.len().min(ring.stride() as usize);
        self.poke(ring.slot(slot), &bytes[..len]);
        self.poke(ring.prod_tail_address(), &ring.next(tail).to_le_bytes());
    }

    fn doorbell(&self, page: u32, register: u8, value: u32) {
        let at = u64::from(page) * PAGE + u64::from(register) * 4;
        self.guest.device.bar_write(2, at, &value.to_le_bytes()).run(&*self.guest.device);
    }

    fn ring(&self, index: u8) -> DriverRing {
        self.rings[usize::from(index) % self.rings.len()].clone()
    }

    fn step(&mut self, peer: &mut Self, world: &World, step: &Step) {
        match step {
            Step::Send(wild, qp, element, flags, immediate, changes, ring) => {
                let mut request = self.element(*wild, qp % QPS == 3, element, peer).flags(u32::from(flags & 15));
                if *immediate && (wild.is_wild() || request.opcode < 4) {
                    request.ex = Some([1, 2, 3, 4]);
                    request.opcode |= 1;
                }
                let mut bytes = request.encode(self.user);
                let changes = if wild.is_wild() { changes } else { &Vec::new() };
                for (at, value) in changes.iter().take(3) {
                    if let Some(byte) = bytes.get_mut(usize::from(*at)) {
                        *byte = *value;
                    }
                }
                let index = usize::from(qp % QPS);
                self.publish(&self.rings[2 + index].clone(), &bytes);
                if let (Some(qp), true) = (&self.qps[index], ring) {
                    qp.ring_send();
                }
            }
            Step::Receive(wild, qp, pieces, count, ring) => {
                let num_sge = count.filter(|_| wild.is_wild()).map(Word::get);
                let request = RecvWr { num_sge, ..RecvWr::new(20, &self.sges(*wild, pieces, 2)) };
                let index = qp % QPS;
                let queue = [6, 1, 7, 8][usize::from(index)];
                self.publish(&self.rings[queue].clone(), &request.encode());
                match (index, &self.qps[usize::from(index)], &self.srq) {
                    (1, _, Some(srq)) if *ring => srq.ring_recv(),
                    (0 | 2 | 3, Some(qp), _) if *ring => qp.ring_recv(),
                    _ => {}
                }
            }
            Step::Index(index, tail, value) => {
                let ring = self.ring(*index);
                let at = if *tail { ring.prod_tail_address() } else { ring.cons_head_address() };
                self.poke(at, &value.get().to_le_bytes());
            }
            Step::Octets(index, at, data) => {
                let ring = self.ring(*index);
                let slot = u32::from(*at) % ring.entries();
                let len = data.0.len().min(ring.stride() as usize);
                self.poke(ring.slot(slot), &data.0[..len]);
            }
            Step::Consume => {
                if let Some(cq) = &self.cq {
                    let (ring, tail) = (cq.ring().clone(), cq.ring().prod_tail());
                    self.poke(ring.cons_head_address(), &tail.to_le_bytes());
                }
                for ring in [self.driver.async_ring().clone(), self.driver.notification_ring().clone()] {
                    self.poke(ring.cons_head_address(), &ring.prod_tail().to_le_bytes());
                }
            }
            Step::Doorbell(page, register, bits, handle) => {
                let value = u32::from(*bits) << 24 | handle.get() & 0x00ff_ffff;
                self.doorbell(u32::from(page % 9), register % 4, value);
            }
            Step::Arm(solicited) => match &self.cq {
                Some(cq) if *solicited => cq.arm_solicited(),
                Some(cq) => cq.arm(),
                None => {}
            },
            Step::Modify(qp, state) => {
                if let Some(qp) = &mut self.qps[usize::from(qp % QPS)] {
                    let _ = qp.modify(&QpAttr::to_state(u32::from(state % 8)));
                    self.accept_indices();
                }
            }
            Step::Reconnect(qp) => self.connect(usize::from(qp % QPS), peer.host),
            Step::Destroy(object) => self.destroy(*object),
            Step::Limit(limit) => {
                if let Some(srq) = &self.srq {
                    let _ = srq.set_limit(limit.get());
                }
            }
            Step::Plug(part) => {
                let part = usize::from(part % 4);
                self.unplugged[part] ^= true;
                if self.unplugged[part] {
                    self.guest.memory.unplug(part);
                } else {
                    self.guest.memory.plug(part);
                }
            }
            Step::BusMaster(on) => {
                self.driver.pci().set_bus_master(*on);
                self.update_frozen(!on);
            }
            Step::Reset => {
                self.guest.device.reset();
                self.update_frozen(true);
            }
            Step::Time(millis) => world.pass(Duration::from_millis(u64::from(*millis))),
        }
    }

    /// Destroys an object. Its rings stay in place and must not change any more. The driver is not told, because it
    /// would reuse the pages.
    fn destroy(&mut self, object: u8) {
        use pvrdma_dev::testing::{Request, command_id as id};
        let slot = usize::from(object % QPS);
        let (id, handle) = match object % 8 {
            0..4 => (id::DESTROY_QP, self.qps[slot].as_ref().map(|qp| qp.handle)),
            4 => (id::DESTROY_CQ, self.cq.as_ref().map(|cq| cq.handle)),
            5 => (id::DESTROY_SRQ, self.srq.as_ref().map(|srq| srq.handle)),
            6 => (id::DESTROY_MR, self.mr.as_ref().map(|mr| mr.handle)),
            _ => (id::DESTROY_MR, self.fast.as_ref().map(|fast| fast.mr.handle)),
        };
        if let Some(handle) = handle
            && self.driver.execute(&Request::new(id).u32(16, handle)).is_ok()
        {
            self.check();
            self.dead[usize::from(object % 8)] = true;
        }
    }
}

fuzz_target!(|input: Input| {
    let world = World::default();
    let [mut a, mut b] = [1, 2].map(|host| Side::new(&world, host, input.user[usize::from(host) - 1]));
    let numbers = [&a, &b].map(|side| side.qps.each_ref().map(|qp| qp.as_ref().map_or(0, |qp| qp.qpn)));
    [b.peers, a.peers] = numbers;
    for index in 0..usize::from(QPS) {
        a.connect(index, 2);
        b.connect(index, 1);
    }
    a.shadow = a.guest.snapshot();
    b.shadow = b.guest.snapshot();
    for (left, step) in &input.steps.0 {
        if *left {
            a.step(&mut b, &world, step)
        } else {
            b.step(&mut a, &world, step)
        }
        world.settle();
    }
    // After all retries have ended, nothing changes any more.
    for _ in 0..40 {
        world.pass(Duration::from_secs(100));
    }
    for side in [&mut a, &mut b] {
        side.check();
        side.guest.end(&world);
    }
});
