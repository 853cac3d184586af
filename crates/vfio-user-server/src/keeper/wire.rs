//! Messages between a worker and its keeper: packets of a `SOCK_SEQPACKET` socket pair.
//!
//! | request, 12 bytes and more | answer, 16 bytes and more |
//! | --- | --- |
//! | operation, seat, permitted descriptors, 0: a byte each | number of the request: 4 bytes |
//! | most bytes to take: 4 | bytes that follow: 4 |
//! | its number: 4 | descriptors, 1 if some were lost, code of a refusal, 0: a byte each |
//! | keys and contents of notes | errno of that refusal: 4 |
//! | | bytes that were taken, or a note with its key |
//!
//! Numbers are in native byte order. The keeper answers a request before the worker sends the next one.
//!
//! | operation | follows the request | the answer brings |
//! | --- | --- | --- |
//! | [`Operation::Admit`] | the client's socket | |
//! | [`Operation::Take`] | | bytes and accepted descriptors of the client |
//! | [`Operation::Put`] | a key and a note, with its descriptors | `ENOSPC` if there is no room |
//! | [`Operation::Forget`] | first and last key | |
//! | [`Operation::Recall`] | nothing, or a key | the client's socket; or the first note from that key on |
//! | [`Operation::Look`] | | a byte for each seat: 1 if it has a client |

use rustix::io::Errno;

use super::notes::{KEY, MAX_NOTE};
use super::receive::{Taken, Wanted};
use crate::examine::DescriptorError;

/// Maximum number of clients of a keeper: one of the device and one of its network function.
pub(super) const SEATS: usize = 2;

/// Maximum number of message bytes in an answer.
pub(super) const CHUNK: usize = 4096;

/// Maximum number of bytes behind a request.
pub(super) const MAX_TAIL: usize = KEY + MAX_NOTE;

pub(super) const REQUEST: usize = 12;
pub(super) const ANSWER: usize = 16;

/// Operation that a worker requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Operation {
    /// Keep the socket that the request carries.
    Admit,
    /// Close the socket.
    Release,
    /// Receive bytes from the socket.
    Take(Wanted),
    /// Keep a note about the client.
    Put,
    /// Drop notes.
    Forget,
    /// Return the socket, or a note.
    Recall,
    /// Tell which seats have a client.
    Look,
}

/// Request of a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Request {
    pub(super) operation: Operation,
    /// Number of the client, less than [`SEATS`].
    pub(super) seat: u8,
    /// Maximum number of bytes to receive.
    pub(super) bytes: u32,
    pub(super) id: u32,
}

impl Request {
    pub(super) const fn to_bytes(self) -> [u8; REQUEST] {
        let (operation, wanted) = match self.operation {
            Operation::Admit => (1, 0),
            Operation::Release => (2, 0),
            Operation::Take(Wanted::Nothing) => (3, 0),
            Operation::Take(Wanted::Memory { sealed: false }) => (3, 1),
            Operation::Take(Wanted::Memory { sealed: true }) => (3, 2),
            Operation::Take(Wanted::Interrupts) => (3, 3),
            Operation::Put => (4, 0),
            Operation::Forget => (5, 0),
            Operation::Recall => (6, 0),
            Operation::Look => (7, 0),
        };
        let ([a, b, c, d], [e, f, g, h]) = (self.bytes.to_ne_bytes(), self.id.to_ne_bytes());
        [operation, self.seat, wanted, 0, a, b, c, d, e, f, g, h]
    }

    /// Parses a request. Returns `None` if it is malformed.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let &[operation, seat, wanted, 0, a, b, c, d, e, f, g, h] = bytes else { return None };
        let operation = match (operation, wanted) {
            (1, 0) => Operation::Admit,
            (2, 0) => Operation::Release,
            (3, 0) => Operation::Take(Wanted::Nothing),
            (3, 1) => Operation::Take(Wanted::Memory { sealed: false }),
            (3, 2) => Operation::Take(Wanted::Memory { sealed: true }),
            (3, 3) => Operation::Take(Wanted::Interrupts),
            (4, 0) => Operation::Put,
            (5, 0) => Operation::Forget,
            (6, 0) => Operation::Recall,
            (7, 0) => Operation::Look,
            _ => return None,
        };
        let (bytes, id) = (u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h]));
        (usize::from(seat) < SEATS).then_some(Self { operation, seat, bytes, id })
    }
}

/// Header of an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Answer {
    pub(super) id: u32,
    pub(super) bytes: u32,
    pub(super) fds: u8,
    pub(super) lost: bool,
    pub(super) refused: Option<DescriptorError>,
}

impl Answer {
    pub(super) fn new(id: u32, taken: &Taken) -> Self {
        let Taken { bytes, ref fds, lost, refused } = *taken;
        Self { lost, refused, ..Self::with(id, bytes, fds.len()) }
    }

    /// Returns the header of an answer with a note.
    pub(super) fn with(id: u32, bytes: usize, fds: usize) -> Self {
        let (bytes, fds) = (u32::try_from(bytes).unwrap_or(u32::MAX), u8::try_from(fds).unwrap_or(u8::MAX));
        Self { id, bytes, fds, lost: false, refused: None }
    }

    pub(super) fn to_bytes(self) -> [u8; ANSWER] {
        let (code, errno) = match self.refused {
            None => (0, 0),
            Some(DescriptorError::System(errno)) => (1, errno.raw_os_error()),
            Some(DescriptorError::MayBlock) => (2, 0),
            Some(DescriptorError::NotSealed) => (3, 0),
            Some(DescriptorError::NotEventfd) => (4, 0),
        };
        let ([a, b, c, d], [e, f, g, h]) = (self.id.to_ne_bytes(), self.bytes.to_ne_bytes());
        let [i, j, k, l] = errno.to_ne_bytes();
        [a, b, c, d, e, f, g, h, self.fds, self.lost.into(), code, 0, i, j, k, l]
    }

    /// Parses the header of an answer. Returns `None` if it is malformed.
    pub(super) fn parse(bytes: &[u8; ANSWER]) -> Option<Self> {
        let [a, b, c, d, e, f, g, h, fds, lost @ (0 | 1), code, 0, i, j, k, l] = *bytes else { return None };
        let (id, bytes) = (u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h]));
        let refused = match (code, i32::from_ne_bytes([i, j, k, l])) {
            (0, 0) => None,
            // Errnos that a system call can return; no other value is passed on to the client.
            (1, errno @ 1..4096) => Some(DescriptorError::System(Errno::from_raw_os_error(errno))),
            (2, 0) => Some(DescriptorError::MayBlock),
            (3, 0) => Some(DescriptorError::NotSealed),
            (4, 0) => Some(DescriptorError::NotEventfd),
            _ => return None,
        };
        Some(Self { id, bytes, fds, lost: lost == 1, refused })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn operations() -> impl Strategy<Value = Operation> {
        let wanted =
            [Wanted::Nothing, Wanted::Memory { sealed: false }, Wanted::Memory { sealed: true }, Wanted::Interrupts];
        use Operation::{Admit, Forget, Look, Put, Recall, Release};
        let all = [Admit, Release, Put, Forget, Recall, Look].into_iter().chain(wanted.map(Operation::Take));
        prop::sample::select(all.collect::<Vec<_>>())
    }

    proptest! {
        #[test]
        fn requests_come_back(operation in operations(), seat in 0u8..2, bytes: u32, id: u32) {
            let request = Request { operation, seat, bytes, id };
            prop_assert_eq!(Request::parse(&request.to_bytes()), Some(request));
        }

        #[test]
        fn answers_come_back(id: u32, bytes: u32, fds: u8, lost: bool, code in 0usize..5) {
            let refused = [
                None,
                Some(DescriptorError::System(Errno::MFILE)),
                Some(DescriptorError::MayBlock),
                Some(DescriptorError::NotSealed),
                Some(DescriptorError::NotEventfd),
            ][code];
            let answer = Answer { id, bytes, fds, lost, refused };
            prop_assert_eq!(Answer::parse(&answer.to_bytes()), Some(answer));
        }

        /// A message is either parsed without loss or refused.
        #[test]
        fn any_bytes(bytes in prop::array::uniform16(prop_oneof![3 => 0u8..5, 1 => any::<u8>()]), cut in 0usize..16) {
            if let Some(answer) = Answer::parse(&bytes) {
                prop_assert_eq!(answer.to_bytes(), bytes);
            }
            if let Some(request) = Request::parse(&bytes[..cut]) {
                prop_assert_eq!(&request.to_bytes()[..], &bytes[..cut]);
            }
        }
    }
}
