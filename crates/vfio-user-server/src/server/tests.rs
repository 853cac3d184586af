//! A client that moves its function, and reports about one that another server takes over.

use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};

use pvrdma_guest_memory::{DmaSpace, MemoryBudget, PinPolicy};
use pvrdma_pci_function::{Bar, Deferred, Migratable, MsixPlace, PciFunction, StateError};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use vfio_bindings::bindings::vfio::{VFIO_DEVICE_FEATURE_MIG_DEVICE_STATE, VFIO_DEVICE_FEATURE_SET};

use super::*;
use crate::keeper::client::Keeper;
use crate::keeper::notes::Key;
use crate::keeper::process::serve_one;
use crate::message::{Command, HEADER_SIZE, Header};
use crate::migratable_device::MigratableDevice;
use crate::migration::MigrationState;
use crate::stats::ConnectionStats;

const PATIENCE: Duration = Duration::from_secs(20);

/// A function without registers.
#[derive(Default)]
struct Function {
    /// A state was read, which changes the outline.
    restored: AtomicBool,
}

impl PciFunction for Function {
    fn bars(&self) -> [Option<Bar>; 6] {
        [None; 6]
    }

    fn config_size(&self) -> usize {
        256
    }

    fn config_read(&self, _: usize, _: &mut [u8]) {}

    fn config_write(&self, _: usize, _: &[u8]) {}

    fn bar_read(&self, _: usize, _: u64, _: &mut [u8]) {}

    fn bar_write(&self, _: usize, _: u64, _: &[u8]) -> Deferred {
        Deferred::Nothing
    }

    fn run_deferred(&self) {}

    fn msix(&self) -> Option<MsixPlace> {
        None
    }

    fn outline(&self) -> Option<Outline> {
        let shared_region = self.restored.load(Ordering::Relaxed).into();
        Some(Outline { config: [0; 256], interrupt_mask: 0, shared_region })
    }

    fn reset(&self) {}
}

impl Migratable for Function {
    fn pause(&self) {}

    fn save(&self, _: &mut dyn Write) -> Result<(), StateError> {
        Ok(())
    }

    fn restore(&self, _: &mut dyn Read) -> Result<(), StateError> {
        self.restored.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn resume(&self) -> Result<(), StateError> {
        Ok(())
    }
}

/// Creates an endpoint, and a receiver of its reports that ends with the last thread that serves it.
fn endpoint() -> (Endpoint, Receiver<bool>) {
    let (reports, received) = channel();
    let report = move |connected| reports.send(connected).unwrap();
    let (function, memory) = (Arc::<Function>::default(), DmaSpace::new(PinPolicy::Off));
    let endpoint = Endpoint::new("device", function, memory, Arc::default())
        .with_stats(Arc::new(ConnectionStats::with_observer(report)));
    (endpoint, received)
}

/// Sends a message.
fn send(client: &mut UnixStream, command: Command, body: &[u8]) {
    let size = u32::try_from(HEADER_SIZE + body.len()).unwrap();
    let header = Header { id: 1, command, size, flags: 0, error: 0 };
    client.write_all(&[&header.to_bytes()[..], body].concat()).unwrap();
}

/// Receives a reply.
fn receive(client: &mut UnixStream) -> Header {
    let mut header = [0; HEADER_SIZE];
    client.read_exact(&mut header).unwrap();
    let header = Header::parse(&header);
    client.read_exact(&mut vec![0; header.size as usize - HEADER_SIZE]).unwrap();
    header
}

/// Makes a request that must succeed.
fn call(client: &mut UnixStream, command: Command, body: &[u8]) {
    send(client, command, body);
    let header = receive(client);
    assert_eq!(header.flags & Header::ERROR, 0, "{command:?}: error {}", header.error);
}

/// Makes the server change the state of its function.
fn set_state(client: &mut UnixStream, state: MigrationState) {
    let flags = VFIO_DEVICE_FEATURE_SET | VFIO_DEVICE_FEATURE_MIG_DEVICE_STATE;
    let words = [16, flags, state.number(), 0];
    call(client, Command::DEVICE_FEATURE, &words.map(u32::to_le_bytes).concat());
}

/// A process that recovers the function after a crash needs the outline that it has got by its restore.
#[test]
fn a_restore_changes_the_note_about_the_function() {
    let keeper = Keeper::new(
        || {
            let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
            thread::spawn(move || drop(serve_one(theirs)));
            Ok(ours)
        },
        PATIENCE,
    );
    let (seat, function) = (keeper.device(), Arc::<Function>::default());
    let (mut endpoint, _reports) = endpoint();
    let migration = MigratableDevice::new(Arc::<Function>::clone(&function), MemoryBudget::new(1 << 20));
    (endpoint.keeper, endpoint.migration) = (Some(seat.clone()), Some(migration));
    endpoint.function = Arc::<Function>::clone(&function);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("device");
    let _server = Server::listen(&path, endpoint).unwrap();
    let mut client = UnixStream::connect(&path).unwrap();
    let noted = || {
        let note = seat.noted(Key { kind: 3, number: 0 }).unwrap();
        Outline::from_bytes(&note).unwrap().shared_region
    };
    call(&mut client, Command::VERSION, &[0; 4]);
    assert_eq!(noted(), 0);
    set_state(&mut client, MigrationState::Resuming);
    set_state(&mut client, MigrationState::Running);
    assert_eq!(noted(), 1);
}

/// Returns the reports of two servers about a client that the first one offers to the second one.
fn reports(give_away: bool) -> [Vec<bool>; 2] {
    let folder = tempfile::tempdir().unwrap();
    let [path, other] = ["first", "second"].map(|name| folder.path().join(name));
    let ([endpoint, next], [reports, next_reports]) = {
        let [(first, a), (second, b)] = [(); 2].map(|()| endpoint());
        ([first, second], [a, b])
    };
    let server = Server::listen(&path, endpoint).unwrap();
    let mut client = UnixStream::connect(&path).unwrap();
    let mut first = vec![reports.recv_timeout(PATIENCE).unwrap()];
    let held = server.hold(PATIENCE).unwrap();
    send(&mut client, Command::DEVICE_RESET, &[]);
    let connection = held.connection().unwrap().unwrap();
    let listener = UnixListener::bind(other).unwrap();
    let (second, adopted) = Server::adopt(listener, next, connection).unwrap();
    if give_away {
        held.give_away();
        adopted.serve();
    } else {
        drop((adopted, held));
    }
    receive(&mut client);
    drop(client);
    // The end of the client is seen before the servers end.
    let server_of_client = if give_away { &next_reports } else { &reports };
    let mut last: Vec<_> = Vec::new();
    while last.last() != Some(&false) {
        last.push(server_of_client.recv_timeout(PATIENCE).unwrap());
    }
    drop((server, second));
    let mut next = if give_away {
        last
    } else {
        first.extend(last);
        Vec::new()
    };
    first.extend(reports);
    next.extend(next_reports);
    [first, next]
}

#[test]
fn a_client_is_reported_as_gone_by_its_last_server_alone() {
    assert_eq!(reports(true), [vec![true], vec![true, false]]);
    assert_eq!(reports(false), [vec![true, false], vec![]]);
}
