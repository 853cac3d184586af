//! A server recovers the client of another one, which has not answered its last message.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use crate::common::{BLOCK, Event, PATIENCE, RAISE, Served, eventfd, memfd, take_signals, write_body};
use pvrdma_vfio_user_server::{
    Recovery,
    keeper::{client::Keeper, process},
    message::Command,
};
use rustix::net::{AddressFamily, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType};

const CONFIG: u32 = 7;
const MSIX: u32 = 2;
/// VFIO_IRQ_SET_DATA_EVENTFD and VFIO_IRQ_SET_ACTION_TRIGGER.
const TRIGGER_EVENTFD: u32 = 4 | 32;
const PAGE: u64 = 4096;

/// A keeper on a thread.
struct KeeperProcess {
    address: SocketAddrAny,
    thread: JoinHandle<io::Result<()>>,
}

impl KeeperProcess {
    fn start() -> Self {
        let listener = socket();
        rustix::net::bind(&listener, &SocketAddrUnix::new_unnamed()).unwrap();
        rustix::net::listen(&listener, 4).unwrap();
        let address = rustix::net::getsockname(&listener).unwrap();
        Self { address, thread: thread::spawn(move || process::serve(listener.as_fd(), PATIENCE)) }
    }

    /// Connects another worker.
    fn worker(&self) -> Arc<Keeper> {
        let connection = socket();
        rustix::net::connect(&connection, &self.address).unwrap();
        Keeper::resume(connection, || Err(io::Error::other("no other keeper")), PATIENCE)
    }
}

fn socket() -> OwnedFd {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

/// The first server stops forever inside a message, as a process does that is killed there: the message was received,
/// and is not answered.
#[test]
fn the_next_message_is_in_step() {
    let keeper = KeeperProcess::start();
    let (first, nothing) = Served::recover(&keeper.worker());
    assert_eq!(nothing, Recovery::Nothing);
    let mut client = first.client();
    let (memory, vectors) = (memfd("guest", 16 * PAGE), [eventfd(), eventfd()]);
    client.map(0, 4 * PAGE, 0, 3, Some(&memory)).ok();
    client.map(8 * PAGE, 4 * PAGE, 8 * PAGE, 1, Some(&memory)).ok();
    client.map(1 << 32, PAGE, 0, 3, None).ok();
    client.map(12 * PAGE, PAGE, 12 * PAGE, 3, Some(&memory)).ok();
    client.unmap(12 * PAGE, PAGE, 0).ok();
    client.set_irqs(MSIX, TRIGGER_EVENTFD, 0, 1, &[vectors[0].as_fd()]).ok();
    client.set_irqs(MSIX, TRIGGER_EVENTFD, 2, 1, &[vectors[1].as_fd()]).ok();
    client.write(CONFIG, 4, &[6, 1]);
    let unanswered = client.send(Command::REGION_WRITE, 0, &write_body(1, BLOCK, &[0; 4]), &[]);
    drop(first.function.wait_for(|events| events.iter().any(|event| matches!(event, Event::Write(1, BLOCK, _)))));

    let (second, recovery) = Served::recover(&keeper.worker());
    assert_eq!(recovery, Recovery::Recovered);
    assert_eq!(client.read(CONFIG, 4, 2), [6, 1]);
    let body = write_body(1, RAISE, &[2]);
    let next = client.send(Command::REGION_WRITE, 0, &body, &[]);
    assert_eq!((client.receive().header.id, next), (next, unanswered + 2));
    assert_eq!(vectors.each_ref().map(take_signals), [0, 1]);
    second.memory.view().write(PAGE, b"kept").unwrap();
    let mut read = [0; 4];
    rustix::io::pread(&memory, &mut read, PAGE).unwrap();
    assert_eq!(&read, b"kept");
    let view = second.memory.view();
    assert!(view.read(8 * PAGE, &mut read).is_ok() && view.write(8 * PAGE, b"kept").is_err());
    assert!(view.read(12 * PAGE, &mut read).is_err() && view.read(1 << 32, &mut read).is_err());
    drop(view);
    assert_eq!(second.stats.counters.client_connections_recovered.get(), 1);
    // It continues like any client.
    client.unmap(8 * PAGE, 4 * PAGE, 0).ok();
    client.map(8 * PAGE, 8 * PAGE, 8 * PAGE, 3, Some(&memory)).ok();
    drop(client);
    second.function.wait_reset();
    // The thread of the first server never ends.
    std::mem::forget(first);
    drop(second);
    keeper.thread.join().unwrap().unwrap();
}
