//! Messages of a hand-over: frames of JSON on a stream socket, and saved states between them.
//!
//! | from the giver | |
//! | --- | --- |
//! | [`Part::Function`] | for each function, the network function of a device before the device itself |
//! | frames with a number | the descriptors of the connection and the doorbell pages, and their number in the frame |
//! | the saved state | a stream that contains its own end |
//! | [`Part::End`] | after all functions |
//! | [`Go`] | after the answer |

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pvrdma_vfio_user_server::{ClientConnection, ClientInterrupts, ClientRange};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::doorbells::{DoorbellSetup, GivenPages, ServedFile};
use crate::protocol::exchange::{self, ALL_READY};
use crate::status::FormerCounts;

/// Time for the other worker to read or write. QEMU gives up on a message after 5 s.
pub(super) const PATIENCE: Duration = Duration::from_secs(3);

/// Time for the supervisor to permit the prepared hand-over. It is longer than the supervisor waits for all givers
/// ([`ALL_READY`]): a permit that the supervisor sends finds the giver waiting.
pub(super) const PERMIT: Duration = ALL_READY.saturating_add(Duration::from_millis(500));

/// Time for the giver to permit the start. It is longer than the giver itself waits for its permit, so that the
/// permission finds the taker waiting.
pub(super) const GO: Duration = PERMIT.saturating_add(Duration::from_secs(1));

/// Byte with which a giver reports that the taker is ready.
pub(super) const READY: u8 = b'r';

/// Longest frame in bytes. The ranges of a guest with a vIOMMU take most of it.
const MAX_FRAME: usize = 16 << 20;

/// Maximum number of descriptors of a connection: its socket, files of guest memory, and interrupts.
const MAX_CONNECTION: usize = 512;

/// Announcement of the next item.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "part", rename_all = "kebab-case", deny_unknown_fields)]
pub(super) enum Part {
    /// A function.
    Function {
        /// Name of the device.
        device: String,
        /// It is the network function beside the device.
        nic: bool,
        /// Its client.
        client: Option<Client>,
        /// Its doorbell pages, if doorbells do not trap.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        doorbells: Option<GivenPages>,
        /// Values of its counters.
        #[serde(default)]
        counts: FormerCounts,
    },
    /// There are no more functions.
    End {},
}

/// Connection of a client without its descriptors.
///
/// Order of the descriptors: the socket, the files, the vectors that are set, the error interrupt, the legacy
/// interrupt.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Client {
    negotiated: bool,
    impatient: bool,
    ranges: Vec<ClientRange>,
    /// Number of files.
    files: usize,
    /// For each vector, whether it is set.
    vectors: Vec<bool>,
    error: bool,
    line: bool,
    asserted: bool,
    masked: bool,
}

/// Answer of the taker.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case", deny_unknown_fields)]
pub(super) enum Answer {
    /// All functions can be resumed.
    Ready {},
    /// The network stays with the giver.
    Refused {
        /// The reason.
        reason: String,
    },
}

/// Permission to resume the functions.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Go {}

impl Client {
    /// Separates a connection from its descriptors.
    pub(super) fn of(connection: ClientConnection) -> (Self, Vec<OwnedFd>) {
        let ClientConnection { stream, negotiated, impatient, ranges, files, interrupts } = connection;
        let ClientInterrupts { vectors, error, line, asserted, masked } = interrupts;
        let client = Self {
            negotiated,
            impatient,
            ranges,
            files: files.len(),
            vectors: vectors.iter().map(Option::is_some).collect(),
            error: error.is_some(),
            line: line.is_some(),
            asserted,
            masked,
        };
        let interrupts = vectors.into_iter().chain([error, line]).flatten();
        (client, [stream].into_iter().chain(files).chain(interrupts).collect())
    }

    /// Combines a connection with its descriptors.
    fn with(self, fds: Vec<OwnedFd>) -> Result<ClientConnection> {
        let Self { negotiated, impatient, ranges, files, vectors, error, line, asserted, masked } = self;
        let mut fds = VecDeque::from(fds);
        let stream = fds.pop_front().context("no socket of a client")?;
        ensure!(files <= fds.len(), "too few descriptors of a client");
        let files = fds.drain(..files).collect();
        let mut next = |set: bool| if set { fds.pop_front().context("too few interrupts").map(Some) } else { Ok(None) };
        let vectors = vectors.into_iter().map(&mut next).collect::<Result<_>>()?;
        let interrupts = ClientInterrupts { vectors, error: next(error)?, line: next(line)?, asserted, masked };
        ensure!(fds.is_empty(), "too many descriptors of a client");
        Ok(ClientConnection { stream, negotiated, impatient, ranges, files, interrupts })
    }

    fn descriptors(&self) -> usize {
        let interrupts = self.vectors.iter().chain([&self.error, &self.line]).filter(|set| **set).count();
        interrupts.saturating_add(self.files).saturating_add(1)
    }
}

/// Receives a message without descriptors. Returns `None` at the end of the stream.
pub(super) fn get<T: DeserializeOwned>(stream: &UnixStream) -> Result<Option<T>> {
    exchange::get(stream, MAX_FRAME)
}

/// Receives the descriptors of doorbell pages. Also returns `true` if a client has touched a page.
pub(super) fn get_pages(stream: &UnixStream, pages: GivenPages) -> Result<(DoorbellSetup, ServedFile, bool)> {
    let wanted = pages.descriptors();
    pages.with(exchange::get_descriptors(stream, wanted)?)
}

/// Receives the descriptors of a client.
pub(super) fn get_connection(stream: &UnixStream, client: Client) -> Result<ClientConnection> {
    let wanted = client.descriptors();
    ensure!(wanted <= MAX_CONNECTION, "a client with {wanted} descriptors");
    client.with(exchange::get_descriptors(stream, wanted)?)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::protocol::exchange::{put, put_descriptors};
    use crate::protocol::frame::MAX_DESCRIPTORS;
    use pvrdma_vfio_user_server::FilePart;

    fn descriptor() -> OwnedFd {
        rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap()
    }

    fn connection() -> ClientConnection {
        let memory = Some(FilePart { file: 1, offset: 4096 });
        let vectors = (0..50).map(|vector| (vector % 3 != 1).then(descriptor)).collect();
        ClientConnection {
            stream: descriptor(),
            negotiated: true,
            impatient: true,
            ranges: vec![ClientRange { address: 1 << 40, size: 8192, writable: true, memory }],
            files: vec![descriptor(), descriptor()],
            interrupts: ClientInterrupts {
                vectors,
                error: None,
                line: Some(descriptor()),
                asserted: true,
                masked: false,
            },
        }
    }

    /// A connection with more descriptors than fit into a frame arrives, and the data behind it is not lost.
    #[test]
    fn connections_arrive_with_their_descriptors() {
        let (here, there) = UnixStream::pair().unwrap();
        let (client, fds) = Client::of(connection());
        assert!(fds.len() > MAX_DESCRIPTORS && fds.len() == client.descriptors());
        put(
            &here,
            &Part::Function {
                device: "vm".to_owned(),
                nic: true,
                client: Some(client),
                doorbells: None,
                counts: FormerCounts::default(),
            },
        )
        .unwrap();
        put_descriptors(&here, &fds).unwrap();
        put(&here, &Part::End {}).unwrap();
        drop(here);
        let Some(Part::Function { device, nic: true, client: Some(client), .. }) = get(&there).unwrap() else {
            panic!("no function")
        };
        assert_eq!(device, "vm");
        let ClientConnection { stream, negotiated, impatient, ranges, files, interrupts } =
            get_connection(&there, client).unwrap();
        let sent = connection();
        assert_eq!((negotiated, impatient, ranges, files.len()), (true, true, sent.ranges, 2));
        assert_ne!(stream.as_raw_fd(), files[0].as_raw_fd());
        let set = |vectors: &[Option<OwnedFd>]| vectors.iter().map(Option::is_some).collect::<Vec<_>>();
        assert_eq!(set(&interrupts.vectors), set(&sent.interrupts.vectors));
        assert!(interrupts.error.is_none() && interrupts.line.is_some() && interrupts.asserted && !interrupts.masked);
        assert!(matches!(get(&there).unwrap(), Some(Part::End {})));
        assert!(get::<Part>(&there).unwrap().is_none());
    }

    #[test]
    fn wrong_numbers_of_descriptors_are_refused() {
        let fail = |change: fn(&mut Client), send: usize| {
            let (here, there) = UnixStream::pair().unwrap();
            let (mut client, fds) = Client::of(connection());
            change(&mut client);
            put_descriptors(&here, &fds[..send]).unwrap();
            drop(here);
            get_connection(&there, client).unwrap_err().to_string()
        };
        assert_eq!(fail(|_| (), 20), "the other end is closed");
        assert_eq!(fail(|client| client.files = 5000, 20), "a client with 5035 descriptors");
        assert_eq!(fail(|client| client.files = 0, 37), "too many descriptors");
        assert!(fail(|client| client.files = usize::MAX, 1).starts_with("a client with"));
    }
}
