//! A server gives its connected client to another server, and the client does not notice.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{Event, PATIENCE, RAISE, Served, eventfd, memfd, take_signals, write_body};
use pvrdma_pci_function::InterruptSink;
use pvrdma_vfio_user_server::{
    AdoptError, ClientConnection, FilePart, HoldError, Server,
    message::{Command, HEADER_SIZE},
};

const EVENTFD: u32 = 4;
const TRIGGER: u32 = 32;
const INTX: u32 = 0;
const MSIX: u32 = 2;
const READ: u32 = 1;
const RW: u32 = 3;
const PAGE: u64 = 4096;

fn server(served: &Served) -> &Server {
    served.server.as_ref().unwrap()
}

/// Transfers the client of a server to a new one.
fn transfer(from: &Served) -> Served {
    let held = server(from).hold(PATIENCE).unwrap();
    let (to, adopted) = Served::adopt(held.connection().unwrap().unwrap());
    let adopted = adopted.unwrap();
    held.give_away();
    adopted.serve();
    to
}

/// Returns the writes to registers among the recorded events.
fn writes(served: &Served) -> Vec<Vec<u8>> {
    let events = served.function.wait(|_| true);
    let data = |event| if let Event::Write(_, _, data) = event { Some(data) } else { None };
    events.into_iter().filter_map(data).collect()
}

#[test]
fn the_next_server_has_memory_interrupts_and_the_message_that_waited() {
    let first = Served::with_intx(true);
    let mut client = first.client();
    let memory = memfd("guest", 16 * PAGE);
    client.map(0, 4 * PAGE, 0, RW, Some(&memory)).ok();
    client.map(8 * PAGE, 8 * PAGE, 8 * PAGE, READ, Some(&memory)).ok();
    client.map(1 << 32, PAGE, 0, RW, None).ok();
    let (vectors, line) = ([eventfd(), eventfd()], eventfd());
    client.set_irqs(MSIX, EVENTFD | TRIGGER, 0, 1, &[vectors[0].as_fd()]).ok();
    client.set_irqs(MSIX, EVENTFD | TRIGGER, 2, 1, &[vectors[1].as_fd()]).ok();
    client.set_irqs(INTX, EVENTFD | TRIGGER, 0, 1, &[line.as_fd()]).ok();
    first.irqs.intx(true);
    assert_eq!(take_signals(&line), 1);
    writes(&first);

    let held = server(&first).hold(PATIENCE).unwrap();
    let waiting = client.send(Command::REGION_WRITE, 0, &write_body(1, RAISE, &[2]), &[]);
    let connection = held.connection().unwrap().unwrap();
    assert_eq!((connection.ranges.len(), connection.files.len()), (3, 1));
    let (second, adopted) = Served::adopt(connection);
    let adopted = adopted.unwrap();
    second.memory.view().write(PAGE, b"kept").unwrap();
    held.give_away();
    adopted.serve();

    assert_eq!(client.receive().header.id, waiting);
    assert_eq!(vectors.each_ref().map(take_signals), [0, 1]);
    // The line was signalled before and not unmasked since, so it is masked.
    second.irqs.intx(true);
    assert_eq!(take_signals(&line), 0);
    let mut read = [0; 4];
    second.memory.view().read(PAGE, &mut read).unwrap();
    assert_eq!(&read, b"kept");
    assert!(second.memory.view().read(8 * PAGE, &mut read).is_ok());
    assert!(second.memory.view().write(8 * PAGE, &read).is_err());
    assert!(second.memory.view().read(1 << 32, &mut read).is_err());
    // Both negotiate no second time, and both know the same ranges.
    client.unmap(1 << 32, PAGE, 0).ok();
    client.unmap(0, 4 * PAGE, 0).ok();
    assert_eq!((writes(&first), writes(&second)), (vec![], vec![vec![2]]));

    drop(client);
    second.function.wait_reset();
    assert_eq!(first.function.wait(|_| true), []);
}

#[test]
fn a_client_that_is_not_given_away_is_served_on() {
    let first = Served::new();
    assert!(server(&first).hold(PATIENCE).unwrap().connection().unwrap().is_none());
    let mut client = first.client();
    {
        let held = server(&first).hold(PATIENCE).unwrap();
        let (_second, adopted) = Served::adopt(held.connection().unwrap().unwrap());
        let id = client.send(Command::REGION_WRITE, 0, &write_body(1, 0, &[7]), &[]);
        drop((adopted.unwrap(), held));
        assert_eq!(client.receive().header.id, id);
    }
    client.write(1, 0, &[8]);
    assert_eq!(writes(&first), [[7], [8]]);
    drop(client);
    first.function.wait_reset();
    first.client().write(1, 0, &[9]);
}

/// The rest of a message may never arrive, so a hold does not wait for it.
#[test]
fn half_a_message_cannot_be_held() {
    let served = Served::new();
    let client = served.client();
    let body = write_body(1, 0, &[1]);
    let mut bytes = vec![0; HEADER_SIZE];
    bytes[2..4].copy_from_slice(&Command::REGION_WRITE.0.to_le_bytes());
    bytes[4..8].copy_from_slice(&u32::try_from(HEADER_SIZE + body.len()).unwrap().to_le_bytes());
    bytes.extend(&body);
    client.send_raw(&bytes[..7], &[]);
    let start = Instant::now();
    // The server has not seen the bytes yet as long as a hold succeeds.
    while server(&served).hold(Duration::ZERO).is_ok() {
        assert!(start.elapsed() < PATIENCE);
        thread::yield_now();
    }
    assert_eq!(server(&served).hold(Duration::from_millis(1)).unwrap_err(), HoldError::Busy);
    client.send_raw(&bytes[7..], &[]);
    served.function.wait(|events| !events.is_empty());
    drop(server(&served).hold(PATIENCE).unwrap());
}

/// A process that serves guests may have been taken over by one, so its descriptions are checked as a client's messages
/// are.
#[test]
fn descriptions_are_checked() {
    type Damage = fn(&mut ClientConnection);
    let first = Served::new();
    let mut client = first.client();
    let memory = memfd("guest", 4 * PAGE);
    client.map(0, PAGE, 0, RW, Some(&memory)).ok();
    client.map(PAGE, PAGE, PAGE, RW, Some(&memory)).ok();
    let vector = eventfd();
    client.set_irqs(MSIX, EVENTFD | TRIGGER, 0, 1, &[vector.as_fd()]).ok();
    let memory_is_refused: [Damage; 6] = [
        |connection| connection.ranges[1].address = 0,
        |connection| connection.ranges[1].address = 1,
        |connection| connection.ranges[1].size = u64::MAX - 4095,
        |connection| connection.ranges[1].memory = Some(FilePart { file: 1, offset: 0 }),
        |connection| connection.ranges[1].memory = Some(FilePart { file: 0, offset: 4 * PAGE }),
        |connection| connection.files[0] = eventfd(),
    ];
    let interrupts_are_refused: [Damage; 3] = [
        |connection| connection.interrupts.vectors[0] = Some(OwnedFd::from(memfd("no event", PAGE))),
        |connection| connection.interrupts.line = Some(OwnedFd::from(memfd("no event", PAGE))),
        |connection| connection.interrupts.vectors.resize_with(4, || None),
    ];
    for damage in memory_is_refused.into_iter().chain(interrupts_are_refused) {
        let held = server(&first).hold(PATIENCE).unwrap();
        let mut connection = held.connection().unwrap().unwrap();
        damage(&mut connection);
        let (second, adopted) = Served::adopt(connection);
        let error = adopted.unwrap_err();
        let of_memory = matches!(error, AdoptError::Memory { address, .. } if address <= PAGE);
        assert!(of_memory || matches!(error, AdoptError::Interrupts(_)), "{error}");
        assert_eq!(second.memory.mapped_bytes(), 0);
        drop(held);
        client.write(1, 0, &[1]);
    }
    assert_eq!(writes(&first).len(), 9);
    drop(transfer(&first));
    client.wait_hang_up();
}

/// The threads of former servers still wait at the socket, and wake at each message.
#[test]
fn no_message_is_lost_or_executed_twice() {
    const TRANSFERS: usize = 50;
    let mut lives = vec![Served::with_intx(true)];
    let mut client = lives[0].client();
    let (more, ended) = channel::<()>();
    let writer = thread::spawn(move || {
        let mut count = 0_u32;
        while ended.try_recv() != Err(TryRecvError::Disconnected) {
            client.write(1, 0, &count.to_le_bytes());
            count += 1;
        }
        count
    });
    let mut executed = Vec::new();
    for _ in 0..TRANSFERS {
        let life = lives.last().unwrap();
        // Each server executes messages before it gives the client away.
        drop(life.function.wait_for(|events| !events.is_empty()));
        let next = transfer(life);
        executed.extend(writes(life));
        lives.push(next);
    }
    drop(more);
    let count = writer.join().unwrap();
    executed.extend(writes(&lives[TRANSFERS]));
    assert_eq!(executed, (0..count).map(|number| number.to_le_bytes().to_vec()).collect::<Vec<_>>());
    // The former servers executed nothing afterwards.
    assert!(lives[..TRANSFERS].iter().all(|life| writes(life).is_empty()));
}
