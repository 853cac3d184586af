//! Commands of an active device: octets at random and structures with handles that may exist, over page directories that may
//! make sense.
#![no_main]

use std::time::Duration;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use pvrdma_dev::PciFunction;
use pvrdma_dev::testing::{Driver, Path, QpAttr, REQUEST_SIZE, RESPONSE_SIZE, Request, command_id as id};
use pvrdma_dev_fuzz::{Address, Guest, Many, PAGE, Steps, Word, World, gid, poke};

/// Pages of memory.
const PAGES: u64 = 128;

/// Page directories that make sense, of [`DIRECTORY_PAGES`] each.
const DIRECTORIES: usize = 4;
const DIRECTORY_PAGES: usize = 12;

/// A handle.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Handle {
    /// Such as the first objects get.
    Low(u8),
    Any(Word),
}

impl Handle {
    fn get(self) -> u32 {
        match self {
            Self::Low(handle) => u32::from(handle % 8),
            Self::Any(word) => word.get(),
        }
    }
}

/// Pages of an object.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Pages {
    Good(u8),
    Any(Address),
}

/// How large a queue is.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Size {
    Good(u8),
    Any(Word),
}

impl Size {
    fn get(self) -> u32 {
        match self {
            Self::Good(bit) => 1 << (bit % 7),
            Self::Any(word) => word.get(),
        }
    }
}

#[derive(Arbitrary, Debug)]
enum Command {
    Raw(Word, Many<Word>),
    QueryPort(u8),
    QueryPkey(u8, u8),
    Open(Word),
    Close(Handle),
    CreatePd(Handle),
    DestroyPd(Handle),
    UserMr {
        pd: Handle,
        start: Word,
        length: Word,
        pages: Pages,
        access: Word,
        matching: bool,
    },
    OtherMr {
        pd: Handle,
        flags: Word,
        access: Word,
        pages: Pages,
        nchunks: Word,
    },
    DestroyMr(Handle),
    CreateCq {
        context: Handle,
        pages: Pages,
        cqe: Size,
        nchunks: Size,
    },
    DestroyCq(Handle),
    CreateQp {
        pages: Pages,
        pd: Handle,
        cqs: [Handle; 2],
        srq: Option<Handle>,
        wrs: [Size; 2],
        sges: [Size; 2],
        chunks: [u16; 2],
        kind: u8,
        signal_all: u8,
    },
    ModifyQp {
        qp: Handle,
        mask: Word,
        state: u8,
        attrs: Vec<(u8, u8)>,
        peer: Handle,
    },
    /// From RESET to RTS.
    Connect {
        qp: Handle,
        peer: Handle,
    },
    QueryQp(Handle),
    DestroyQp(Handle),
    Bind(Word, u8, u8),
    Unbind(Word),
    CreateSrq {
        pages: Pages,
        pd: Handle,
        nchunks: Size,
        wrs: Size,
        sges: Size,
        limit: Word,
        kind: u8,
    },
    ModifySrq(Handle, Word, Word),
    QuerySrq(Handle),
    DestroySrq(Handle),
}

#[derive(Arbitrary, Debug)]
enum Step {
    Command(Command),
    Memory(Address, Many<u8>),
    Pointer(Address, Address),
    /// An index or two of a ring.
    State(u8, [Word; 4]),
    /// A doorbell: page, register, bits, handle.
    Doorbell(u8, u8, u8, Handle),
    Time,
    /// A part of memory goes and comes back.
    Unplug(u8),
    Plug,
}

struct Bed {
    guest: Guest,
    driver: Driver,
    directories: Vec<(u64, Vec<u64>)>,
}

impl Bed {
    fn new(world: &World) -> Self {
        let guest = world.guest(1, (PAGES * PAGE) as usize);
        let driver = guest.probe();
        driver.bind_gid(0, gid(1)).unwrap();
        let directories = (0..DIRECTORIES)
            .map(|_| {
                let pages = guest.memory.alloc(DIRECTORY_PAGES, Default::default());
                (guest.memory.directory(&pages).addr, pages)
            })
            .collect();
        Self { guest, driver, directories }
    }

    fn pages(&self, pages: Pages) -> u64 {
        match pages {
            Pages::Good(index) => self.directories[usize::from(index) % DIRECTORIES].0,
            Pages::Any(address) => address.get(PAGES),
        }
    }

    fn requests(&self, command: &Command) -> Vec<Request> {
        let by_handle = |id, handle: Handle| vec![Request::new(id).u32(16, handle.get())];
        match command {
            Command::Raw(id, words) => {
                let mut bytes = [0; REQUEST_SIZE];
                for (at, word) in bytes[16..].chunks_exact_mut(4).zip(&words.0) {
                    at.copy_from_slice(&word.get().to_le_bytes());
                }
                bytes[8..12].copy_from_slice(&id.get().to_le_bytes());
                vec![Request::raw(bytes)]
            }
            Command::QueryPort(port) => vec![Request::new(id::QUERY_PORT).u8(16, *port)],
            Command::QueryPkey(port, index) => vec![Request::new(id::QUERY_PKEY).u8(16, *port).u8(17, *index)],
            Command::Open(page) => {
                let pfn = (self.driver.uar_base() >> 12).wrapping_add(page.get().into());
                vec![Request::new(id::CREATE_UC).u64(16, pfn)]
            }
            Command::Close(handle) => by_handle(id::DESTROY_UC, *handle),
            Command::CreatePd(context) => by_handle(id::CREATE_PD, *context),
            Command::DestroyPd(handle) => by_handle(id::DESTROY_PD, *handle),
            Command::UserMr { pd, start, length, pages, access, matching } => {
                let (start, length) = (u64::from(start.get()), u64::from(length.get()));
                let span = (start % PAGE + length).div_ceil(PAGE) as u32;
                let nchunks = if *matching { span } else { span.wrapping_add(access.get()) };
                let request = Request::new(id::CREATE_MR).u64(16, start).u64(24, length).u64(32, self.pages(*pages));
                vec![request.u32(40, pd.get()).u32(44, access.get()).u32(52, nchunks)]
            }
            Command::OtherMr { pd, flags, access, pages, nchunks } => {
                let request = Request::new(id::CREATE_MR).u64(32, self.pages(*pages)).u32(40, pd.get());
                vec![request.u32(44, access.get()).u32(48, flags.get()).u32(52, nchunks.get())]
            }
            Command::DestroyMr(handle) => by_handle(id::DESTROY_MR, *handle),
            Command::CreateCq { context, pages, cqe, nchunks } => {
                let request = Request::new(id::CREATE_CQ).u64(16, self.pages(*pages)).u32(24, context.get());
                vec![request.u32(28, cqe.get()).u32(32, nchunks.get())]
            }
            Command::DestroyCq(handle) => by_handle(id::DESTROY_CQ, *handle),
            Command::CreateQp { pages, pd, cqs, srq, wrs, sges, chunks, kind, signal_all } => {
                let request = Request::new(id::CREATE_QP).u64(16, self.pages(*pages)).u32(24, pd.get());
                let request = request.u32(28, cqs[0].get()).u32(32, cqs[1].get());
                let request = request.u32(36, srq.map_or(0xffff, Handle::get)).u8(76, srq.is_some().into());
                let request = request.u32(40, wrs[0].get()).u32(44, wrs[1].get());
                let request = request.u32(48, sges[0].get()).u32(52, sges[1].get());
                let request = request.u16(68, chunks[0] % 20).u16(70, chunks[1] % 12);
                vec![request.u8(74, *signal_all).u8(75, kind % 12)]
            }
            Command::ModifyQp { qp, mask, state, attrs, peer } => {
                let mut attr = QpAttr::to_state(u32::from(state % 9)).receive_path(&Path::to(gid(1), peer.get()));
                for (at, value) in attrs {
                    attr.bytes[usize::from(*at) % 160] = *value;
                }
                let request = Request::new(id::MODIFY_QP).u32(16, qp.get()).u32(20, mask.get());
                vec![request.set(24, &attr.bytes)]
            }
            Command::Connect { qp, peer } => {
                let path = Path::to(gid(1), peer.get());
                let steps = [
                    QpAttr::to_state(1).port().access(15),
                    QpAttr::to_state(2).receive_path(&path),
                    QpAttr::to_state(3).send_path(&path),
                ];
                let request = |attr: QpAttr| {
                    Request::new(id::MODIFY_QP).u32(16, qp.get()).u32(20, attr.mask).set(24, &attr.bytes)
                };
                steps.into_iter().map(request).collect()
            }
            Command::QueryQp(handle) => by_handle(id::QUERY_QP, *handle),
            Command::DestroyQp(handle) => by_handle(id::DESTROY_QP, *handle),
            Command::Bind(index, host, kind) => {
                let request = Request::new(id::CREATE_BIND).u32(24, index.get()).set(28, &gid(*host).0);
                vec![request.u8(44, kind % 4)]
            }
            Command::Unbind(index) => vec![Request::new(id::DESTROY_BIND).u32(16, index.get())],
            Command::CreateSrq { pages, pd, nchunks, wrs, sges, limit, kind } => {
                let request = Request::new(id::CREATE_SRQ).u64(16, self.pages(*pages)).u32(24, pd.get());
                let request = request.u32(28, nchunks.get()).u32(32, wrs.get()).u32(36, sges.get());
                vec![request.u32(40, limit.get()).u8(48, *kind / 128)]
            }
            Command::ModifySrq(srq, mask, limit) => {
                let request = Request::new(id::MODIFY_SRQ).u32(16, srq.get()).u32(20, mask.get());
                vec![request.u32(32, limit.get())]
            }
            Command::QuerySrq(handle) => by_handle(id::QUERY_SRQ, *handle),
            Command::DestroySrq(handle) => by_handle(id::DESTROY_SRQ, *handle),
        }
    }

    /// Runs a command and checks what holds for all of them.
    fn execute(&self, request: &Request) {
        let [_, response] = self.driver.slots();
        self.guest.memory.write(response, &[0xcc; RESPONSE_SIZE]);
        let before = self.guest.irqs.count(0);
        let error = self.driver.submit(request.bytes());
        let raised = self.guest.irqs.count(0) - before;
        let answer = self.guest.memory.read_vec(response, RESPONSE_SIZE);
        if error != 0 || !request.is_waited() {
            assert_eq!((raised, answer), (0, vec![0xcc; RESPONSE_SIZE]), "{request:?}");
        } else {
            assert_eq!((raised, &answer[..8]), (1, &request.bytes()[..8]));
            assert_eq!(answer[8..12], (0x8000_0000 | request.id()).to_le_bytes());
            assert!(answer[12] == 0 || request.id() == id::MODIFY_QP, "{request:?}");
        }
    }

    fn doorbell(&self, page: u8, register: u8, bits: u8, handle: Handle) {
        let value = u32::from(bits) << 24 | handle.get() & 0x00ff_ffff;
        let at = u64::from(page % 9) * PAGE + u64::from(register % 4) * 4;
        self.guest.device.bar_write(2, at, &value.to_le_bytes());
        self.guest.device.run_deferred();
    }
}

fuzz_target!(|steps: Steps<Step>| {
    let world = World::default();
    let bed = Bed::new(&world);
    let memory = &bed.guest.memory;
    let mut unplugged = None;
    for step in &steps.0 {
        match step {
            Step::Command(command) => bed.requests(command).iter().for_each(|request| bed.execute(request)),
            Step::Memory(address, data) => poke(memory, address.get(PAGES), &data.0),
            Step::Pointer(at, address) => poke(memory, at.get(PAGES) & !7, &address.get(PAGES).to_le_bytes()),
            Step::State(directory, words) => {
                let (_, pages) = &bed.directories[usize::from(*directory) % DIRECTORIES];
                for (at, word) in (pages[0]..).step_by(4).zip(words) {
                    poke(memory, at, &word.get().to_le_bytes());
                }
            }
            Step::Doorbell(page, register, bits, handle) => bed.doorbell(*page, *register, *bits, *handle),
            Step::Time => world.pass(Duration::from_secs(1)),
            Step::Unplug(part) if unplugged.is_none() => {
                memory.unplug(usize::from(part % 4));
                unplugged = Some(usize::from(part % 4));
            }
            Step::Unplug(_) | Step::Plug => {
                if let Some(part) = unplugged.take() {
                    memory.plug(part);
                }
            }
        }
        world.settle();
    }
    if let Some(part) = unplugged {
        memory.plug(part);
    }
    bed.guest.end(&world);
    bed.driver.forget();
    bed.guest.probe().query_port().expect("a port");
});
