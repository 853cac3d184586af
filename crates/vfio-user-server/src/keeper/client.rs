//! Worker's end: sends requests to a keeper, and replaces a keeper that does not answer.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use thiserror::Error;

use super::receive::{Taken, Wanted};
use super::wire::{ANSWER, Answer, CHUNK, Operation, Request, SEATS};
use crate::message::MAX_MSG_FDS;

/// Timeout for an answer of a keeper, which normally takes microseconds. A shorter one would end connections on a host
/// that is short of CPU time; with a longer one a client's own timeout (5 s for QEMU) expires first.
pub const PATIENCE: Duration = Duration::from_secs(4);

/// Timeout once the client is gone: the next client waits for the end of its connection.
const FAREWELL: Duration = Duration::from_millis(500);

/// Reason why a client is no longer served.
#[derive(Debug, Error)]
pub(crate) enum KeeperError {
    /// The supervisor cannot start a keeper.
    #[error("no process for its descriptors: {0}")]
    None(io::Error),
    /// The keeper does not answer.
    #[error("the process that receives its descriptors does not answer: to close one of them may take forever")]
    Silent,
    /// The keeper ended while it processed a message of the client.
    #[error("the process that receives its descriptors ended")]
    Gone,
    /// The keeper violates the protocol.
    #[error("the process that receives its descriptors is not to be trusted")]
    Nonsense,
    /// A system call failed on the worker's side.
    #[error("the process that receives its descriptors cannot be asked: {0}")]
    System(#[from] Errno),
}

/// Starts a keeper in place of the previous one, which is killed.
type Renew = Box<dyn Fn() -> io::Result<OwnedFd> + Send + Sync>;

/// Keeper of a device, replaced when it fails.
pub struct Keeper {
    renew: Renew,
    patience: Duration,
    current: Mutex<Current>,
}

#[derive(Default)]
struct Current {
    /// Socket to the current keeper; `None` before the first client and after a keeper was abandoned.
    socket: Option<OwnedFd>,
    /// Sockets of the connected clients, kept to pass them to the next keeper.
    seats: [Option<OwnedFd>; SEATS],
    id: u32,
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeper").finish_non_exhaustive()
    }
}

impl Keeper {
    /// Creates a handle whose keeper starts with the first client. `renew` starts it, and each later one.
    pub fn new(renew: impl Fn() -> io::Result<OwnedFd> + Send + Sync + 'static, patience: Duration) -> Arc<Self> {
        Arc::new(Self { renew: Box::new(renew), patience, current: Mutex::default() })
    }

    /// Returns the seat for clients of the device's own socket.
    #[must_use]
    pub fn device(self: &Arc<Self>) -> Seat {
        Seat { keeper: Arc::clone(self), number: 0 }
    }

    /// Returns the seat for clients of its network function.
    #[must_use]
    pub fn network_function(self: &Arc<Self>) -> Seat {
        Seat { keeper: Arc::clone(self), number: 1 }
    }

    /// Starts a keeper and passes it the connected clients.
    fn start(&self, current: &mut Current) -> Result<(), KeeperError> {
        current.socket = None;
        current.socket = Some((self.renew)().map_err(KeeperError::None)?);
        for seat in 0..SEATS {
            if current.seats.get(seat).is_some_and(Option::is_some) {
                self.admit(current, seat).inspect_err(|_| current.socket = None)?;
            }
        }
        Ok(())
    }

    fn admit(&self, current: &mut Current, seat: usize) -> Result<(), KeeperError> {
        self.exchange(current, seat, Operation::Admit, &mut [])?;
        Ok(())
    }

    /// Replaces a keeper that failed its client, so that the other clients are served. The failed client is dropped and
    /// does not learn whether that works.
    fn replace(&self, current: &mut Current, seat: usize) {
        if let Some(seat) = current.seats.get_mut(seat) {
            *seat = None;
        }
        let _ = self.start(current);
    }

    /// Sends a request and waits for the answer.
    fn exchange(
        &self,
        current: &mut Current,
        seat: usize,
        operation: Operation,
        buffer: &mut [u8],
    ) -> Result<Taken, KeeperError> {
        let Current { socket: Some(socket), seats, id } = current else { return Err(KeeperError::Gone) };
        *id = id.wrapping_add(1);
        let chunk = buffer.len().min(CHUNK);
        let number = u8::try_from(seat).map_err(|_| Errno::INVAL)?;
        let request = Request { operation, seat: number, bytes: u32::try_from(chunk).unwrap_or(0), id: *id };
        let client = seats.get(seat).and_then(Option::as_ref);
        let sent = client.filter(|_| operation == Operation::Admit);
        send(socket, &request, sent.map(AsFd::as_fd))?;
        await_answer(socket, client, self.patience)?;
        let most = if let Operation::Take(wanted) = operation { wanted.most() } else { 0 };
        receive(socket, *id, most, buffer.get_mut(..chunk).unwrap_or_default())
    }
}

/// Slot for one client at a time at its keeper.
#[derive(Clone, Debug)]
pub struct Seat {
    keeper: Arc<Keeper>,
    number: usize,
}

impl Seat {
    /// Passes a client's socket to the keeper, which receives the client's descriptors from now on.
    ///
    /// # Errors
    /// No keeper can be started.
    pub(crate) fn admit(&self, stream: BorrowedFd<'_>) -> Result<(), KeeperError> {
        let keeper = &self.keeper;
        let stream = stream.try_clone_to_owned().map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        let mut current = keeper.current.lock();
        let Some(seat) = current.seats.get_mut(self.number) else { return Err(KeeperError::Nonsense) };
        *seat = Some(stream);
        if current.socket.is_some() && keeper.admit(&mut current, self.number).is_ok() {
            return Ok(());
        }
        // The previous client may have left the keeper stuck, so this client gets a new one.
        keeper.start(&mut current)
    }

    /// Makes the keeper close the socket of a disconnected client, of which it holds the last descriptor.
    pub(crate) fn release(&self) {
        let keeper = &self.keeper;
        let mut current = keeper.current.lock();
        let Some(seat) = current.seats.get_mut(self.number) else { return };
        if seat.take().is_none() || current.socket.is_none() {
            return;
        }
        match keeper.exchange(&mut current, self.number, Operation::Release, &mut []) {
            Ok(_) => {}
            // The next keeper starts when a client needs one.
            Err(KeeperError::Gone) => current.socket = None,
            Err(_) => keeper.replace(&mut current, self.number),
        }
    }

    /// Receives bytes of the client that carry descriptors, and no bytes beyond `buffer`.
    ///
    /// # Errors
    /// The keeper does not answer correctly. The bytes it has received are lost, so the connection must end.
    pub(crate) fn take(&self, wanted: Wanted, buffer: &mut [u8]) -> Result<Taken, KeeperError> {
        let keeper = &self.keeper;
        let mut current = keeper.current.lock();
        if current.socket.is_none() {
            keeper.start(&mut current)?;
        }
        let taken = match keeper.exchange(&mut current, self.number, Operation::Take(wanted), buffer) {
            // The keeper had ended before the request, and has received nothing.
            Err(KeeperError::System(Errno::PIPE | Errno::CONNRESET)) => {
                keeper.start(&mut current)?;
                keeper.exchange(&mut current, self.number, Operation::Take(wanted), buffer)
            }
            taken => taken,
        };
        taken.inspect_err(|_| keeper.replace(&mut current, self.number))
    }
}

/// Sends a request without blocking: the socket has room for one.
fn send(socket: &OwnedFd, request: &Request, client: Option<BorrowedFd<'_>>) -> Result<(), KeeperError> {
    let (bytes, flags) = (request.to_bytes(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    let Some(client) = client else {
        rustix::io::retry_on_intr(|| rustix::net::send(socket, &bytes, flags))?;
        return Ok(());
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [client];
    if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(Errno::INVAL.into());
    }
    rustix::io::retry_on_intr(|| rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags))?;
    Ok(())
}

/// Waits for an answer, with the shorter timeout once the client of the request has disconnected.
fn await_answer(socket: &OwnedFd, mut client: Option<&OwnedFd>, patience: Duration) -> Result<(), KeeperError> {
    let start = Instant::now();
    loop {
        let patience = if client.is_some() { patience } else { patience.min(FAREWELL) };
        let left = patience.saturating_sub(start.elapsed());
        let answer = PollFd::new(socket, PollFlags::IN);
        let gone = client.map(|client| PollFd::new(client, PollFlags::RDHUP));
        let mut poll: Vec<_> = [answer].into_iter().chain(gone).collect();
        match rustix::event::poll(&mut poll, Timespec::try_from(left).ok().as_ref()) {
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
            Ok(0) => return Err(KeeperError::Silent),
            Ok(_) if poll.first().is_some_and(|answer| !answer.revents().is_empty()) => return Ok(()),
            Ok(_) => client = None,
        }
    }
}

/// Receives the answer to a request for at most `most` descriptors and at most `buffer.len()` bytes.
fn receive(socket: &OwnedFd, id: u32, most: usize, buffer: &mut [u8]) -> Result<Taken, KeeperError> {
    let mut head = [0; ANSWER];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MSG_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let parts = &mut [IoSliceMut::new(&mut head), IoSliceMut::new(buffer)];
    let received = match rustix::io::retry_on_intr(|| rustix::net::recvmsg(socket, parts, &mut control, flags)) {
        Ok(received) if received.bytes == 0 => return Err(KeeperError::Gone),
        Ok(received) => received,
        Err(Errno::CONNRESET) => return Err(KeeperError::Gone),
        Err(errno) => return Err(errno.into()),
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    let answer = Answer::parse(&head).filter(|_| received.bytes >= ANSWER).ok_or(KeeperError::Nonsense)?;
    let bytes = received.bytes.saturating_sub(ANSWER);
    let cut = received.flags.contains(ReturnFlags::CTRUNC);
    let [told, came] = [usize::from(answer.fds), fds.len()];
    // Fewer descriptors than the answer announces: this process may have reached its descriptor limit.
    let whole = usize::try_from(answer.bytes) == Ok(bytes) && (came == told || cut && came < told) && told <= most;
    if answer.id != id || !whole || received.flags.contains(ReturnFlags::TRUNC) {
        return Err(KeeperError::Nonsense);
    }
    if cut {
        fds.clear();
    }
    Ok(Taken { bytes, fds, lost: answer.lost || cut, refused: answer.refused })
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;
    use crate::keeper::process;
    use crate::keeper::wire::REQUEST;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    /// Creates a keeper whose first process runs `first` with its end of the socket; later ones behave correctly.
    fn keeper(first: impl Fn(OwnedFd) + Send + Sync + Clone + 'static, patience: Duration) -> Arc<Keeper> {
        let started = AtomicUsize::new(0);
        let renew = move || {
            let (ours, theirs) = pair();
            let (first, is_first) = (first.clone(), started.fetch_add(1, Ordering::Relaxed) == 0);
            thread::spawn(move || if is_first { first(theirs) } else { serve(&theirs) });
            Ok(ours)
        };
        Keeper::new(renew, patience)
    }

    fn serve(socket: &OwnedFd) {
        let _ = process::serve(socket.as_fd());
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
        let keeper = keeper(|socket| serve(&socket), LONG);
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
    fn a_keeper_that_says_nothing_is_replaced() {
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
            keeper.current.lock().socket = Some((keeper.renew)().unwrap());
            let seat = keeper.device();
            seat.admit(server.as_fd()).unwrap();
            serves(&seat, &client);
        }
    }

    #[test]
    fn without_a_keeper_nobody_is_admitted() {
        let keeper = Keeper::new(|| Err(io::Error::other("none is left")), LONG);
        let (_client, server) = UnixStream::pair().unwrap();
        let error = keeper.device().admit(server.as_fd()).unwrap_err();
        assert!(error.to_string().contains("none is left"), "{error}");
        keeper.device().release();
    }
}
