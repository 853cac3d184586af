use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socketpair};

use super::*;
use crate::keeper::process;
use crate::keeper::wire::REQUEST;

fn pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

/// Makes a socket for a keeper process. Returns a function that connects to it as well.
fn listening() -> (OwnedFd, impl Fn() -> OwnedFd) {
    let socket =
        || rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let listener = socket();
    rustix::net::bind(&listener, &SocketAddrUnix::new_unnamed()).unwrap();
    rustix::net::listen(&listener, 8).unwrap();
    let address = rustix::net::getsockname(&listener).unwrap();
    let connect = move || {
        let connection = socket();
        rustix::net::connect(&connection, &address).unwrap();
        connection
    };
    (listener, connect)
}

/// Creates a keeper whose first process runs `first` with its end of the socket; later ones behave correctly.
fn keeper(first: impl Fn(OwnedFd) + Send + Sync + Clone + 'static, patience: Duration) -> Arc<Keeper> {
    let started = AtomicUsize::new(0);
    let renew = move || {
        let (ours, theirs) = pair();
        let (first, is_first) = (first.clone(), started.fetch_add(1, Ordering::Relaxed) == 0);
        thread::spawn(move || if is_first { first(theirs) } else { serve(theirs) });
        Ok(ours)
    };
    Keeper::new(renew, patience)
}

fn serve(socket: OwnedFd) {
    let _ = process::serve_one(socket);
}

/// Writes to a socket; the other end may be closed.
fn write(socket: &OwnedFd, bytes: &[u8]) {
    let _ = rustix::io::write(socket, bytes);
}

fn memfd() -> OwnedFd {
    rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap()
}

fn send(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    rustix::net::sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
}

const LONG: Duration = Duration::from_secs(20);
/// Timeout for a keeper that never answers. The next keeper has to answer in this time on a busy host.
const SHORT: Duration = Duration::from_secs(2);
const MEMORY: Wanted = Wanted::Memory { sealed: false };

#[test]
fn descriptors_are_taken_by_kind() {
    let keeper = keeper(serve, LONG);
    let (client, server) = UnixStream::pair().unwrap();
    let seat = keeper.device();
    seat.admit(server.as_fd()).unwrap();
    let (memory, event) = (memfd(), rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap());
    let (mut pipe, writer) = io::pipe().unwrap();
    let take = |wanted, fds: &[BorrowedFd<'_>]| {
        send(&client, b"message", fds);
        let mut buffer = [0; 7];
        let taken = seat.take(wanted, &mut buffer).unwrap();
        assert_eq!((taken.bytes, &buffer), (7, b"message"));
        (taken.fds.len(), taken.lost, taken.refused)
    };
    let (memory, event, other) = (memory.as_fd(), event.as_fd(), writer.as_fd());
    assert_eq!(take(MEMORY, &[memory]), (1, false, None));
    assert_eq!(take(Wanted::Interrupts, &[event; 16]), (16, false, None));
    assert_eq!(take(Wanted::Nothing, &[event]), (0, true, None));
    assert_eq!(take(Wanted::Interrupts, &[event; 17]), (0, true, None));
    assert_eq!(take(MEMORY, &[memory, memory]), (0, true, None));
    assert_eq!(take(MEMORY, &[memory; 40]), (0, true, None));
    assert_eq!(take(MEMORY, &[other]), (0, false, Some(crate::examine::DescriptorError::MayBlock)));
    let no_eventfd = Some(crate::examine::DescriptorError::NotEventfd);
    assert_eq!(take(Wanted::Interrupts, &[event, other]), (0, false, no_eventfd));
    let unsealed = Some(crate::examine::DescriptorError::NotSealed);
    assert_eq!(take(Wanted::Memory { sealed: true }, &[memory]), (0, false, unsealed));
    // Refused descriptors are closed before the answer.
    drop(writer);
    assert_eq!(pipe.read(&mut [0]).unwrap(), 0);
    // A release closes the socket if the keeper has the last descriptor.
    drop(server);
    seat.release();
    assert_eq!((&client).read(&mut [0]).unwrap(), 0);
    assert!((&client).write(&[0]).is_err());
}

/// Answers the first request for bytes by `lie`.
fn liar(lie: fn(&OwnedFd, u32)) -> impl Fn(OwnedFd) + Send + Sync + Clone {
    move |socket| {
        let mut bytes = [0; REQUEST];
        while rustix::io::read(&socket, &mut bytes).is_ok_and(|count| count == REQUEST) {
            let request = Request::parse(&bytes).unwrap();
            match request.operation {
                Operation::Take(_) => lie(&socket, request.id),
                _ => write(&socket, &answer(request.id, 0, 0).to_bytes()),
            }
        }
    }
}

const fn answer(id: u32, bytes: u32, fds: u8) -> Answer {
    Answer { id, bytes, fds, lost: false, refused: None }
}

fn say(socket: &OwnedFd, answer: Answer, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
    let head = answer.to_bytes();
    let packet = [IoSlice::new(&head), IoSlice::new(bytes)];
    rustix::net::sendmsg(socket, &packet, &mut control, SendFlags::NOSIGNAL).unwrap();
}

/// A misbehaving keeper costs only the client that needed it. The device's other client, and the next client in the
/// same seat, get another keeper.
#[test]
fn keepers_that_are_not_to_be_trusted_are_replaced() {
    let lies: [fn(&OwnedFd, u32); 11] = [
        |socket, _| write(socket, &[0xff; ANSWER]),
        |socket, _| write(socket, &[0; 3]),
        |socket, id| say(socket, answer(id.wrapping_sub(1), 4, 0), b"abcd", &[]),
        |socket, id| say(socket, answer(id, 4, 0), b"abc", &[]),
        |socket, id| say(socket, answer(id, 3, 0), b"abcd", &[]),
        // More bytes than requested; unannounced descriptors; announced descriptors that are absent; or too many
        // descriptors.
        |socket, id| say(socket, answer(id, 5, 0), b"abcde", &[]),
        |socket, id| say(socket, answer(id, 4, 0), b"abcd", &[socket.as_fd()]),
        |socket, id| say(socket, answer(id, 4, 1), b"abcd", &[]),
        |socket, id| say(socket, answer(id, 4, 2), b"abcd", &[socket.as_fd(); 2]),
        |socket, id| say(socket, answer(id, 4, 40), b"abcd", &[socket.as_fd(); 40]),
        |socket, _| rustix::net::shutdown(socket, rustix::net::Shutdown::Both).unwrap(),
    ];
    for (number, lie) in lies.into_iter().enumerate() {
        let keeper = keeper(liar(lie), LONG);
        let (seat, other) = (keeper.device(), keeper.network_function());
        let ((_client, server), (neighbour, its)) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        seat.admit(server.as_fd()).unwrap();
        other.admit(its.as_fd()).unwrap();
        let error = seat.take(MEMORY, &mut [0; 4]).unwrap_err();
        assert!(matches!(error, KeeperError::Nonsense | KeeperError::Gone), "{number}: {error}");
        serves(&other, &neighbour);
        let (client, server) = UnixStream::pair().unwrap();
        seat.admit(server.as_fd()).unwrap();
        serves(&seat, &client);
    }
}

#[track_caller]
fn serves(seat: &Seat, client: &UnixStream) {
    send(client, b"1234", &[memfd().as_fd()]);
    assert_eq!(seat.take(MEMORY, &mut [0; 4]).unwrap().fds.len(), 1);
}

#[test]
fn a_silent_keeper_is_replaced() {
    let keeper = keeper(liar(|_, _| ()), SHORT);
    let (seat, (_client, server)) = (keeper.device(), UnixStream::pair().unwrap());
    seat.admit(server.as_fd()).unwrap();
    assert!(matches!(seat.take(MEMORY, &mut [0; 4]), Err(KeeperError::Silent)));
    let (client, server) = UnixStream::pair().unwrap();
    seat.admit(server.as_fd()).unwrap();
    serves(&seat, &client);
}

/// The previous client may have left its keeper in either state.
#[test]
fn a_client_does_not_pay_for_the_one_before() {
    // The keeper ends at once; or it never answers, and its end of the socket stays open.
    let firsts: [fn(OwnedFd); 2] = [drop, std::mem::forget];
    for first in firsts {
        let keeper = keeper(first, SHORT);
        let (client, server) = UnixStream::pair().unwrap();
        // A keeper that was started before the client connected.
        keeper.current.lock().line = Some(Line::new((keeper.renew)().unwrap()));
        let seat = keeper.device();
        seat.admit(server.as_fd()).unwrap();
        serves(&seat, &client);
    }
}

#[test]
fn without_a_keeper_no_client_is_admitted() {
    let keeper = Keeper::new(|| Err(io::Error::other("none is left")), LONG);
    let (_client, server) = UnixStream::pair().unwrap();
    let error = keeper.device().admit(server.as_fd()).unwrap_err();
    assert!(error.to_string().contains("none is left"), "{error}");
    keeper.device().release();
}

fn note(bytes: &[u8], fds: usize) -> Note<Shared> {
    let fd = || Arc::new(rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap()) as Shared;
    Note { bytes: bytes.to_vec(), fds: (0..fds).map(|_| fd()).collect() }
}

const fn key(number: u64) -> Key {
    Key { kind: 9, number }
}

/// Returns the notes at a seat: their keys, contents, and numbers of descriptors.
fn recalled(seat: &Seat) -> Option<Vec<(Key, Vec<u8>, usize)>> {
    let Recalled { notes, .. } = seat.recall().unwrap()?;
    Some(notes.into_iter().map(|(key, Note { bytes, fds })| (key, bytes, fds.len())).collect())
}

#[test]
fn the_next_worker_recalls_clients_with_their_notes() {
    let (listener, connect) = listening();
    let lost = || Err(io::Error::other("no other keeper"));
    let first = Keeper::resume(connect(), lost, LONG);
    let process = thread::spawn(move || process::serve(listener.as_fd(), LONG));
    let (mut client, server) = UnixStream::pair().unwrap();
    let seat = first.device();
    assert!(seat.recall().unwrap().is_none());
    seat.admit(server.as_fd()).unwrap();
    assert_eq!(seat.put(key(1), note(b"one", 16)), None);
    assert_eq!(seat.put(key(2), note(b"two", 0)), None);
    assert_eq!(seat.put(key(u64::MAX), note(b"last", 1)), None);
    assert_eq!(seat.put(key(1), note(b"three", 2)), None);
    assert_eq!(seat.forget(key(2), key(7)), None);
    drop((first, seat, server));

    let second = Keeper::resume(connect(), lost, LONG);
    let seat = second.device();
    let notes = vec![(key(1), b"three".to_vec(), 2), (key(u64::MAX), b"last".to_vec(), 1)];
    assert_eq!(recalled(&seat), Some(notes.clone()));
    assert!(second.network_function().recall().unwrap().is_none());
    // The client has the same connection, and its messages are received from it.
    let Recalled { stream, .. } = seat.recall().unwrap().unwrap();
    assert_eq!(rustix::io::write(&stream, b"x"), Ok(1));
    assert_eq!(client.read(&mut [0; 8]).unwrap(), 1);
    seat.admit(stream.as_fd()).unwrap();
    assert_eq!(recalled(&seat), Some(Vec::new()));
    serves(&seat, &client);
    // The keeper does not know if the worker has the whole message.
    assert_eq!(recalled(&seat), Some(vec![(Key::PARTIAL, Vec::new(), 0)]));
    assert_eq!(seat.forget(Key::PARTIAL, Key::PARTIAL), None);
    assert_eq!(recalled(&seat), Some(Vec::new()));
    drop((second, seat, stream));
    // Without a worker, the keeper ends with its last client.
    drop(client);
    process.join().unwrap().unwrap();
}

/// The next keeper gets the notes that the worker has written to the last one.
#[test]
fn notes_survive_their_keeper() {
    let admits = |socket: OwnedFd| {
        let mut bytes = [0; REQUEST];
        rustix::io::read(&socket, &mut bytes).unwrap();
        write(&socket, &answer(Request::parse(&bytes).unwrap().id, 0, 0).to_bytes());
    };
    let keeper = keeper(admits, LONG);
    let (_client, server) = UnixStream::pair().unwrap();
    let seat = keeper.device();
    seat.admit(server.as_fd()).unwrap();
    assert_eq!(seat.put(key(1), note(b"one", 1)), None);
    assert_eq!(recalled(&seat), Some(vec![(key(1), b"one".to_vec(), 1)]));
    // A file that nothing else refers to is forgotten.
    let file = note(b"file", 1);
    assert_eq!(seat.put(key(2), file.clone()), None);
    assert_eq!(seat.forget_unused(9), None);
    assert_eq!(recalled(&seat), Some(vec![(key(2), b"file".to_vec(), 1)]));
    drop(file);
}

/// Too much to keep: the client is served, but would not be recovered.
#[test]
fn a_client_with_too_many_descriptors_is_not_kept() {
    let keeper = keeper(serve, LONG);
    let (client, server) = UnixStream::pair().unwrap();
    let seat = keeper.device();
    seat.admit(server.as_fd()).unwrap();
    let problem = (0..100).find_map(|number| seat.put(key(number), note(b"", 16)));
    assert!(problem.unwrap().contains("too much"));
    assert_eq!((seat.put(key(200), note(b"", 0)), recalled(&seat)), (None, Some(Vec::new())));
    serves(&seat, &client);
}

/// A keeper whose list of notes has no end, as a client that has taken the keeper over may arrange.
#[test]
fn notes_that_never_end_are_refused() {
    let circles = |socket: OwnedFd| {
        let mut bytes = [0; 64];
        while let Ok(count @ REQUEST..) = rustix::io::read(&socket, &mut bytes) {
            let id = Request::parse(&bytes[..REQUEST]).unwrap().id;
            match count {
                REQUEST => say(&socket, answer(id, 0, 1), &[], &[socket.as_fd()]),
                _ => say(&socket, answer(id, 9, 0), &key(5).to_bytes(), &[]),
            }
        }
    };
    let keeper = keeper(circles, LONG);
    keeper.current.lock().line = Some(Line::new((keeper.renew)().unwrap()));
    assert!(matches!(keeper.device().recall(), Err(KeeperError::Nonsense)));
}

/// Another user's process that claims to be the next worker, or the next daemon.
#[test]
fn a_keeper_serves_no_other_user() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let (listener, connect) = listening();
    let lost = || Err(io::Error::other("no other keeper"));
    let worker = Keeper::resume(connect(), lost, LONG);
    let process = thread::spawn(move || process::serve(listener.as_fd(), LONG));
    let (client, server) = UnixStream::pair().unwrap();
    let seat = worker.device();
    seat.admit(server.as_fd()).unwrap();
    let stranger = thread::scope(|scope| {
        let stranger = || {
            rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(65_534)).unwrap();
            look::has_clients(connect(), LONG).unwrap_err().to_string()
        };
        scope.spawn(stranger).join().unwrap()
    });
    assert!(stranger.contains("ended"), "{stranger}");
    serves(&seat, &client);
    drop((worker, seat, server));
    assert_eq!(look::has_clients(connect(), LONG).unwrap(), [true, false]);
    drop(client);
    process.join().unwrap().unwrap();
}

/// A keeper whose daemon does not come back disconnects its clients.
#[test]
fn a_keeper_without_a_worker_ends() {
    let (listener, connect) = listening();
    let worker = Keeper::resume(connect(), || Err(io::Error::other("no other keeper")), LONG);
    let process = thread::spawn(move || process::serve(listener.as_fd(), Duration::from_millis(20)));
    let (mut client, server) = UnixStream::pair().unwrap();
    worker.device().admit(server.as_fd()).unwrap();
    drop((worker, server));
    assert_eq!(client.read(&mut [0; 8]).unwrap(), 0);
    process.join().unwrap().unwrap();
}
