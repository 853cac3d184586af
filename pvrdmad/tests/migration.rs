//! A client migrates a device: the states and their arcs, the state in transit, the log of written pages, and clients
//! that do it wrong.

use std::os::fd::AsFd;

use crate::common::migratable::{
    DATA_SIZE, DEVICE_STATE, ERROR, GET, LOG_REPORT, LOG_START, LOG_STOP, MEMORY_MISSING, MIGRATION, PROBE, REFUSED,
    RESUMING, RUNNING, SET, STOP, STOP_COPY, state,
};
use crate::common::{EINVAL, Event, PATIENCE, Raw, Served, eventfd, memfd, words, write_body};
use pvrdma_guest_memory::Kept;
use pvrdma_vfio_user_server::{
    HoldError,
    message::{Command, Header},
};
use pvrdmad::testing::Dice;

const ENOTTY: u32 = 25;
const EIO: u32 = 5;
const ENOMEM: u32 = 12;
const EFAULT: u32 = 14;
const ENOTSUP: u32 = 95;
const PAGE: u64 = 4096;
const RW: u32 = 3;

fn events(served: &Served) -> Vec<Event> {
    served.function.wait(|_| true).into_iter().filter(|event| *event != Event::Deferred).collect()
}

fn restored(payload: &[u8]) -> Event {
    Event::Restore(payload.to_vec())
}

/// Bytes that differ from place to place.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from(at / 3 % 200).unwrap()).collect()
}

#[test]
fn the_device_takes_the_arcs_in_between() {
    let served = Served::new();
    let mut client = served.client();
    assert_eq!(client.feature(GET | MIGRATION, &[]).ok()[8..], 1_u64.to_le_bytes());
    assert_eq!(client.state(), RUNNING);
    let ways: [(u32, &[Event]); 10] = [
        (RUNNING, &[]),
        (STOP, &[Event::Pause]),
        (STOP, &[]),
        (RUNNING, &[Event::Resume]),
        (STOP_COPY, &[Event::Pause, Event::Save]),
        (STOP_COPY, &[]),
        (RUNNING, &[Event::Resume]),
        (STOP_COPY, &[Event::Pause, Event::Save]),
        (RESUMING, &[]),
        (RESUMING, &[]),
    ];
    for (target, through) in ways {
        client.set_state(target).ok();
        assert_eq!((client.state(), &events(&served)[..]), (target, through));
    }
    client.write_data(&state(b"x")).ok();
    client.set_state(STOP_COPY).ok();
    assert_eq!(events(&served), [restored(b"x"), Event::Save]);
    // ERROR, the optional states, and numbers without a meaning.
    for target in [ERROR, 5, 6, 7, 8, u32::MAX] {
        assert_eq!(client.set_state(target).errno(), EINVAL, "{target}");
        assert_eq!(client.state(), STOP_COPY);
    }
    drop(client);
    // The next client finds a device that runs.
    let events = served.function.wait(|events| events.contains(&Event::Resume));
    assert_eq!(events, [Event::Reset, Event::Resume]);
    assert_eq!(served.client().state(), RUNNING);
}

/// As a VMM does it that maps memory and sets interrupts after it has written the state.
#[test]
fn a_state_moves_in_parts_and_memory_comes_after_it() {
    let (source, destination) = (Served::new(), Served::new());
    let payload = pattern(150_001);
    source.function.paused.lock().unwrap().payload.clone_from(&payload);
    let mut client = source.client();
    client.set_state(STOP_COPY).ok();
    assert_eq!(client.data_size(), 150_005);
    assert!(source.budget.used_for(Kept::Migration) >= 150_005);
    let data = client.read_all_data(4096);
    assert_eq!(client.data_size(), 0);
    assert!(data == state(&payload) && source.budget.used() == 0);
    // The end is the end, also the second time.
    assert_eq!(client.read_data(100).ok(), words(&[8, 0]));

    let mut client = destination.client();
    client.set_state(RESUMING).ok();
    for part in data.chunks(65_521) {
        assert!(client.write_data(part).ok().is_empty());
    }
    let (vector, memory) = (eventfd(), memfd("guest", PAGE));
    client.write(7, 4, &[6, 0]);
    client.set_irqs(2, 4 | 32, 0, 1, &[vector.as_fd()]).ok();
    client.map(0, PAGE, 0, RW, Some(&memory)).ok();
    events(&destination);
    client.set_state(RUNNING).ok();
    assert_eq!(events(&destination), [restored(&payload), Event::Resume]);
    assert_eq!(destination.budget.used(), 0);
    client.write(1, 0, &[1]);
}

#[test]
fn data_moves_in_its_states_only() {
    let served = Served::new();
    let mut client = served.client();
    for (target, reads, writes) in
        [(RUNNING, false, false), (STOP, false, false), (STOP_COPY, true, false), (RESUMING, false, true)]
    {
        client.set_state(target).ok();
        let answers = [client.read_data(10).header.error, client.write_data(b"1234").header.error];
        assert_eq!(answers, [reads, writes].map(|good| if good { 0 } else { EINVAL }), "{target}");
        assert_eq!(client.state(), target);
    }
    // Four bytes are no state.
    assert_eq!(client.set_state(STOP).errno(), EINVAL);
    let answers = [client.read_data(10).errno(), client.write_data(b"1234").errno()];
    assert_eq!((answers, client.state()), ([EINVAL; 2], ERROR));
}

/// A paused function takes no register access. Its configuration space is accessible in every state.
#[test]
fn bars_are_accessible_while_the_device_runs() {
    let served = Served::new();
    let mut client = served.client();
    let accesses = |client: &mut Raw| {
        let read = client.call(Command::REGION_READ, &crate::common::access(1, 0, 4), &[]).header.error;
        let write = client.call(Command::REGION_WRITE, &write_body(1, 0, &[1; 4]), &[]).header.error;
        let element = [&0_u64.to_le_bytes()[..], &words(&[1, 4, 7, 0])].concat();
        let multi = [&1_u64.to_le_bytes()[..], &element].concat();
        [read, write, client.call(Command::REGION_WRITE_MULTI, &multi, &[]).header.error]
    };
    for (target, errno) in [(RUNNING, 0), (STOP, EINVAL), (STOP_COPY, EINVAL), (RESUMING, EINVAL)] {
        client.set_state(target).ok();
        events(&served);
        assert_eq!(accesses(&mut client), [errno; 3], "{target}");
        let writes = events(&served).iter().filter(|event| matches!(event, Event::Write(..))).count();
        assert_eq!(writes, if errno == 0 { 2 } else { 0 });
        assert_eq!(client.read(7, 0, 4), [0xad, 0x15, 0x20, 0x08]);
        client.write(7, 4, &[6]);
    }
    assert_eq!(client.set_state(RUNNING).errno(), EINVAL);
    assert_eq!(accesses(&mut client), [EINVAL; 3]);
    client.read(7, 0, 4);
}

#[test]
fn after_a_refused_state_only_a_reset_helps() {
    let payload = |first| state(&[first, 2, 3]);
    let cases: [(&[u8], u32); 6] = [
        (&[], EINVAL),
        (&payload(1)[..6], EINVAL),
        (&payload(REFUSED), EINVAL),
        (&[&payload(1)[..], &[0]].concat(), EINVAL),
        (&state(&[]), 0),
        (&payload(MEMORY_MISSING), EFAULT),
    ];
    let served = Served::new();
    let mut client = served.client();
    for (data, errno) in cases {
        client.set_state(RESUMING).ok();
        client.write_data(data).ok();
        let answer = client.set_state(RUNNING);
        assert_eq!(answer.header.error, errno, "{data:?}");
        assert!(!served.function.paused.lock().unwrap().paused);
        if errno == 0 {
            continue;
        }
        assert_eq!(client.state(), ERROR);
        for target in [ERROR, STOP, RUNNING, STOP_COPY, RESUMING] {
            assert_eq!(client.set_state(target).errno(), EINVAL);
        }
        assert_eq!(client.call(Command::REGION_READ, &crate::common::access(1, 0, 4), &[]).errno(), EINVAL);
        client.call(Command::DEVICE_RESET, &[], &[]).ok();
        assert_eq!(client.state(), RUNNING);
        client.write(1, 0, &[1]);
    }
    assert_eq!(served.budget.used(), 0);
}

/// The source continues after a save that fails, and after one whose state is not used.
#[test]
fn a_failed_migration_leaves_the_source_as_it_was() {
    let served = Served::new();
    let mut client = served.client();
    served.function.paused.lock().unwrap().unsavable = true;
    assert_eq!(client.set_state(STOP_COPY).errno(), EIO);
    assert_eq!(client.state(), STOP);
    client.set_state(RUNNING).ok();
    assert_eq!(events(&served), [Event::Pause, Event::Save, Event::Resume]);

    // More than the device may keep.
    let mut paused = served.function.paused.lock().unwrap();
    (paused.unsavable, paused.payload) = (false, pattern(1 << 20));
    drop(paused);
    assert_eq!(client.set_state(STOP_COPY).errno(), ENOMEM);
    assert_eq!((client.state(), served.budget.used()), (STOP, 0));
    served.function.paused.lock().unwrap().payload.truncate(500_000);
    client.set_state(STOP_COPY).ok();
    client.read_data(1000).ok();
    client.set_state(RUNNING).ok();
    assert_eq!(served.budget.used(), 0);

    // As Cloud Hypervisor does it when a transition fails: a reset, then the command register and the interrupts.
    client.set_state(STOP_COPY).ok();
    events(&served);
    client.call(Command::DEVICE_RESET, &[], &[]).ok();
    client.write(7, 4, &[6, 0]);
    client.set_irqs(2, 4 | 32, 0, 1, &[eventfd().as_fd()]).ok();
    assert_eq!(client.state(), RUNNING);
    assert_eq!(events(&served), [Event::Reset, Event::Resume, Event::Config(4, vec![6, 0])]);
    assert_eq!(served.budget.used(), 0);
}

/// A client may send states forever; the device keeps as much as it may.
#[test]
fn a_state_that_never_ends_is_bounded() {
    let served = Served::new();
    let mut client = served.client();
    client.set_state(RESUMING).ok();
    let part = pattern(200_000);
    while client.write_data(&part).header.error == 0 {
        assert!(served.budget.used() <= served.budget.limit());
    }
    assert_eq!((client.write_data(&part).errno(), client.state()), (ENOMEM, RESUMING));
    drop(client);
    // Served only after the first client's state was dropped.
    served.client();
    assert_eq!(served.budget.used(), 0);
}

#[test]
fn the_log_reports_written_pages() {
    let served = Served::new();
    let mut client = served.client();
    let memory = memfd("guest", 600 * PAGE);
    client.map(0, 600 * PAGE, 0, RW, Some(&memory)).ok();
    let write = |page: u64, pages: u64| {
        let bytes = vec![1; usize::try_from(pages * PAGE).unwrap()];
        served.memory.view().write(page * PAGE, &bytes).unwrap();
    };
    write(0, 1);
    assert_eq!(client.report(0, PAGE, PAGE).errno(), EINVAL);
    client.start_log(&[(300 * PAGE, 300 * PAGE), (0, 300 * PAGE)]).ok();
    assert_eq!(client.start_log(&[(0, PAGE)]).errno(), EINVAL);
    write(3, 2);
    write(299, 2);
    assert_eq!(client.written_pages(0, 299 * PAGE), [3, 4]);
    assert_eq!(client.written_pages(299 * PAGE, 301 * PAGE), [0, 1]);
    assert!(client.written_pages(0, 600 * PAGE).is_empty());
    write(599, 1);
    assert_eq!(client.report(592 * PAGE, 8 * PAGE, 4 * PAGE).ok()[32..], 2_u64.to_le_bytes());
    // The log continues while the device is paused, and through a reset.
    client.set_state(STOP).ok();
    write(7, 1);
    assert_eq!(client.written_pages(0, 600 * PAGE), [7]);
    client.call(Command::DEVICE_RESET, &[], &[]).ok();
    write(8, 1);
    assert_eq!(client.written_pages(0, 600 * PAGE), [8]);
    for (iova, length, page_size) in [
        (0, 601 * PAGE, PAGE),
        (1, PAGE, PAGE),
        (0, 0, PAGE),
        (0, PAGE, 0),
        (0, PAGE, 2048),
        (0, PAGE, 3 * PAGE),
        (0, u64::MAX, PAGE),
    ] {
        assert_eq!(client.report(iova, length, page_size).errno(), EINVAL, "{iova:#x}+{length:#x}");
    }
    client.stop_log().ok();
    client.stop_log().ok();
    assert_eq!((client.report(0, PAGE, PAGE).errno(), served.budget.used()), (EINVAL, 0));

    client.start_log(&[(0, PAGE)]).ok();
    drop(client);
    let mut next = served.client();
    assert_eq!((next.report(0, PAGE, PAGE).errno(), served.budget.used()), (EINVAL, 0));
    // A bitmap larger than the device may keep, and more ranges than a VMM has.
    assert_eq!(next.start_log(&[(0, 1 << 50)]).errno(), ENOMEM);
    let pieces = memfd("pieces", PAGE);
    for piece in 0..513 {
        next.map(piece * 2 * PAGE, PAGE, 0, RW, Some(&pieces)).ok();
    }
    assert_eq!(next.start_log(&[(0, PAGE)]).errno(), ENOTSUP);
}

/// The next server would know neither the state of the migration nor the log.
#[test]
fn a_device_that_is_migrated_is_not_handed_over() {
    let served = Served::new();
    let mut client = served.client();
    let hold = || served.server.as_ref().unwrap().hold(PATIENCE).map(drop);
    assert_eq!(hold(), Ok(()));
    client.start_log(&[(0, PAGE)]).ok();
    assert_eq!(hold(), Err(HoldError::Migrating));
    client.stop_log().ok();
    assert_eq!(hold(), Ok(()));
    client.set_state(STOP).ok();
    assert_eq!(hold(), Err(HoldError::Migrating));
    client.set_state(RUNNING).ok();
    assert_eq!(hold(), Ok(()));
}

/// Requests with one thing wrong: sizes, operations, numbers.
#[test]
fn malformed_messages_are_refused_and_change_nothing() {
    let served = Served::new();
    let mut client = served.client();
    let u64s = |numbers: &[u64]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>();
    let feature = |room, flags, data: &[u8]| [&words(&[room, flags]), data].concat();
    let start = |page_size: u64, count: u32, ranges: &[u64]| {
        feature(1000, SET | LOG_START, &[u64s(&[page_size]), words(&[count, 0]), u64s(ranges)].concat())
    };
    let bad_features = [
        (EINVAL, vec![]),
        (EINVAL, words(&[8])),
        (EINVAL, feature(7, PROBE | MIGRATION, &[])),
        (EINVAL, feature(8, MIGRATION, &[])),
        (EINVAL, feature(100, GET | SET | DEVICE_STATE, &words(&[1, 0]))),
        (EINVAL, feature(100, SET | MIGRATION, &[0; 8])),
        (EINVAL, feature(100, PROBE | SET | MIGRATION, &[])),
        (EINVAL, feature(100, GET | 1 << 19 | MIGRATION, &[])),
        (EINVAL, feature(15, GET | MIGRATION, &[])),
        (EINVAL, feature(15, GET | DATA_SIZE, &[])),
        (EINVAL, feature(15, GET | DEVICE_STATE, &[])),
        (EINVAL, feature(16, SET | DEVICE_STATE, &words(&[1]))),
        (EINVAL, feature(16, SET | DEVICE_STATE, &words(&[1, 0, 0]))),
        (EINVAL, feature(100, GET | LOG_START, &[0; 16])),
        (EINVAL, feature(100, GET | LOG_STOP, &[])),
        (EINVAL, feature(100, SET | LOG_REPORT, &[0; 24])),
        (EINVAL, feature(100, GET | LOG_REPORT, &u64s(&[0, PAGE]))),
        // Room for the bitmap is missing; or it is more than a message may have.
        (EINVAL, feature(39, GET | LOG_REPORT, &u64s(&[0, PAGE, PAGE]))),
        (EINVAL, feature(u32::MAX, GET | LOG_REPORT, &u64s(&[0, PAGE * 8 * ((1 << 20) + 8), PAGE]))),
        (EINVAL, start(PAGE, 0, &[])),
        (EINVAL, start(PAGE, 2, &[0, PAGE])),
        (EINVAL, start(PAGE, 1, &[0, PAGE, 0])),
        (EINVAL, start(PAGE + 1, 1, &[0, PAGE])),
        (EINVAL, start(PAGE, 1, &[1, PAGE])),
        (EINVAL, start(PAGE, 1, &[0, 0])),
        (EINVAL, start(PAGE, 2, &[0, 2 * PAGE, PAGE, PAGE])),
        (EINVAL, start(PAGE, 1, &[u64::MAX - 4095, 2 * PAGE])),
        (ENOTTY, feature(100, PROBE, &[])),
        (ENOTTY, feature(100, GET | 3, &[])),
        (ENOTTY, feature(100, SET | 10, &[])),
        (ENOTTY, feature(100, GET | 0xffff, &[])),
    ];
    let data = |room, size: u32, data: &[u8]| [&words(&[room, size]), data].concat();
    let too_many = (1 << 20) + 1;
    let bad_reads = [
        vec![],
        words(&[8]),
        data(7, 0, &[]),
        data(17, 10, &[]),
        data(u32::MAX, too_many, &[]),
        data(8, u32::MAX, &[]),
    ];
    let bad_writes =
        [vec![], words(&[8]), data(12, 4, &[0; 3]), data(12, 4, &[0; 5]), data(7, 4, &[0; 4]), data(8, u32::MAX, &[])];
    for target in [RUNNING, STOP_COPY, RESUMING] {
        client.set_state(target).ok();
        for (errno, body) in &bad_features {
            assert_eq!(client.call(Command::DEVICE_FEATURE, body, &[]).errno(), *errno, "{body:?}");
        }
        for body in &bad_reads {
            assert_eq!(client.call(Command::MIG_DATA_READ, body, &[]).errno(), EINVAL, "{body:?}");
        }
        for body in &bad_writes {
            assert_eq!(client.call(Command::MIG_DATA_WRITE, body, &[]).errno(), EINVAL, "{body:?}");
        }
        let (event, body) = (eventfd(), feature(100, GET | DEVICE_STATE, &[]));
        assert_eq!(client.call(Command::DEVICE_FEATURE, &body, &[event.as_fd()]).errno(), EINVAL);
        assert_eq!(client.state(), target);
    }
    client.write_data(&state(b"good")).ok();
    client.set_state(RUNNING).ok();
    // Probes for supported features, and the largest messages.
    for flags in
        [GET | MIGRATION, GET | SET | DEVICE_STATE, GET | DATA_SIZE, SET | LOG_START, SET | LOG_STOP, GET | LOG_REPORT]
    {
        assert_eq!(client.feature(PROBE | flags, &[1, 2]).ok()[8..], [1, 2]);
    }
    client.set_state(RESUMING).ok();
    client.write_data(&vec![0; 900_000]).ok();
    // A size from which the server does not find the next message ends the connection.
    let header = Header { id: 1, command: Command::MIG_DATA_WRITE, size: 24 + too_many, flags: 0, error: 0 };
    client.send_raw(&header.to_bytes(), &[]);
    assert_eq!(client.receive().errno(), 7);
    client.wait_hang_up();
}

/// The first message is VERSION, as for all others.
#[test]
fn nothing_is_answered_before_the_negotiation() {
    let served = Served::new();
    let mut client = served.connect();
    assert_eq!(client.feature(GET | DEVICE_STATE, &[]).errno(), EINVAL);
    assert_eq!([client.read_data(1).errno(), client.write_data(&[1]).errno()], [EINVAL; 2]);
}

/// Random sequences of valid messages: the function sees them in the order that its contract demands (the test function
/// asserts it), and every client leaves a device that runs and keeps nothing.
#[test]
fn any_order_of_messages() {
    let served = Served::new();
    let memory = memfd("guest", 64 * PAGE);
    for seed in 0..150 {
        let mut dice = Dice::new(seed, 0);
        let mut client = served.client();
        for _ in 0..dice.below(40) {
            let target = dice.pick(&[ERROR, STOP, RUNNING, STOP_COPY, RESUMING]);
            let data = match dice.below(4) {
                0 => state(&pattern(dice.below(100))),
                1 => state(&[REFUSED]),
                2 => state(&[MEMORY_MISSING]),
                _ => pattern(dice.below(100)),
            };
            served.function.paused.lock().unwrap().unsavable = dice.one_in(8);
            let page = dice.below(64) as u64 * PAGE;
            let _ = match dice.below(13) {
                0..4 => client.set_state(target),
                4 => client.read_data(dice.word() % 100),
                5 | 6 => client.write_data(&data),
                7 => client.start_log(&[(page, PAGE * (1 + dice.below(64) as u64))]),
                8 => client.stop_log(),
                9 => client.report(page, PAGE, PAGE),
                10 => client.map(0, 64 * PAGE, 0, RW, Some(&memory)),
                11 => client.call(Command::REGION_WRITE, &write_body(dice.pick(&[1, 7]), 4, &[6, 0]), &[]),
                _ => client.call(Command::DEVICE_RESET, &[], &[]),
            };
        }
        drop(client);
        // Accepted only after the first one was cleaned up.
        let mut next = served.client();
        assert_eq!((next.state(), served.budget.used()), (RUNNING, 0), "seed {seed}");
        assert!(!served.function.paused.lock().unwrap().paused, "seed {seed}");
    }
}
