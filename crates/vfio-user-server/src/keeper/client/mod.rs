//! Worker's end: sends requests to a keeper, and replaces a keeper that does not answer.

pub mod look;

use std::collections::BTreeMap;
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

use super::notes::{KEY, Key, MAX_NOTES, Note, Notes};
use super::receive::{Taken, Wanted};
use super::wire::{ANSWER, Answer, CHUNK, MAX_TAIL, Operation, Request, SEATS};
use crate::message::MAX_MSG_FDS;

/// Timeout for an answer of a keeper, which normally takes microseconds. A shorter one would end connections on a host
/// that is short of CPU time; with a longer one a client's own timeout (5 s for QEMU) expires first.
pub const PATIENCE: Duration = Duration::from_secs(4);

/// Timeout once the client is gone: the next client waits for the end of its connection.
const FAREWELL: Duration = Duration::from_millis(500);

/// Timeout for a keeper that an earlier worker has left. The other devices of the network wait meanwhile.
const RECALL: Duration = Duration::from_secs(1);

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
    /// The keeper does not accept a note.
    #[error("{0}")]
    Refused(String),
    /// A system call failed on the worker's side.
    #[error("the process that receives its descriptors cannot be asked: {0}")]
    System(#[from] Errno),
}

/// Starts a keeper in place of the previous one, which is killed.
type Renew = Box<dyn Fn() -> io::Result<OwnedFd> + Send + Sync>;

/// Descriptor in a note of the worker.
pub(crate) type Shared = Arc<dyn AsFd + Send + Sync>;

/// Keeper of a device, replaced when it fails.
pub struct Keeper {
    renew: Renew,
    patience: Duration,
    current: Mutex<Current>,
}

#[derive(Default)]
struct Current {
    /// Connection to the current keeper; `None` before the first client and after a keeper was abandoned.
    line: Option<Line>,
    /// Connected clients, kept to pass them to the next keeper.
    seats: [Option<Occupied>; SEATS],
}

/// A client, with a copy of the notes about it.
struct Occupied {
    stream: OwnedFd,
    notes: Notes<Shared>,
    /// Reason why the client would not survive a crash.
    unkept: Option<String>,
}

/// Connection to a keeper.
struct Line {
    socket: OwnedFd,
    id: u32,
}

/// A request to the keeper, with the data and descriptors that follow it.
struct Ask<'a> {
    operation: Operation,
    seat: usize,
    tail: &'a [u8],
    fds: &'a [BorrowedFd<'a>],
    /// Maximum number of descriptors of the answer.
    most: usize,
}

impl Line {
    const fn new(socket: OwnedFd) -> Self {
        Self { socket, id: 0 }
    }

    /// Sends a request and waits for the answer. The wait is short once the client has hung up.
    fn exchange(
        &mut self,
        ask: &Ask<'_>,
        client: Option<&OwnedFd>,
        patience: Duration,
        buffer: &mut [u8],
    ) -> Result<Taken, KeeperError> {
        let Self { socket, id } = self;
        *id = id.wrapping_add(1);
        let chunk = buffer.len().min(CHUNK);
        let seat = u8::try_from(ask.seat).map_err(|_| Errno::INVAL)?;
        let request = Request { operation: ask.operation, seat, bytes: u32::try_from(chunk).unwrap_or(0), id: *id };
        send(socket, &request, ask.tail, ask.fds)?;
        await_answer(socket, client, patience)?;
        receive(socket, *id, ask.most, buffer.get_mut(..chunk).unwrap_or_default())
    }

    /// Sends a request whose answer brings nothing.
    fn tell(&mut self, ask: &Ask<'_>, client: Option<&OwnedFd>, patience: Duration) -> Result<(), KeeperError> {
        match self.exchange(ask, client, patience, &mut [])?.refused {
            Some(refused) => Err(KeeperError::Refused(refused.to_string())),
            None => Ok(()),
        }
    }

    /// Passes a client to the keeper, with all notes about it. If the keeper refuses a note, the client is served
    /// without them.
    fn admit(&mut self, seat: usize, client: &mut Occupied, patience: Duration) -> Result<(), KeeperError> {
        let Occupied { stream, notes, unkept } = client;
        let admit = Ask { operation: Operation::Admit, seat, tail: &[], fds: &[stream.as_fd()], most: 0 };
        self.tell(&admit, Some(stream), patience)?;
        for (key, note) in notes.iter().filter(|_| unkept.is_none()) {
            match self.put(seat, key, note, patience) {
                Ok(()) => {}
                Err(KeeperError::Refused(reason)) => {
                    *unkept = Some(reason);
                    return self.forget(seat, (Key::FIRST, Key::LAST), patience);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn put(&mut self, seat: usize, key: Key, note: &Note<Shared>, patience: Duration) -> Result<(), KeeperError> {
        let tail = [&key.to_bytes()[..], &note.bytes].concat();
        let fds: Vec<_> = note.fds.iter().map(AsFd::as_fd).collect();
        self.tell(&Ask { operation: Operation::Put, seat, tail: &tail, fds: &fds, most: 0 }, None, patience)
    }

    fn forget(&mut self, seat: usize, (first, last): (Key, Key), patience: Duration) -> Result<(), KeeperError> {
        let tail = [first.to_bytes(), last.to_bytes()].concat();
        self.tell(&Ask { operation: Operation::Forget, seat, tail: &tail, fds: &[], most: 0 }, None, patience)
    }
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

    /// Creates a handle of a keeper that an earlier worker has left, with that worker's clients.
    pub fn resume(
        left: OwnedFd,
        renew: impl Fn() -> io::Result<OwnedFd> + Send + Sync + 'static,
        patience: Duration,
    ) -> Arc<Self> {
        let current = Mutex::new(Current { line: Some(Line::new(left)), ..Current::default() });
        Arc::new(Self { renew: Box::new(renew), patience, current })
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
        current.line = None;
        let mut line = Line::new((self.renew)().map_err(KeeperError::None)?);
        for (seat, client) in current.seats.iter_mut().enumerate() {
            if let Some(client) = client {
                line.admit(seat, client, self.patience)?;
            }
        }
        current.line = Some(line);
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
        let Current { line, seats } = &mut *current;
        let Some(seat) = seats.get_mut(self.number) else { return Err(KeeperError::Nonsense) };
        let client = seat.insert(Occupied { stream, notes: Notes::default(), unkept: None });
        if line.as_mut().is_some_and(|line| line.admit(self.number, client, keeper.patience).is_ok()) {
            return Ok(());
        }
        // The previous client may have left the keeper stuck, so this client gets a new one.
        keeper.start(&mut current)
    }

    /// Makes the keeper close the socket of a disconnected client, of which it holds the last descriptor.
    pub(crate) fn release(&self) {
        let keeper = &self.keeper;
        let mut current = keeper.current.lock();
        let Current { line, seats } = &mut *current;
        let Some(seat) = seats.get_mut(self.number) else { return };
        let (Some(client), Some(line)) = (seat.take(), line) else { return };
        // The worker's last duplicate, so that the keeper holds the last descriptor of the socket.
        drop(client);
        let release = Ask { operation: Operation::Release, seat: self.number, tail: &[], fds: &[], most: 0 };
        match line.tell(&release, None, keeper.patience.min(FAREWELL)) {
            Ok(()) => {}
            // The next keeper starts when a client needs one.
            Err(KeeperError::Gone) => current.line = None,
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
        if current.line.is_none() {
            keeper.start(&mut current)?;
        }
        let taken = match self.exchange(&mut current, wanted, buffer) {
            // The keeper had ended before the request, and has received nothing.
            Err(KeeperError::System(Errno::PIPE | Errno::CONNRESET)) => {
                keeper.start(&mut current)?;
                self.exchange(&mut current, wanted, buffer)
            }
            taken => taken,
        };
        taken.inspect_err(|_| keeper.replace(&mut current, self.number))
    }

    fn exchange(&self, current: &mut Current, wanted: Wanted, buffer: &mut [u8]) -> Result<Taken, KeeperError> {
        let Current { line: Some(line), seats } = current else { return Err(KeeperError::Gone) };
        let client = seats.get(self.number).and_then(Option::as_ref).map(|client| &client.stream);
        let (operation, most) = (Operation::Take(wanted), wanted.most());
        let ask = Ask { operation, seat: self.number, tail: &[], fds: &[], most };
        line.exchange(&ask, client, self.keeper.patience, buffer)
    }

    /// Writes a note about the client, for the next worker if this one crashes. Returns the reason if the client has
    /// become one that does not survive a crash; it is served nevertheless.
    #[must_use = "the reason is to be logged"]
    pub(crate) fn put(&self, key: Key, note: Note<Shared>) -> Option<String> {
        self.change(|line, client, keeper| {
            if !client.notes.put(key, note) {
                return Err(KeeperError::Refused("there is too much to keep about it".to_owned()));
            }
            let Some(note) = client.notes.get(key) else { return Ok(()) };
            line.map_or(Err(KeeperError::Gone), |line| line.put(self.number, key, note, keeper.patience))
        })
    }

    /// Removes the notes from `first` to `last`.
    #[must_use = "the reason is to be logged"]
    pub(crate) fn forget(&self, first: Key, last: Key) -> Option<String> {
        self.change(|line, client, keeper| {
            client.notes.remove(first, last);
            line.map_or(Err(KeeperError::Gone), |line| line.forget(self.number, (first, last), keeper.patience))
        })
    }

    /// Returns the bytes of a note, as they were written last.
    pub(crate) fn noted(&self, key: Key) -> Option<Vec<u8>> {
        let current = self.keeper.current.lock();
        let client = current.seats.get(self.number)?.as_ref()?;
        client.notes.get(key).map(|note| note.bytes.clone())
    }

    /// Removes the notes of this kind whose descriptors nothing else refers to.
    #[must_use = "the reason is to be logged"]
    pub(crate) fn forget_unused(&self, kind: u8) -> Option<String> {
        let unused: Vec<_> = {
            let current = self.keeper.current.lock();
            let client = current.seats.get(self.number)?.as_ref()?;
            let unused = |note: &Note<Shared>| note.fds.iter().all(|fd| Arc::strong_count(fd) == 1);
            let notes = client.notes.iter().filter(|(key, note)| key.kind == kind && unused(note));
            notes.map(|(key, _)| key).collect()
        };
        unused.into_iter().fold(None, |problem, key| self.forget(key, key).or(problem))
    }

    /// Changes the notes here and at the keeper. A keeper that fails is replaced by one with the same notes.
    fn change(
        &self,
        change: impl FnOnce(Option<&mut Line>, &mut Occupied, &Keeper) -> Result<(), KeeperError>,
    ) -> Option<String> {
        let keeper = &self.keeper;
        let mut current = keeper.current.lock();
        let Current { line, seats } = &mut *current;
        let client = seats.get_mut(self.number)?.as_mut().filter(|client| client.unkept.is_none())?;
        let changed = match change(line.as_mut(), client, keeper) {
            Ok(()) => return None,
            Err(KeeperError::Refused(reason)) => {
                client.unkept = Some(reason.clone());
                client.notes = Notes::default();
                let forgotten =
                    line.as_mut().map(|line| line.forget(self.number, (Key::FIRST, Key::LAST), keeper.patience));
                if let Some(Err(_)) = forgotten {
                    let _ = keeper.start(&mut current);
                }
                return Some(reason);
            }
            Err(_) => keeper.start(&mut current),
        };
        let client = current.seats.get_mut(self.number)?.as_mut()?;
        match changed {
            Ok(()) => client.unkept.clone(),
            Err(error) => {
                let reason = error.to_string();
                client.unkept = Some(reason.clone());
                Some(reason)
            }
        }
    }

    /// Returns the socket of the client that an earlier worker has left at this seat, and all notes about it.
    ///
    /// # Errors
    /// The keeper does not answer correctly.
    pub(crate) fn recall(&self) -> Result<Option<Recalled>, KeeperError> {
        let patience = self.keeper.patience.min(RECALL);
        let mut current = self.keeper.current.lock();
        let Some(line) = &mut current.line else { return Ok(None) };
        let recalled = line.recall(self.number, patience);
        if recalled.is_err() {
            // Ends the keeper, which has the client's socket: the client sees the end of its connection.
            let _ = self.keeper.start(&mut current);
        }
        recalled
    }
}

/// Client that an earlier worker has left: its socket, and the notes about it.
#[derive(Debug)]
pub(crate) struct Recalled {
    pub(crate) stream: OwnedFd,
    pub(crate) notes: BTreeMap<Key, Note<OwnedFd>>,
}

impl Line {
    fn recall(&mut self, seat: usize, patience: Duration) -> Result<Option<Recalled>, KeeperError> {
        fn ask(seat: usize, tail: &[u8], most: usize) -> Ask<'_> {
            Ask { operation: Operation::Recall, seat, tail, fds: &[], most }
        }
        let stream = match self.exchange(&ask(seat, &[], 1), None, patience, &mut []) {
            Ok(taken) => taken.fds.into_iter().next(),
            // It has ended, because it has no clients.
            Err(KeeperError::Gone | KeeperError::System(Errno::PIPE | Errno::CONNRESET)) => None,
            Err(error) => return Err(error),
        };
        let Some(stream) = stream else { return Ok(None) };
        let (mut notes, mut from) = (BTreeMap::new(), Some(Key::FIRST));
        while let Some(key) = from {
            let (mut buffer, tail) = ([0; MAX_TAIL], key.to_bytes());
            let taken = self.exchange(&ask(seat, &tail, MAX_MSG_FDS), None, patience, &mut buffer)?;
            let Some((found, bytes)) = buffer.get(..taken.bytes).and_then(<[u8]>::split_first_chunk::<KEY>) else {
                break;
            };
            let found = Key::from_bytes(*found);
            // A keeper that goes backwards would never come to an end.
            if found < key || taken.lost || taken.refused.is_some() || notes.len() >= MAX_NOTES {
                return Err(KeeperError::Nonsense);
            }
            notes.insert(found, Note { bytes: bytes.to_vec(), fds: taken.fds });
            from = found.next();
        }
        Ok(Some(Recalled { stream, notes }))
    }
}

/// Sends a request without blocking: the socket has room for one.
fn send(socket: &OwnedFd, request: &Request, tail: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), KeeperError> {
    let (bytes, flags) = (request.to_bytes(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MSG_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL.into());
    }
    let packet = [IoSlice::new(&bytes), IoSlice::new(tail)];
    rustix::io::retry_on_intr(|| rustix::net::sendmsg(socket, &packet, &mut control, flags))?;
    Ok(())
}

/// Waits for an answer, with a shorter timeout once the client of the request has disconnected.
fn await_answer(socket: &OwnedFd, mut client: Option<&OwnedFd>, mut patience: Duration) -> Result<(), KeeperError> {
    let start = Instant::now();
    loop {
        let left = patience.saturating_sub(start.elapsed());
        let answer = PollFd::new(socket, PollFlags::IN);
        let gone = client.map(|client| PollFd::new(client, PollFlags::RDHUP));
        let mut poll: Vec<_> = [answer].into_iter().chain(gone).collect();
        match rustix::event::poll(&mut poll, Timespec::try_from(left).ok().as_ref()) {
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
            Ok(0) => return Err(KeeperError::Silent),
            Ok(_) if poll.first().is_some_and(|answer| !answer.revents().is_empty()) => return Ok(()),
            Ok(_) => (client, patience) = (None, patience.min(FAREWELL)),
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
mod tests;
