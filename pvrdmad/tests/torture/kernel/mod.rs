//! A hostile kernel. It controls registers, command slots, page directories and rings, and changes all of them while
//! the device uses them.

mod takeover;

use pvrdma_dev::{
    ObjectCounts, Phase,
    testing::{
        Driver, GuestMemory, MEMORY_BASE, Path, QpAttr, REQUEST_SIZE, RESPONSE_SIZE, Request, Response,
        command_id as id, register, state,
    },
};
use pvrdma_pci_function::PciFunction;
use pvrdma_verbs::testing::{gid, mac};
use pvrdmad::testing::{Dice, Targets, element};

use crate::machine::Machine;
use crate::network::{KERNEL, Network};

const PAGE: u64 = 4096;
const MEMORY: usize = 2 << 20;
const PARTS: usize = 4;
/// Number of page directories for objects, and of pages in each.
const POOLS: usize = 8;
const POOL_PAGES: usize = 12;
/// Size of a ring element with four SGEs, in bytes.
const STRIDE: u64 = 256;
/// Bits of a doorbell value.
const QP_SEND: u32 = 1 << 30;
const QP_RECV: u32 = 1 << 31;
/// Number of elements in each of its queues.
const ELEMENTS: u32 = 32;

/// Pages and their directory, which the kernel may overwrite.
struct Pool {
    directory: u64,
    table: u64,
    pages: Vec<u64>,
}

/// A queue pair that the kernel has created.
#[derive(Clone, Copy)]
struct Pair {
    handle: u32,
    qpn: u32,
    pool: usize,
}

pub(crate) struct Kernel {
    pub(crate) machine: Machine,
    driver: Driver,
    /// The device shared region as a driver writes it.
    region: Vec<u8>,
    /// Copy of the whole memory before the first attack.
    fresh: Vec<u8>,
    pools: Vec<Pool>,
    unplugged: [bool; PARTS],
    contexts: Vec<u32>,
    pds: Vec<u32>,
    cqs: Vec<u32>,
    srqs: Vec<u32>,
    pairs: Vec<Pair>,
    regions: Vec<(u32, u32)>,
    targets: Targets,
    dice: Dice,
    /// Bytes charged to the device before it had a driver: the buffers of its port.
    idle_bytes: u64,
}

impl Kernel {
    pub(crate) fn new(network: &Network, targets: Targets, seed: u64) -> Self {
        let machine = network.machine(KERNEL, GuestMemory::in_parts(MEMORY, PARTS), seed);
        let idle_bytes = machine.test.device.status().kept.used_bytes;
        let driver = machine.driver();
        driver.bind_gid(0, gid(KERNEL)).unwrap();
        let memory = &machine.test.memory;
        let pools = (0..POOLS).map(|_| {
            let pages = memory.alloc(POOL_PAGES, Default::default());
            let directory = memory.directory(&pages);
            Pool { directory: directory.addr, table: directory.tables[0], pages }
        });
        let (region, pools) = (driver.dsr_bytes()[..72].to_vec(), pools.collect());
        let fresh = memory.read_vec(MEMORY_BASE, MEMORY);
        Self {
            machine,
            driver,
            region,
            fresh,
            pools,
            unplugged: [false; PARTS],
            contexts: Vec::new(),
            pds: Vec::new(),
            cqs: Vec::new(),
            srqs: Vec::new(),
            pairs: Vec::new(),
            regions: Vec::new(),
            targets,
            dice: Dice::new(seed, 2),
            idle_bytes,
        }
    }

    pub(crate) fn step(&mut self) {
        // A kernel whose device is in error does little harm, so it starts again.
        if self.dice.one_in(4) && !self.is_alive() {
            self.begin();
        }
        if self.dice.one_in(8)
            && let Some(victim) = self.targets.left()
        {
            return self.take_over(&victim);
        }
        match self.dice.below(80) {
            0 => self.registers(),
            1 => self.life(),
            2..6 => self.anything(),
            6..10 => self.store(),
            10..12 => self.directory(),
            12 | 13 => self.plug(),
            14..17 => self.bind(),
            17..22 => self.doorbell(),
            22..28 => self.create(),
            28..31 => self.create_pair(),
            31..36 => self.connect(),
            36 | 37 => self.modify(),
            38 | 39 => self.destroy(),
            40 | 41 => self.index(),
            42 => self.rings_of_events(),
            43..47 => self.consume(),
            _ => self.post(),
        }
    }

    fn is_alive(&self) -> bool {
        let status = self.machine.test.device.status();
        status.phase == Phase::Active && status.bus_master && !self.unplugged.contains(&true)
    }

    /// Starts the driver again, and creates the objects that attacks use.
    fn begin(&mut self) {
        self.plug_all();
        self.repair_all();
        self.bring_up();
        let pfn = (self.driver.uar_base() >> 12) + 1;
        for owner in [0, 1] {
            let made = (owner == 1).then(|| self.command(&Request::new(id::CREATE_UC).u64(16, pfn))).flatten();
            let context = made.map_or(0, |made| made.u32(16));
            self.contexts.extend((context != 0).then_some(context));
            let made = self.command(&Request::new(id::CREATE_PD).u32(16, context));
            self.pds.extend(made.map(|made| made.u32(16)));
            let request = Request::new(id::CREATE_CQ).u64(16, self.pools[owner].directory).u32(24, context);
            let made = self.command(&request.u32(28, ELEMENTS).u32(32, 2));
            self.cqs.extend(made.map(|made| made.u32(16)));
        }
        let (pd, pool) = (self.pds.last().copied().unwrap_or(0), &self.pools[2]);
        let request = Request::new(id::CREATE_MR).u64(24, POOL_PAGES as u64 * PAGE).u64(32, pool.directory).u32(40, pd);
        let made = self.command(&request.u32(44, 15).u32(52, POOL_PAGES as u32));
        self.regions.extend(made.map(|made| (made.u32(16), made.u32(20))));
        for pool in 4..POOLS {
            self.create_pair_in(pool);
            self.connect();
        }
    }

    /// Resets the device, and checks that no resources remain.
    pub(crate) fn end(&mut self) {
        self.plug_all();
        self.machine.test.device.reset();
        let status = self.machine.test.device.status();
        assert_eq!((status.objects, status.kept.used_bytes), (ObjectCounts::default(), self.idle_bytes));
        // The device can start again. All directories are restored first, because their content may be anything by now.
        for (page, bytes) in (MEMORY_BASE..).step_by(PAGE as usize).zip(self.fresh.chunks(PAGE as usize)) {
            self.machine.test.memory.write(page, bytes);
        }
        self.forget();
        self.bring_up();
        assert_eq!(self.driver.pci().register(register::ERR), 0);
        assert!(self.command(&Request::new(id::QUERY_PORT).u8(16, 1)).is_some());
        self.machine.test.device.reset();
    }

    fn plug_all(&mut self) {
        for part in 0..PARTS {
            if std::mem::take(&mut self.unplugged[part]) {
                self.machine.test.memory.plug(part);
            }
        }
    }

    fn repair_all(&self) {
        for pool in &self.pools {
            self.repair(pool);
        }
    }

    /// Restores a directory.
    fn repair(&self, pool: &Pool) {
        let memory = &self.machine.test.memory;
        memory.write(pool.directory, &pool.table.to_le_bytes());
        let entries: Vec<u8> = pool.pages.iter().flat_map(|page| page.to_le_bytes()).collect();
        memory.write(pool.table, &entries);
        memory.write(pool.pages[0], &[0; 16]);
    }

    fn forget(&mut self) {
        self.contexts.clear();
        self.pds.clear();
        self.cqs.clear();
        self.srqs.clear();
        self.pairs.clear();
        self.regions.clear();
    }

    /// Brings the device up like a driver's probe, although the shared region may have been overwritten and memory may
    /// be gone.
    fn bring_up(&mut self) {
        let (pci, memory) = (self.driver.pci(), &self.machine.test.memory);
        pci.set_bus_master(false);
        pci.set_bus_master(true);
        pci.set_msix(true);
        memory.write(self.driver.dsr(), &self.region);
        for ring in [self.driver.async_ring(), self.driver.notification_ring()] {
            ring.set_prod_tail(0);
            ring.set_cons_head(0);
        }
        self.driver.write_dsr_address();
        pci.set_register(register::IMR, 0);
        pci.set_register(register::CTL, 0);
        self.forget();
        self.command(&Request::new(id::CREATE_BIND).u32(16, 1024).u32(20, 0xfff).set(28, &gid(KERNEL).0).u8(44, 2));
    }

    /// Sends a command. Returns the response if there is one.
    fn command(&self, request: &Request) -> Option<Response> {
        let [_, slot] = self.driver.slots();
        self.machine.test.memory.write(slot, &[0; RESPONSE_SIZE]);
        if self.driver.submit(request.bytes()) != 0 {
            return None;
        }
        let response = Response(self.machine.test.memory.read_vec(slot, RESPONSE_SIZE).try_into().unwrap());
        (response.u32(8) == 0x8000_0000 | request.id() && response.u8(12) == 0).then_some(response)
    }

    fn registers(&mut self) {
        let (at, value) = (4 * self.dice.below(12) as u64, self.dice.number());
        self.driver.pci().set_register(at, value);
        self.driver.pci().register(at);
        let (at, count) = (self.dice.below(250), 1 + self.dice.below(6));
        let data = self.dice.bytes(count);
        self.machine.test.device.config_write(at, &data);
    }

    /// Ends the driver in one of the ways in which drivers end.
    fn life(&mut self) {
        let pci = self.driver.pci();
        match self.dice.below(8) {
            0 => pci.set_register(register::CTL, 2),
            1 => pci.set_bus_master(false),
            2 => self.machine.test.device.reset(),
            3 => pci.set_register(register::CTL, 1),
            4 => pci.set_register(register::IMR, self.dice.number()),
            _ => pci.set_bus_master(true),
        }
    }

    /// Sends a command of random numbers.
    fn anything(&mut self) {
        let mut bytes = [0; REQUEST_SIZE];
        for at in bytes.chunks_exact_mut(4) {
            at.copy_from_slice(&self.dice.number().to_le_bytes());
        }
        bytes[8..12].copy_from_slice(&(self.dice.word() % 24).to_le_bytes());
        if self.dice.one_in(2) {
            bytes[16..24].copy_from_slice(&self.pool().directory.to_le_bytes());
        }
        self.driver.submit(&bytes);
    }

    fn pool(&mut self) -> &Pool {
        let at = self.dice.below(POOLS);
        &self.pools[at]
    }

    /// Overwrites a random word of memory.
    fn store(&mut self) {
        let dice = &mut self.dice;
        let at = match dice.below(4) {
            0 => self.driver.dsr() + 4 * dice.below(80) as u64,
            1 => dice.pick(&self.driver.slots()) + 4 * dice.below(46) as u64,
            _ => MEMORY_BASE + 4 * dice.below(MEMORY / 4) as u64,
        };
        self.machine.test.memory.store(at, dice.number());
    }

    /// Overwrites a page directory, or restores it.
    fn directory(&mut self) {
        let dice = &mut self.dice;
        let pool = &self.pools[dice.below(POOLS)];
        let memory = &self.machine.test.memory;
        match dice.below(4) {
            0 => memory.write(pool.directory, &dice.long().to_le_bytes()),
            1 => {
                let any = dice.long();
                let other = dice.pick(&[MEMORY_BASE, memory.end(), memory.end() - PAGE, 0, 1, u64::MAX, any]);
                memory.write(pool.table + 8 * dice.below(POOL_PAGES) as u64, &other.to_le_bytes());
            }
            _ => self.repair(pool),
        }
    }

    fn plug(&mut self) {
        if self.unplugged.contains(&true) && !self.dice.one_in(4) {
            return self.plug_all();
        }
        let part = self.dice.below(PARTS);
        self.unplugged[part] ^= true;
        if self.unplugged[part] {
            self.machine.test.memory.unplug(part);
        } else {
            self.machine.test.memory.plug(part);
        }
    }

    /// Binds or unbinds the address of a victim, of its peer, or its own.
    fn bind(&mut self) {
        let target = self.targets.pick(&mut self.dice);
        let wanted = self.dice.pick(&[target.gid, target.peer, gid(KERNEL), gid(200)]);
        let index = self.dice.number();
        if self.dice.one_in(4) {
            self.command(&Request::new(id::DESTROY_BIND).u32(16, index).set(20, &wanted.0));
        } else {
            let vlan = if self.dice.one_in(4) { self.dice.number() } else { 0xfff };
            let request = Request::new(id::CREATE_BIND).u32(16, 1024).u32(20, vlan).u32(24, index % 8);
            self.command(&request.set(28, &wanted.0).u8(44, 2));
        }
    }

    fn doorbell(&mut self) {
        let (page, at) = (self.dice.word() % 4, 4 * self.dice.below(5) as u64);
        let value = self.dice.word() & 0xff00_0000 | self.dice.number() & 0xff_ffff;
        self.driver.pci().doorbell(page, at, value);
    }

    fn create(&mut self) {
        let pfn = (self.driver.uar_base() >> 12) + self.dice.below(6) as u64;
        let context = if self.contexts.is_empty() { 0 } else { self.dice.pick(&self.contexts) };
        let pd = if self.pds.is_empty() { 0 } else { self.dice.pick(&self.pds) };
        let directory = self.pool().directory;
        let (start, flags) = (u64::from(self.dice.number()), self.dice.pick(&[0, 0, 1, 2]));
        match self.dice.below(5) {
            0 => {
                let made = self.command(&Request::new(id::CREATE_UC).u64(16, pfn));
                self.contexts.extend(made.map(|made| made.u32(16)));
            }
            1 => {
                let made = self.command(&Request::new(id::CREATE_PD).u32(16, context));
                self.pds.extend(made.map(|made| made.u32(16)));
            }
            2 => {
                let request = Request::new(id::CREATE_CQ).u64(16, directory).u32(24, context);
                let made = self.command(&request.u32(28, ELEMENTS).u32(32, 2));
                self.cqs.extend(made.map(|made| made.u32(16)));
            }
            3 => {
                let request = Request::new(id::CREATE_SRQ).u64(16, directory).u32(24, pd).u32(28, 2);
                let made = self.command(&request.u32(32, ELEMENTS).u32(36, 2));
                self.srqs.extend(made.map(|made| made.u32(16)));
            }
            _ => {
                let pages = 1 + self.dice.below(POOL_PAGES) as u64;
                let request = Request::new(id::CREATE_MR).u64(16, start).u64(24, pages * PAGE - start % PAGE);
                let request = request.u64(32, directory).u32(40, pd).u32(44, 15).u32(48, flags);
                let made = self.command(&request.u32(52, pages as u32));
                self.regions.extend(made.map(|made| (made.u32(16), made.u32(20))));
            }
        }
    }

    fn create_pair(&mut self) {
        let pool = self.dice.below(POOLS);
        self.create_pair_in(pool);
    }

    fn create_pair_in(&mut self, pool: usize) {
        let (Some(&pd), Some(&cq)) = (self.pds.last(), self.cqs.last()) else { return };
        let srq = self.srqs.last().copied().filter(|_| self.dice.one_in(4));
        let kind = self.dice.pick(&[2, 2, 2, 4, 1]);
        let request = Request::new(id::CREATE_QP).u64(16, self.pools[pool].directory).u32(24, pd).u32(28, cq);
        let request = request.u32(32, cq).u32(36, srq.unwrap_or(0)).u8(76, srq.is_some().into()).u8(75, kind);
        let receives = if srq.is_some() { (0, 0, 0) } else { (ELEMENTS, 4, 1) };
        let request = request.u32(40, ELEMENTS).u32(48, 4).u32(44, receives.0).u32(52, receives.1).u32(64, 1);
        // An element with four SGEs has 144 bytes, and 256 in its ring.
        let send_pages = u64::from(ELEMENTS) * STRIDE / PAGE;
        let total = 1 + send_pages + receives.2;
        let request = request.u16(68, total as u16).u16(70, send_pages as u16);
        if let Some(made) = self.command(&request) {
            self.pairs.push(Pair { handle: made.u32(20), qpn: made.u32(16), pool });
        }
    }

    fn pair(&mut self) -> Option<Pair> {
        (!self.pairs.is_empty()).then(|| self.dice.pick(&self.pairs))
    }

    fn modify_qp(&self, pair: Pair, attr: &QpAttr) {
        let request = Request::new(id::MODIFY_QP).u32(16, pair.handle).u32(20, attr.mask);
        self.command(&request.set(24, &attr.bytes));
    }

    /// Connects to a victim as if it were its peer, or to its own queue pair.
    fn connect(&mut self) {
        let (Some(pair), target) = (self.pair(), self.targets.pick(&mut self.dice)) else { return };
        let own = self.dice.pick(&self.pairs).qpn;
        let dice = &mut self.dice;
        let (to, qpn) = dice.pick(&[(target.gid, target.qpn), (target.gid, target.datagram_qpn), (gid(KERNEL), own)]);
        let path = Path {
            dmac: mac(target.number).0,
            sgid_index: (dice.number() % 8) as u8,
            rq_psn: target.psn,
            sq_psn: target.psn.wrapping_add(dice.number()) & 0xff_ffff,
            timeout: dice.pick(&[0, 1, 8, 14]),
            min_rnr_timer: dice.pick(&[0, 1, 12]),
            access: 15,
            ..Path::to(to, qpn)
        };
        self.connect_to(pair, &path);
        if self.dice.one_in(2) {
            self.reset_indices(pair);
        }
    }

    fn connect_to(&mut self, pair: Pair, path: &Path) {
        let steps = [
            QpAttr::to_state(state::RESET),
            QpAttr::to_state(state::INIT).port().access(15),
            QpAttr::to_state(state::INIT).port().qkey(self.dice.number()),
            QpAttr::to_state(state::RTR).receive_path(path),
            QpAttr::to_state(state::RTR),
            QpAttr::to_state(state::RTS).send_path(path),
        ];
        steps.iter().for_each(|step| self.modify_qp(pair, step));
    }

    fn reset_indices(&self, pair: Pair) {
        self.machine.test.memory.write(self.pools[pair.pool].pages[0], &[0; 16]);
    }

    fn modify(&mut self) {
        let Some(pair) = self.pair() else { return };
        let mut attr = QpAttr::to_state(self.dice.word() % 9);
        attr.mask |= self.dice.number();
        for _ in 0..self.dice.below(4) {
            attr.bytes[self.dice.below(160)] = self.dice.byte();
        }
        self.modify_qp(pair, &attr);
        self.command(&Request::new(id::QUERY_QP).u32(16, pair.handle));
    }

    fn destroy(&mut self) {
        let kinds = [id::DESTROY_QP, id::DESTROY_QP, id::DESTROY_MR, id::DESTROY_CQ, id::DESTROY_PD, id::DESTROY_SRQ];
        let kind = self.dice.pick(&[&kinds[..], &[id::DESTROY_UC]].concat());
        let handles: Vec<u32> = match kind {
            id::DESTROY_QP => self.pairs.iter().map(|pair| pair.handle).collect(),
            id::DESTROY_MR => self.regions.iter().map(|region| region.0).collect(),
            id::DESTROY_CQ => self.cqs.clone(),
            id::DESTROY_PD => self.pds.clone(),
            id::DESTROY_SRQ => self.srqs.clone(),
            _ => self.contexts.clone(),
        };
        let handle = if handles.is_empty() { self.dice.number() } else { self.dice.pick(&handles) };
        if self.driver.submit(Request::new(kind).u32(16, handle).bytes()) == 0 && self.dice.one_in(2) {
            self.pairs.retain(|pair| kind != id::DESTROY_QP || pair.handle != handle);
            self.regions.retain(|region| kind != id::DESTROY_MR || region.0 != handle);
        }
    }

    /// Overwrites an index of a ring with any number, or with one that makes the device execute old memory as elements.
    fn index(&mut self) {
        let Some(pair) = self.pair() else { return };
        let dice = &mut self.dice;
        let value = if dice.one_in(3) { dice.number() } else { dice.word() % (2 * ELEMENTS) };
        self.machine.test.memory.store(self.pools[pair.pool].pages[0] + 4 * dice.below(4) as u64, value);
    }

    fn rings_of_events(&mut self) {
        let ring = if self.dice.one_in(2) { self.driver.async_ring() } else { self.driver.notification_ring() };
        let value = self.dice.number();
        match self.dice.below(3) {
            0 => ring.set_cons_head(value),
            1 => ring.set_prod_tail(value),
            _ => ring.set_cons_head(ring.prod_tail()),
        }
    }

    /// Consumes completions without reading them.
    fn consume(&self) {
        for pool in &self.pools[..2] {
            let tail = self.machine.test.memory.load(pool.pages[0] + 8);
            self.machine.test.memory.store(pool.pages[0] + 12, tail);
        }
    }

    fn post(&mut self) {
        let Some(pair) = self.pair() else { return };
        let (target, dice) = (self.targets.pick(&mut self.dice), &mut self.dice);
        let (key, pd) = (self.regions.last().map_or(0x100, |region| region.1), self.pds.last().copied().unwrap_or(0));
        let (receive, count) = (dice.one_in(4), 1 + dice.word() % 8);
        let elements = (0..count).map(|_| {
            let own = u64::from(dice.number() % 0x200);
            let mut bytes = element(dice, &target, pd, own, key);
            if receive {
                drop(bytes.drain(16..80));
            }
            bytes
        });
        let elements: Vec<_> = elements.collect();
        let page = dice.word() % 2;
        let area = self.publish(pair, receive, &elements, page);
        let (dice, memory) = (&mut self.dice, &self.machine.test.memory);
        let bit = if receive { QP_RECV } else { QP_SEND };
        // Overwrites words while the device may be reading them.
        if dice.one_in(3) {
            memory.store(area + 4 * dice.below(64) as u64, dice.number());
            self.driver.pci().doorbell(page, 0, pair.handle | bit);
        }
    }
    /// Writes elements to a ring and rings the doorbell. Returns the address of the first element.
    fn publish(&self, pair: Pair, receive: bool, elements: &[Vec<u8>], page: u32) -> u64 {
        let memory = &self.machine.test.memory;
        let pages = &self.pools[pair.pool].pages;
        let (area, stride, words) = match receive {
            true => (&pages[1 + (u64::from(ELEMENTS) * STRIDE / PAGE) as usize..], 128, pages[0] + 8),
            false => (&pages[1..], STRIDE, pages[0]),
        };
        let tail = memory.load(words);
        for (number, bytes) in (0..).zip(elements) {
            let offset = u64::from(tail.wrapping_add(number) % ELEMENTS) * stride;
            memory.write(area[(offset / PAGE) as usize] + offset % PAGE, bytes);
        }
        memory.store(words, tail.wrapping_add(elements.len() as u32) % (2 * ELEMENTS));
        self.driver.pci().doorbell(page, 0, pair.handle | if receive { QP_RECV } else { QP_SEND });
        area[0]
    }
}
