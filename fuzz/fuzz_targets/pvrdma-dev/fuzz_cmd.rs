//! Commands to an active device: random bytes, and structures whose handles may exist, with page directories that may
//! be valid.
#![no_main]

use std::time::Duration;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use pvrdma_dev::testing::{Driver, Path, QpAttr, REQUEST_SIZE, RESPONSE_SIZE, Request, command_id as id};
use pvrdma_fuzz::{
    input::{Many, Steps},
    pvrdma_dev::{Address, Guest, PAGE, Word, World, gid, poke},
};
use pvrdma_pci_function::PciFunction;

/// Pages of memory.
const PAGES: u64 = 128;

/// Number of valid page directories, of [`DIRECTORY_PAGES`] pages each.
const DIRECTORIES: usize = 4;
const DIRECTORY_PAGES: usize = 12;

/// A handle.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Handle {
    /// A handle that one of the first objects has.
    Low(u8),
    Any(Word),
}

impl Handle {
    fn get(self) -> u32 {
        match self {
            Self::Low(handle) => u32::from(handle % 6),
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

/// Size of a queue.
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
    /// A command, and which of its fields are corrected; see [`plausible`].
    Command(u8, Command),
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

/// Corrects sizes, and replaces handles by those of [`Fixture::new`], so that commands often succeed.
fn plausible(request: Request) -> Request {
    let bytes = *request.bytes();
    let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let size = |at: usize| 1_u32 << (word(at) % 5);
    let sges = |at: usize| 1 + word(at) % 4;
    // The kernel's or the process's.
    let owner = word(24) & 1;
    match request.id() {
        id::CREATE_MR => {
            let (start, length, pd) = (u64::from(word(16)), u64::from(word(24)) % (11 * PAGE) + 1, word(40) & 1);
            let span = (start % PAGE + length).div_ceil(PAGE) as u32;
            match word(48) % 4 {
                0 | 1 => request.u64(24, length).u32(40, pd).u32(48, 0).u32(52, span),
                2 => request.u64(32, 0).u32(40, 0).u32(48, 1),
                _ => request.u32(40, 0).u32(48, 2).u32(52, 1 + word(52) % 12),
            }
        }
        id::CREATE_PD => request.u32(16, word(16) & 1),
        id::CREATE_CQ => request.u32(24, owner).u32(28, size(28)).u32(32, 2),
        id::CREATE_QP => {
            let shared = u32::from(bytes[76] & owner as u8 & 1);
            let pages =
                |count: u32, header: u32, sges: u32| count * (header + 16 * sges).next_power_of_two() / 4096 + 1;
            let send = pages(size(40), 80, sges(48));
            let total = 1 + send + pages(size(44), 16, sges(52));
            let request = request.u32(24, owner).u32(28, owner).u32(32, owner).u32(36, 0).u8(76, shared as u8);
            let request = request.u32(40, size(40)).u32(44, size(44)).u32(48, sges(48)).u32(52, sges(52));
            let kind = [2, 2, 4, if owner == 0 { 1 } else { 2 }][usize::from(bytes[75] % 4)];
            request.u16(68, total as u16).u16(70, send as u16).u8(75, kind)
        }
        id::CREATE_SRQ => request.u32(24, 1).u32(28, 2).u32(32, size(32)).u32(36, sges(36)).u32(40, 0).u8(48, 0),
        id::CREATE_BIND => request.u32(24, word(24) % 4).u8(44, 2),
        // The first few.
        id::MODIFY_QP | id::QUERY_QP | id::DESTROY_QP => request.u32(16, 2 + word(16) % 3),
        id::MODIFY_SRQ => request.u32(16, 0).u32(20, 2).u32(32, word(32) % 3),
        id::QUERY_PORT | id::QUERY_PKEY => request.u8(16, 1).u8(17, 0),
        _ => request,
    }
}

struct Fixture {
    guest: Guest,
    driver: Driver,
    directories: Vec<(u64, Vec<u64>)>,
}

impl Fixture {
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
        let fixture = Self { guest, driver, directories };
        // Handles 0 are the kernel's, handles 1 those of the process with handle 1.
        let zeroes = |id| plausible(Request::new(id).u64(16, fixture.directories[0].0));
        fixture.execute(&Request::new(id::CREATE_UC).u64(16, (fixture.driver.uar_base() >> 12) + 1));
        for owner in [0, 1] {
            fixture.execute(&Request::new(id::CREATE_PD).u32(16, owner));
            fixture.execute(&plausible(Request::new(id::CREATE_CQ).u64(16, fixture.directories[0].0).u32(24, owner)));
        }
        fixture.execute(&zeroes(id::CREATE_SRQ));
        fixture
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

    /// Executes a command, and checks the rules that hold for all commands.
    fn execute(&self, request: &Request) {
        let [_, response] = self.driver.slots();
        self.guest.memory.write(response, &[0xcc; RESPONSE_SIZE]);
        let before = self.guest.irqs.count(0);
        let error = self.driver.submit(request.bytes());
        let raised = self.guest.irqs.count(0) - before;
        let bytes = self.guest.memory.read_vec(response, RESPONSE_SIZE);
        if error != 0 || !request.is_waited() {
            assert_eq!((raised, bytes), (0, vec![0xcc; RESPONSE_SIZE]), "{request:?}");
        } else {
            assert_eq!((raised, &bytes[..8]), (1, &request.bytes()[..8]));
            assert_eq!(bytes[8..12], (0x8000_0000 | request.id()).to_le_bytes());
            assert!(bytes[12] == 0 || request.id() == id::MODIFY_QP, "{request:?}");
        }
    }

    fn doorbell(&self, page: u8, register: u8, bits: u8, handle: Handle) {
        let value = u32::from(bits) << 24 | handle.get() & 0x00ff_ffff;
        let at = u64::from(page % 9) * PAGE + u64::from(register % 4) * 4;
        self.guest.device.bar_write(2, at, &value.to_le_bytes()).run(&*self.guest.device);
    }
}

fuzz_target!(|steps: Steps<Step>| {
    let world = World::default();
    let fixture = Fixture::new(&world);
    let memory = &fixture.guest.memory;
    let mut unplugged = None;
    for step in &steps.0 {
        match step {
            Step::Command(wild, command) => {
                for request in fixture.requests(command) {
                    fixture.execute(&if *wild < 180 { plausible(request) } else { request });
                }
            }
            Step::Memory(address, data) => poke(memory, address.get(PAGES), &data.0),
            Step::Pointer(at, address) => poke(memory, at.get(PAGES) & !7, &address.get(PAGES).to_le_bytes()),
            Step::State(directory, words) => {
                let (_, pages) = &fixture.directories[usize::from(*directory) % DIRECTORIES];
                for (at, word) in (pages[0]..).step_by(4).zip(words) {
                    poke(memory, at, &word.get().to_le_bytes());
                }
            }
            Step::Doorbell(page, register, bits, handle) => fixture.doorbell(*page, *register, *bits, *handle),
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
    fixture.guest.end(&world);
    fixture.driver.forget();
    fixture.guest.probe().query_port().expect("a port");
});
