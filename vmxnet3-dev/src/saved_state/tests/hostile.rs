//! States that are refused, one test for each refusal, and the size of states. A refused state leaves a device that a
//! driver can start.

use pvrdma_base::Random;
use pvrdma_pci_function::PciFunction;
use pvrdma_saved_state::vmxnet3::{DataRing, Function, MulticastAddresses, ReceiveQueue, Ring, Session, Statistics};
use pvrdma_saved_state::{DeviceKind, Header, LoadError, Reader, Writer};

use super::busy::Busy;
use super::pause::exchange;
use super::{MAX_STATE, another, config, records, save, state_of};
use crate::testing::{Driver, DriverConfig, Guest, command};
use crate::{RestoreError, Vmxnet3Config};

/// Asserts that a device refuses a state, and that a driver can start it afterwards. Returns the reason.
fn refused(busy: &Busy, state: &[u8]) -> RestoreError {
    let (guest, port) = busy.fresh();
    // A driver is active, and loses its session.
    exchange(&mut Driver::up(&guest, DriverConfig::default()), &port);
    let error = guest.device.restore_state(&mut &state[..]).expect_err("a state that should be refused");
    let status = guest.device.status();
    assert!(!status.active && !guest.memory.space().is_enabled(), "not as after a reset");
    assert_eq!((guest.read(1, 0x10), guest.read(1, 0x20)), (0, 0));
    guest.memory.rewind(crate::testing::MEMORY_BASE);
    exchange(&mut Driver::up(&guest, DriverConfig::default()), &port);
    error
}

/// Refuses a state in which one value was changed.
fn refused_with(expected: &str, change: impl Fn(&mut Function)) {
    let busy = Busy::get();
    let (mut function, multicast) = records(&busy.state);
    change(&mut function);
    let error = refused(busy, &state_of(&busy.state, &function, &multicast));
    assert_eq!(error.to_string(), expected);
}

fn refused_session(expected: &str, change: impl Fn(&mut Session)) {
    refused_with(expected, |function| change(function.session.as_mut().unwrap()));
}

fn refused_ring(expected: &str, change: impl Fn(&mut Ring)) {
    refused_session(expected, |session| change(session.transmit[1].ring.as_mut().unwrap()));
}

fn refused_queue(expected: &str, change: impl Fn(&mut ReceiveQueue)) {
    refused_session(expected, |session| change(&mut session.receive[1]));
}

#[test]
fn a_part_that_is_missing() {
    refused_with("the state has no interrupts", |function| function.interrupts = None);
    refused_session("the state has no transmit ring", |session| session.transmit[0].ring = None);
    refused_session("the state has no completion ring", |session| session.transmit[0].completions = None);
    refused_queue("the state has no receive ring 1", |queue| queue.first = None);
    refused_queue("the state has no completion ring", |queue| queue.completions = None);
}

#[test]
fn registers_that_a_guest_cannot_set() {
    for revision in [0, 4, 0x101] {
        refused_with(&format!("invalid revision: {revision:#x}"), |function| function.revision = revision);
    }
    refused_with("invalid configuration space: 0xff", |function| function.config_space.truncate(255));
    refused_with("invalid MAC address: 0x7", |function| function.mac.push(0));
    refused_with("invalid coalescing scheme: 0xf", |function| function.coalesce.truncate(15));
    refused_with("the state has no known coalescing scheme", |function| function.coalesce[0] = 4);
    refused_with("the state has no known coalescing scheme", |function| function.coalesce[5] = 1);
}

#[test]
fn interrupts_that_cannot_be() {
    refused_with("invalid number of interrupt vectors: 0xf", |function| {
        function.interrupts.as_mut().unwrap().vectors.truncate(15);
    });
    refused_with("invalid round of interrupt vector: 0x0", |function| {
        function.interrupts.as_mut().unwrap().vectors[0].masked = false;
    });
    refused_with("invalid round of interrupt vector: 0x0", |function| {
        function.interrupts.as_mut().unwrap().auto_mask = false;
    });
}

#[test]
fn statistics_of_another_shape() {
    refused_with("invalid number of statistics: 0x9", |function| {
        function.transmit_statistics.push(Statistics { values: vec![0; 10] });
    });
    refused_with("invalid number of values of statistics: 0xb", |function| {
        function.receive_statistics[0].values.push(0);
    });
}

#[test]
fn a_session_that_cannot_be_activated() {
    refused_session("invalid revision: 0x4", |session| session.revision = 4);
    refused_session("invalid shared area: 0x1004", |session| session.shared = 0x1004);
    refused_session("invalid shared area: 0xfffffffffffffe00", |session| session.shared = u64::MAX - 511);
    refused_session("invalid queue descriptors: 0x40", |session| session.queue_descriptors = 0x40);
    refused_session("invalid queue descriptors: 0xffffffffffffff80", |session| {
        session.queue_descriptors = u64::MAX - 127;
    });
    for mtu in [59, 9001] {
        refused_session(&format!("invalid MTU: {mtu:#x}"), |session| session.mtu = mtu);
    }
    refused_session("invalid interrupt vector: 0x10", |session| session.event_vector = 16);
    refused_session("invalid features: 0x10", |session| session.features = 0x10);
    refused_session("invalid receive mode: 0x20", |session| session.receive_mode = 0x20);
    refused_session("invalid VLAN table: 0x1ff", |session| session.vlans.truncate(511));
}

#[test]
fn another_number_of_queues() {
    refused_session("invalid transmit queues: 0x0", |session| session.transmit.clear());
    refused_session("invalid receive queues: 0x0", |session| session.receive.clear());
    refused_session("invalid transmit queues: 0x9", |session| {
        session.transmit.resize(9, session.transmit[0].clone());
    });
    refused_session("invalid receive queues: 0x400", |session| {
        session.rss = None;
        session.receive.resize(1024, ReceiveQueue::default());
    });
}

#[test]
fn rings_that_cannot_be() {
    for entries in [0, 33, 4128] {
        refused_ring(&format!("invalid transmit ring: {entries:#x}"), |ring| ring.entries = entries);
    }
    refused_ring("invalid transmit ring: 0x1010", |ring| ring.base = 0x1010);
    refused_ring("invalid transmit ring: 0xfffffffffffffe00", |ring| ring.base = u64::MAX - 511);
    refused_ring("invalid transmit ring: 0x20", |ring| ring.index = 32);
    refused_queue("invalid receive ring 1: 0x20", |queue| queue.first.as_mut().unwrap().index = 32);
    refused_queue("invalid receive ring 2: 0x20", |queue| queue.second.as_mut().unwrap().index = 32);
    refused_queue("invalid completion ring: 0x40", |queue| queue.completions.as_mut().unwrap().index = 64);
    refused_session("invalid completion ring: 0x20", |session| {
        session.transmit[0].completions.as_mut().unwrap().index = 32;
    });
}

#[test]
fn queues_that_cannot_be() {
    refused_session("invalid interrupt vector: 0x10", |session| session.transmit[0].vector = 16);
    refused_session("invalid interrupt vector: 0x100", |session| session.transmit[0].vector = 0x100);
    refused_queue("invalid interrupt vector: 0x10", |queue| queue.vector = 16);
    for most in [0, 65] {
        let expected = format!("invalid number of buffers per frame: {most:#x}");
        refused_queue(&expected, |queue| queue.max_buffers = most);
    }
    refused_session("invalid error of a queue: 0x1", |session| session.transmit[0].error = 1);
    refused_queue("invalid error of a queue: 0x80000008", |queue| queue.error = 0x8000_0008);
}

#[test]
fn data_rings_that_cannot_be() {
    for slot in [0, 65, 2112] {
        let expected = format!("invalid slot of the data ring: {slot:#x}");
        refused_queue(&expected, |queue| queue.data = Some(DataRing { base: 0x1000, slot }));
    }
    refused_queue("invalid slot of the data ring: 0x10080", |queue| queue.data.as_mut().unwrap().slot = 0x1_0080);
    refused_queue("invalid data ring: 0xfffffffffffffff0", |queue| queue.data.as_mut().unwrap().base = u64::MAX - 15);
    refused_session("invalid data ring in revision: 0x2", |session| session.revision = 2);
}

#[test]
fn rss_that_cannot_be() {
    let rss = |expected: &str, change: &dyn Fn(&mut pvrdma_saved_state::vmxnet3::Rss)| {
        refused_session(expected, |session| change(session.rss.as_mut().unwrap()));
    };
    rss("invalid RSS hash types: 0x10", &|rss| rss.hash_types = 0x10);
    rss("invalid RSS key: 0x29", &|rss| rss.key.push(0));
    rss("invalid length of the RSS table: 0x0", &|rss| rss.table.clear());
    rss("invalid length of the RSS table: 0x81", &|rss| rss.table.resize(129, 0));
    rss("invalid RSS queue: 0x3", &|rss| rss.table[1] = 3);
}

#[test]
fn multicast_tables_that_cannot_be() {
    let busy = Busy::get();
    let (mut function, _) = records(&busy.state);
    let list = |len| MulticastAddresses { addresses: vec![1; len] };
    for (records, expected) in [(vec![list(6), list(5)], 11), (vec![list(32_766), list(32_772)], 65_538)] {
        let error = refused(busy, &state_of(&busy.state, &function, &records));
        assert_eq!(error.to_string(), format!("invalid length of the multicast table: {expected:#x}"));
    }
    function.session = None;
    let error = refused(busy, &state_of(&busy.state, &function, &[list(6)]));
    assert_eq!(error.to_string(), "invalid length of the multicast table: 0x6", "without a session");
}

#[test]
fn states_of_other_devices() {
    let busy = Busy::get();
    let (function, multicast) = records(&busy.state);
    let with_header = |header: &Header| {
        let mut state = Vec::new();
        let mut writer = Writer::new(&mut state, header, MAX_STATE).unwrap();
        writer.write(&function).unwrap();
        writer.finish().unwrap();
        state
    };
    let header = Header::new(DeviceKind::Pvrdma, config().mac.0);
    assert!(matches!(refused(busy, &with_header(&header)), RestoreError::Device));
    let header = Header::new(DeviceKind::Vmxnet3, [2, 0, 0, 0, 0, 9]);
    assert!(matches!(refused(busy, &with_header(&header)), RestoreError::Mac(_)));
    // Records in another order.
    let header = Header::new(DeviceKind::Vmxnet3, config().mac.0);
    let mut state = Vec::new();
    let mut writer = Writer::new(&mut state, &header, MAX_STATE).unwrap();
    writer.write(&multicast[0]).unwrap();
    writer.finish().unwrap();
    assert!(matches!(refused(busy, &state), RestoreError::Stream(LoadError::Unexpected { .. })));
    let state = state_of(&busy.state, &function, std::slice::from_ref(&function));
    assert!(matches!(refused(busy, &state), RestoreError::Stream(LoadError::Unexpected { .. })));
}

/// A function with another number of vectors is not the one that the guest has configured.
#[test]
fn another_configuration() {
    let busy = Busy::get();
    let (guest, port) = busy.fresh();
    let other = Vmxnet3Config { vectors: 8, ..config() };
    let other = Guest::with_memory(other, guest.memory.of_another_device(), guest.irqs.clone(), port);
    let error = other.device.restore_state(&mut &busy.state[..]).unwrap_err();
    assert_eq!(error.to_string(), "invalid number of interrupt vectors: 0x10");
}

/// A stream that ends early is refused at each of its bytes, and a damaged one by its checksum at the latest.
#[test]
fn damaged_streams() {
    let busy = Busy::get();
    let (guest, port) = busy.fresh();
    for len in 0..busy.state.len() {
        let error = guest.device.restore_state(&mut &busy.state[..len]).unwrap_err();
        assert!(matches!(error, RestoreError::Stream(LoadError::Truncated)), "{len}: {error}");
    }
    let mut random = Random::Seed(7);
    for _ in 0..2000 {
        let mut state = busy.state.clone();
        let at = random.draw().unwrap() as usize % state.len();
        state[at] ^= 1 << (random.draw().unwrap() % 8);
        guest.device.restore_state(&mut &state[..]).unwrap_err();
    }
    exchange(&mut Driver::up(&guest, DriverConfig::default()), &port);
}

/// Random values are refused, or produce a device that can be saved, used and reset: nothing panics, and the
/// state that is saved is one that can be restored.
#[test]
fn states_of_random_values() {
    let busy = Busy::get();
    let (function, multicast) = records(&busy.state);
    let mut random = Random::Seed(3);
    let mut accepted = 0;
    for _ in 0..300 {
        let mut changed = function.clone();
        for _ in 0..1 + random.draw().unwrap() % 3 {
            let mutants = super::mutate::mutants(&changed);
            let chosen = random.draw().unwrap() as usize % mutants.len();
            changed = mutants.into_iter().nth(chosen).unwrap();
        }
        let state = state_of(&busy.state, &changed, &multicast);
        let guest = busy.next();
        if guest.device.restore_state(&mut &state[..]).is_err() {
            continue;
        }
        accepted += 1;
        let again = save(&guest.device);
        let (next, _) = busy.fresh();
        next.device.restore_state(&mut &again[..]).unwrap();
        assert!(records(&save(&next.device)) == records(&again));
        if guest.device.resume_state().is_ok() {
            busy.bring_frames(&guest);
        }
        guest.command(command::RESET);
        guest.device.reset();
    }
    assert!(accepted > 20, "{accepted}");
}

#[test]
fn the_largest_multicast_table_is_restored() {
    let (guest, port) = Guest::recording();
    let driver = Driver::up(&guest, DriverConfig::default());
    let address = |number: u16| [1, 0, 0x5e, 0, number.to_be_bytes()[0], number.to_be_bytes()[1]];
    let table: Vec<_> = (0..10_922).map(address).collect();
    assert_eq!(driver.set_multicast(&table), 0);
    let state = save(&guest.device);
    let next = another(&guest, guest.memory.of_another_device(), &port);
    next.device.restore_state(&mut &state[..]).unwrap();
    let (_, multicast) = records(&save(&next.device));
    assert_eq!(multicast.iter().map(|list| list.addresses.len()).sum::<usize>(), 65_532);
    assert!(records(&state).1 == multicast);
}

/// Sizes of states, in bytes: of a device without a driver, with one that has a queue in each direction, and with one
/// that has eight.
#[test]
fn states_are_small() {
    let size = |queues: Option<u8>| {
        let (guest, _port) = Guest::recording();
        if let Some(queues) = queues {
            Driver::up(&guest, DriverConfig { tx_queues: queues, rx_queues: queues, ..DriverConfig::default() });
        }
        save(&guest.device).len()
    };
    let sizes = [None, Some(1), Some(8)].map(size);
    println!("{sizes:?}");
    assert!(sizes[0] <= 1024 && sizes[1] <= 2048 && sizes[2] <= 4096, "{sizes:?}");
    let busy = Busy::get();
    let mut input = &busy.state[..];
    let reader = Reader::new(&mut input, MAX_STATE).unwrap();
    assert_eq!((reader.header().name.as_str(), reader.header().needs.len()), ("vm1", 0));
}
