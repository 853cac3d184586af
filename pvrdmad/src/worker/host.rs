//! Operations for which a worker depends on its supervisor.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use log::debug;
use parking_lot::Mutex;
use pvrdma_rxe::FailureCause;

use crate::protocol::frame::{encode, send};
use crate::protocol::{FrameError, FrameReader, HostReply, HostRequest, Incoming, Outgoing, Received};

/// Time limit for a reply of the supervisor. After it, the worker continues without the reply.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time limit for writing a note. It also throttles a worker that floods its supervisor.
const NOTE_PATIENCE: Duration = Duration::from_secs(1);
/// Longest reply in bytes.
const MAX_REPLY: usize = 4096;

/// Operations that a worker cannot perform by itself.
pub trait Host: Send + Sync + fmt::Debug {
    /// Reports that a VMM connected to a device or disconnected.
    fn client(&self, device: &str, connected: bool);

    /// Reports that this worker serves the client that a crashed worker has left, of a device or of its network
    /// function. `problem` is the reason why the driver was not told.
    fn client_recovered(&self, device: &str, network_function: bool, problem: Option<&str>);

    /// Reports that a queue pair of a device has failed, with cause and history.
    fn queue_pair_failed(&self, device: &str, qpn: u32, peer: IpAddr, why: (FailureCause, &str));

    /// Reports that a host beyond the uplink uses an address of a device. `kept` tells whether the device keeps the
    /// address.
    fn address_conflict(&self, device: &str, address: IpAddr, vlan: Option<u16>, kept: bool);

    /// Reopens the descriptor of a link: that of an interface of the uplink, or of the `nic` of a device.
    ///
    /// # Errors
    /// The link cannot be opened now, or the supervisor does not answer.
    fn connect(&self, device: Option<&str>, interface: usize) -> io::Result<OwnedFd>;

    /// Starts a keeper for a device and ends the previous one. Returns the socket to the keeper.
    ///
    /// # Errors
    /// None can be started, or the supervisor does not answer.
    fn keeper(&self, device: &str) -> io::Result<OwnedFd>;

    /// Adds an address of a guest to the host's interface.
    ///
    /// # Errors
    /// The address is not in the allowed networks, already exists, or is refused by the kernel.
    fn add_address(&self, address: IpAddr) -> io::Result<()>;

    /// Removes the address again.
    ///
    /// # Errors
    /// The address does not exist, or the kernel refuses.
    fn remove_address(&self, address: IpAddr) -> io::Result<()>;
}

/// Connection to the supervisor.
#[derive(Debug)]
pub(super) struct RemoteHost {
    /// Serializes the writing of frames.
    writing: Mutex<UnixStream>,
    /// Serializes the requests that wait for a reply.
    asking: Mutex<Asking>,
}

#[derive(Debug)]
struct Asking {
    stream: UnixStream,
    reader: FrameReader,
    id: u64,
}

impl RemoteHost {
    pub(super) fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_write_timeout(Some(NOTE_PATIENCE))?;
        let asking = Asking { stream: stream.try_clone()?, reader: FrameReader::with_descriptors(), id: 0 };
        Ok(Self { writing: Mutex::new(stream), asking: Mutex::new(asking) })
    }

    fn send(&self, id: u64, body: &HostRequest) -> io::Result<()> {
        let frame = encode(&Outgoing { id, body }).map_err(io::Error::other)?;
        send(&self.writing.lock(), &frame, &[])
    }

    fn ask(&self, request: &HostRequest) -> io::Result<Option<OwnedFd>> {
        let mut asking = self.asking.lock();
        asking.id = asking.id.wrapping_add(1);
        let (id, deadline) = (asking.id, Instant::now() + PATIENCE);
        self.send(id, request)?;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            asking.stream.set_read_timeout(Some(left))?;
            let Asking { stream, reader, .. } = &mut *asking;
            let frame = match reader.receive(stream, MAX_REPLY) {
                Ok(Received::Frame(frame)) => frame,
                Ok(Received::Pending) => continue,
                Ok(Received::Closed) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(FrameError::Socket(error)) => return Err(error),
                Err(error) => return Err(io::Error::other(error)),
            };
            let reply: Incoming<'_> = serde_json::from_slice(&frame.body)?;
            // A smaller number belongs to a request whose caller has given up.
            if reply.id == id {
                return match serde_json::from_str(reply.body.get())? {
                    HostReply::Done {} => Ok(frame.fds.into_iter().next()),
                    HostReply::Refused(problem) => Err(io::Error::other(problem)),
                };
            }
        }
    }
}

impl Host for RemoteHost {
    fn client(&self, device: &str, connected: bool) {
        let device = device.to_owned();
        let note = if connected { HostRequest::ClientConnected { device } } else { HostRequest::ClientGone { device } };
        if let Err(error) = self.send(0, &note) {
            debug!("the supervisor does not listen: {error}");
        }
    }

    fn client_recovered(&self, device: &str, network_function: bool, problem: Option<&str>) {
        let (device, problem) = (device.to_owned(), problem.map(str::to_owned));
        if let Err(error) = self.send(0, &HostRequest::ClientRecovered { device, network_function, problem }) {
            debug!("the supervisor does not listen: {error}");
        }
    }

    fn queue_pair_failed(&self, device: &str, qpn: u32, peer: IpAddr, (cause, history): (FailureCause, &str)) {
        let (device, history) = (device.to_owned(), history.to_owned());
        if let Err(error) = self.send(0, &HostRequest::QueuePairFailed { device, qpn, peer, cause, history }) {
            debug!("the supervisor does not listen: {error}");
        }
    }

    fn address_conflict(&self, device: &str, address: IpAddr, vlan: Option<u16>, kept: bool) {
        let device = device.to_owned();
        if let Err(error) = self.send(0, &HostRequest::AddressConflict { device, address, vlan, kept }) {
            debug!("the supervisor does not listen: {error}");
        }
    }

    fn connect(&self, device: Option<&str>, interface: usize) -> io::Result<OwnedFd> {
        let descriptor = self.ask(&HostRequest::Connect { device: device.map(str::to_owned), interface })?;
        descriptor.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn keeper(&self, device: &str) -> io::Result<OwnedFd> {
        let socket = self.ask(&HostRequest::Keeper { device: device.to_owned() })?;
        socket.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn add_address(&self, address: IpAddr) -> io::Result<()> {
        self.ask(&HostRequest::AddAddress { address }).map(drop)
    }

    fn remove_address(&self, address: IpAddr) -> io::Result<()> {
        self.ask(&HostRequest::RemoveAddress { address }).map(drop)
    }
}
