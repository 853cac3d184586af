//! Guests that mean no good: random registers, commands and configuration, and many processors at once.

use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;

use crate::abi::cmd::{CreateCq, CreateMr, CreateQp, DestroyPd, Opcode, REQUEST_SIZE, RequestHeader, qp_type};
use crate::abi::layout::{GuestLayout, write_field};
use crate::abi::regs::offset;
use crate::pci_function::PciFunction;
use crate::stats::ObjectCounts;
use crate::test_rig::{FREE, Rig, UAR_PFN, config, page};

/// Numbers that commands are made of: small ones, sizes at the edges, addresses that exist, anything.
fn word() -> impl Strategy<Value = u32> {
    prop_oneof![
        4 => 0u32..8,
        1 => (0u32..32).prop_map(|bit| 1 << bit),
        1 => (0u32..32).prop_map(|bit| (1 << bit) - 1),
        1 => (0u64..64).prop_map(|index| u32::try_from(page(index)).unwrap()),
        1 => any::<u32>(),
    ]
}

fn command() -> impl Strategy<Value = Vec<u8>> {
    (0u32..24, proptest::collection::vec(word(), 42), any::<bool>()).prop_map(|(id, words, context)| {
        let mut slot = vec![0; REQUEST_SIZE];
        for (index, word) in words.iter().enumerate() {
            write_field(&mut slot, 16 + index * 4, word);
        }
        if id == Opcode::CREATE_UC.0 && context {
            write_field(&mut slot, 16, &(UAR_PFN + u64::from(words[0] % 16)));
        }
        RequestHeader { response: 1, cmd: id }.encode(&mut slot);
        slot
    })
}

#[derive(Clone, Debug)]
enum Step {
    Command(Vec<u8>),
    Register(u64, u32),
    Doorbell(u64, u32),
    Config(usize, Vec<u8>),
    Memory(u64, u64),
    Deferred,
    BringUp,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        10 => command().prop_map(Step::Command),
        2 => ((0u64..12).prop_map(|i| i * 4), word()).prop_map(|(at, value)| Step::Register(at, value)),
        4 => ((0u64..0x4_0000).prop_map(|at| at & !3), any::<u32>(), 0u32..8)
            .prop_map(|(at, flags, handle)| Step::Doorbell(at & 0x3_f00c, flags & 0xff00_0000 | handle)),
        1 => (0usize..260, proptest::collection::vec(any::<u8>(), 1..9)).prop_map(|(at, data)| Step::Config(at, data)),
        2 => (0u64..4096, (0u64..64).prop_map(page)).prop_map(|(at, value)| Step::Memory(at * 8, value)),
        1 => Just(Step::Deferred),
        1 => Just(Step::BringUp),
    ]
}

fn enable(rig: &Rig) {
    rig.set_bus_master(false);
    rig.set_bus_master(true);
    rig.device.config_write(0x42, &0x8002_u16.to_le_bytes());
    rig.bring_up();
}

/// Stops the other threads, also when this one panics.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Nothing panics, and in the end everything can be taken away.
    #[test]
    fn random_guests(steps in proptest::collection::vec(step(), 1..60)) {
        let rig = Rig::up();
        // Directories for commands that happen to name them.
        for dir in [FREE, FREE + 2] {
            rig.directory(dir, FREE + 8, 40);
        }
        for step in steps {
            match step {
                Step::Command(slot) => {
                    rig.poke(page(1), &slot);
                    rig.request();
                }
                Step::Register(at, value) => {
                    rig.write(at, value);
                    rig.read(at);
                }
                Step::Doorbell(at, value) => rig.device.bar_write(2, at, &value.to_le_bytes()),
                Step::Config(at, data) => rig.device.config_write(at, &data),
                Step::Memory(at, value) => rig.poke(page(0) + at, &value.to_le_bytes()),
                Step::Deferred => rig.device.run_deferred(),
                Step::BringUp => enable(&rig),
            }
        }
        enable(&rig);
        rig.create_pd(0);
        rig.device.reset();
        let status = rig.device.status();
        prop_assert_eq!(status.objects, ObjectCounts::default());
        prop_assert_eq!(status.page_list_extents, 0);
    }
}

/// Conformance 21: a hundred thousand refusals leave nothing behind.
#[test]
fn refusals_do_not_leak() {
    let rig = Rig::up();
    let (pd, cq) = (rig.create_pd(0), rig.create_cq(0));
    let before = rig.device.status();
    let good = rig.qp_request(qp_type::RC, pd, cq);
    let slots: Vec<Vec<u8>> = [
        encode(Opcode::CREATE_QP, &CreateQp { total_chunks: 5, ..good }),
        encode(Opcode::CREATE_QP, &CreateQp { max_send_sge: 4, ..good }),
        encode(Opcode::CREATE_CQ, &CreateCq { cqe: 128, ..rig.cq_request(0) }),
        encode(Opcode::CREATE_MR, &CreateMr { pdir_dma: page(15), ..rig.mr_request(pd) }),
        encode(Opcode::CREATE_MR, &CreateMr { flags: 9, ..rig.mr_request(pd) }),
    ]
    .into();
    for round in 0..100_000 {
        rig.memory.view().write(page(1), &slots[round % slots.len()]).unwrap();
        assert_ne!(rig.request(), 0);
    }
    let after = rig.device.status();
    assert_eq!((after.objects, after.page_list_extents), (before.objects, before.page_list_extents));
    rig.run(Opcode::DESTROY_PD, &DestroyPd { pd_handle: pd }).unwrap();
}

fn encode<T: GuestLayout>(opcode: Opcode, body: &T) -> Vec<u8> {
    let mut slot = vec![0; REQUEST_SIZE];
    body.encode(&mut slot);
    RequestHeader { response: 0, cmd: opcode.0 }.encode(&mut slot);
    slot
}

/// Processors that ring and read while another one makes, destroys, resets and switches bus mastering: nobody waits for
/// ever, and after the last reset nothing is left.
#[test]
fn doorbells_during_commands_and_resets() {
    let rig = Rig::new(config());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..3u32 {
            let (rig, stop) = (&rig, &stop);
            scope.spawn(move || {
                let mut value = thread;
                while !stop.load(Ordering::Relaxed) {
                    value = value.wrapping_mul(0x0019_660d).wrapping_add(0x3c6e_f35f);
                    rig.ring(u64::from(value >> 8) % 3, u64::from(value >> 16) % 3 * 4, value & 0xe000_0003);
                    rig.device.run_deferred();
                    rig.read(offset::ERR);
                }
            });
        }
        let _stop = Stop(&stop);
        for round in 0..200 {
            enable(&rig);
            let context = rig.open(1);
            let (pd, cq) = (rig.create_pd(context), rig.create_cq(context));
            rig.create_qp(pd, cq);
            rig.create_srq(pd);
            rig.create_mr(pd);
            match round % 3 {
                0 => rig.write(offset::CTL, 2),
                1 => rig.set_bus_master(false),
                _ => rig.device.reset(),
            }
        }
    });
    rig.device.reset();
    rig.device.run_deferred();
    let status = rig.device.status();
    assert_eq!((status.objects, status.page_list_extents), (ObjectCounts::default(), 0));
}
