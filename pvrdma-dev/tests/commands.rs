//! Rules that hold for every command, checked for all commands in one life of the device's objects.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod common;

use common::{gid, rxe_device};
use pvrdma_dev::testing::{
    Driver, Placement, QpAttr, REQUEST_SIZE, RESPONSE_SIZE, Request, Response, TestDevice, command_id as id, register,
    state,
};
use pvrdma_verbs::Backend;

/// Sizes of each command's structures by number: request, and response if there is one.
const SIZES: [(usize, usize); 21] = [
    (24, 64),
    (24, 24),
    (24, 24),
    (24, 0),
    (56, 32),
    (24, 0),
    (40, 24),
    (24, 0),
    (24, 0),
    (80, 48),
    (184, 16),
    (24, 176),
    (24, 0),
    (24, 24),
    (24, 0),
    (48, 0),
    (40, 0),
    (56, 24),
    (40, 0),
    (24, 32),
    (24, 0),
];

/// Sends commands one after the other, and checks everything that a driver could see.
struct Sender<'a> {
    driver: &'a Driver,
    /// Fill byte behind the command in the slot.
    tail: u8,
    key: u64,
    /// Commands that were executed.
    seen: Vec<u32>,
}

impl Sender<'_> {
    fn submit(&mut self, request: &Request) -> (u32, Vec<u8>, u64) {
        self.key = self.key.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
        let mut bytes = *request.clone().key(self.key).bytes();
        if let Some((size, _)) = SIZES.get(request.id() as usize) {
            bytes[*size..].fill(self.tail);
        }
        let [command, response] = self.driver.slots();
        self.driver.memory().write(response, &[0xcc; 256]);
        let raised = self.driver.irqs().counts();
        let error = self.driver.submit(&bytes);
        let now = self.driver.irqs().counts();
        assert_eq!(now[1..], raised[1..], "events of a command");
        assert_eq!(self.driver.memory().read_vec(command, REQUEST_SIZE), bytes, "the request is the driver's");
        (error, self.driver.memory().read_vec(response, 256), now[0] - raised[0])
    }

    /// A command that succeeds.
    fn ok(&mut self, request: &Request) -> Response {
        let (error, slot, raised) = self.submit(request);
        assert_eq!(error, 0, "{request:?}");
        self.seen.push(request.id());
        let (_, size) = SIZES[request.id() as usize];
        assert_eq!((raised, size != 0), (u64::from(request.is_waited()), request.is_waited()));
        assert!(slot[size..].iter().all(|&byte| byte == 0xcc), "more than the response of {request:?} was written");
        if size != 0 {
            let response = [&self.key.to_le_bytes()[..], &(0x8000_0000 | request.id()).to_le_bytes(), &[0; 4]].concat();
            assert_eq!(slot[..16], response);
        }
        Response(slot[..RESPONSE_SIZE].try_into().unwrap())
    }

    /// Sends a command that must be refused by ERR, without writing a response.
    fn refused(&mut self, request: &Request) {
        let (error, slot, raised) = self.submit(request);
        assert_ne!(error, 0, "{request:?}");
        assert_eq!((slot, raised), (vec![0xcc; 256], 0), "{request:?}");
        assert_eq!(self.driver.pci().register(register::ERR), error, "ERR keeps its value");
    }

    /// Sends a MODIFY_QP whose response must report an error, which the driver passes on as EINVAL.
    fn failed(&mut self, request: &Request) {
        let (error, slot, raised) = self.submit(request);
        assert_eq!((error, raised), (0, 1));
        assert_eq!(slot[8..12], (0x8000_0000 | request.id()).to_le_bytes());
        assert_ne!(slot[12], 0);
    }
}

/// Creates the page directory that commands name.
fn directory(driver: &Driver, pages: usize) -> u64 {
    let pages = driver.memory().alloc(pages, Placement::Scattered);
    driver.memory().directory(&pages).addr
}

/// Runs all twenty commands, in an order in which they succeed.
fn life<B: Backend<Hca: 'static>>(test: &TestDevice<B>, sender: &mut Sender<'_>) {
    let driver = sender.driver;
    let counts = || test.device.status().objects;
    let handle = |id, handle: u32| Request::new(id).u32(16, handle);

    sender.ok(&Request::new(id::QUERY_PORT).u8(16, 1));
    sender.ok(&Request::new(id::QUERY_PKEY).u8(16, 1));
    sender.ok(&Request::new(id::CREATE_BIND).u32(24, 3).set(28, &gid(9).0).u8(44, driver.gid_type()));
    assert_eq!(counts().gids, Some(1), "when ERR can be read the command is over");
    let context = sender.ok(&Request::new(id::CREATE_UC).u64(16, (driver.uar_base() >> 12) + 5)).u32(16);
    let pd = sender.ok(&handle(id::CREATE_PD, context)).u32(16);
    let mr = Request::new(id::CREATE_MR).u64(16, 0x7000).u64(24, 8192).u64(32, directory(driver, 2)).u32(40, pd);
    let mr = sender.ok(&mr.u32(44, 15).u32(52, 2)).u32(16);
    let cq = Request::new(id::CREATE_CQ).u64(16, directory(driver, 2)).u32(24, context).u32(28, 64).u32(32, 2);
    let cq = sender.ok(&cq).u32(16);
    let srq = Request::new(id::CREATE_SRQ).u64(16, directory(driver, 3)).u32(24, pd).u32(28, 3);
    let srq = sender.ok(&srq.u32(32, 64).u32(36, 3)).u32(16);
    sender.ok(&handle(id::MODIFY_SRQ, srq).u32(20, 2).u32(32, 7));
    assert_eq!(sender.ok(&handle(id::QUERY_SRQ, srq)).u32(24), 7);
    let qp = Request::new(id::CREATE_QP).u64(16, directory(driver, 6)).u32(24, pd).u32(28, cq).u32(32, cq);
    let qp = qp.u32(40, 128).u32(44, 128).u32(48, 1).u32(52, 1).u16(68, 6).u16(70, 4).u8(75, 2);
    let qp = sender.ok(&qp).u32(20);
    let modify = |attr: QpAttr| handle(id::MODIFY_QP, qp).u32(20, attr.mask).set(24, &attr.bytes);
    sender.ok(&modify(QpAttr::to_state(state::INIT).port().access(0)));
    assert_eq!(sender.ok(&handle(id::QUERY_QP, qp)).u32(16), state::INIT);
    sender.failed(&modify(QpAttr::to_state(state::RTS)));
    assert_eq!(sender.ok(&handle(id::QUERY_QP, qp)).u32(16), state::INIT);

    for (id, handle_of) in [
        (id::DESTROY_QP, qp),
        (id::DESTROY_SRQ, srq),
        (id::DESTROY_CQ, cq),
        (id::DESTROY_MR, mr),
        (id::DESTROY_PD, pd),
        (id::DESTROY_UC, context),
        (id::DESTROY_BIND, 3),
    ] {
        let before = counts();
        sender.ok(&handle(id, handle_of));
        assert_ne!(counts(), before, "when ERR can be read the command is over");
    }
    let none = counts();
    let all = [none.contexts, none.pds, none.mrs, none.cqs, none.srqs, none.qps, none.gids.unwrap()];
    assert_eq!(all, [0; 7]);
}

/// Conformance 17, 18, 19: each command that the driver waits for gets its response, nothing more, and one interrupt.
/// The other commands are complete when ERR can be read, without response and interrupt. Bytes behind the command in
/// the slot have no effect.
#[test]
fn each_command() {
    let test = rxe_device();
    let driver = test.driver();
    for tail in [0, 0xff, 0x5a, 1] {
        let mut sender = Sender { driver: &driver, tail, key: 1, seen: Vec::new() };
        life(&test, &mut sender);
        sender.seen.sort_unstable();
        sender.seen.dedup();
        let all: Vec<u32> = (0..21).filter(|&id| id != id::RESIZE_CQ).collect();
        assert_eq!(sender.seen, all);
    }
}

/// Conformance 20, 24, 28: every command reports a refusal in ERR, never only in the error byte of a response, and
/// never with an interrupt.
#[test]
fn each_refusal() {
    let test = rxe_device();
    let driver = test.driver();
    let mut sender = Sender { driver: &driver, tail: 0xa5, key: 1, seen: Vec::new() };
    let before = test.device.status();
    for id in 0..21 {
        // All handles, ports, indices, sizes and addresses are all-ones, which name nothing that exists.
        let mut request = Request::new(id);
        for at in (16..SIZES[id as usize].0).step_by(4) {
            request = request.u32(at, u32::MAX);
        }
        sender.refused(&request);
        // All-zero requests are refused, too, except those that are valid: a protection domain of the kernel, and
        // removal of an unbound address.
        if id != id::CREATE_PD && id != id::DESTROY_BIND && id != id::QUERY_PKEY {
            sender.refused(&Request::new(id));
        }
    }
    for id in [21, 22, 0x7f, 0x8000_0000, 0x8000_0002, u32::MAX] {
        sender.refused(&Request::new(id));
    }
    let after = test.device.status();
    assert_eq!((after.objects, after.kept.used_bytes), (before.objects, before.kept.used_bytes));
    life(&test, &mut sender);
}
