// Long: one file handles each message of a client.
//! Connection of one client, from its first message to its last.

use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, SyncSender};
use std::time::Instant;

use log::debug;
use pvrdma_base::EndOnPanic;
use pvrdma_guest_memory::{REMEMBERED, STALLS};
use pvrdma_pci_function::{Deferred, Outline};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use serde_json::Value;

use super::client_connection::ClientConnection;
use super::dma::DmaMaps;
use super::endpoint::Endpoint;
use super::examine::DescriptorError;
use super::message::{Command, HEADER_SIZE, MessageKind};
use super::migration::Migration;
use super::regions::{Region, Shape};
use super::request::{DmaUnmap, RegionAccess, Request, Version};
use super::session::{Protocol, Service, Session, SessionState};
use super::stream::ATOMIC_ANSWER;
use super::stream::{ConnectionError, Message, Receiver, Reply};
use super::transfer::AdoptError;

/// The server's part of the version negotiation, NUL included.
const CAPABILITIES: &[u8] = b"{\"capabilities\":{\"max_msg_fds\":16,\"max_data_xfer_size\":1048576}}\0";

/// Descriptors that clients cannot use up: the process needs them to accept other clients, for links and for captures.
const DESCRIPTORS_RESERVED: u64 = 64;

/// Buffers larger than this are freed after use.
const KEPT_BUFFER: usize = 64 << 10;

/// End of the service of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ended {
    /// The client is gone, and the device holds no state of it.
    Gone,
    /// Another server has the client.
    Given,
}

/// A connection that another server has described, and the channels between its thread and the server that adopts it.
pub(crate) struct Adoption {
    pub(crate) connection: ClientConnection,
    /// The server of the client has crashed: the function is recovered with this outline. `None`: the function has the
    /// state that the client knows.
    pub(crate) outline: Option<Outline>,
    /// Receives the result once the client can be served, with the reason if the driver of a recovered function was not
    /// told.
    pub(crate) ready: SyncSender<Result<Option<String>, AdoptError>>,
    /// Receives the permission to serve the client. Disconnected: the other server keeps it.
    pub(crate) go: mpsc::Receiver<()>,
}

impl Endpoint {
    /// Serves one client on the calling thread until it disconnects. For callers that accept clients themselves.
    ///
    /// Afterwards the device is reset and holds no state of the client.
    pub fn serve(&self, stream: &UnixStream) {
        self.serve_session(stream, &Session::default(), None);
    }

    /// Serves the client of a session on the calling thread until it disconnects or is given away.
    ///
    /// If the client disconnects, the device is reset and then holds no state of the client, even after a panic. A
    /// panic is a bug in the server, and ends the connection.
    pub(crate) fn serve_session(&self, stream: &UnixStream, session: &Session, adoption: Option<Adoption>) -> Ended {
        let admitted = self.keeper.as_ref().map_or(Ok(()), |keeper| keeper.admit(stream.as_fd()));
        let mut connection = Connection::new(self, stream, session);
        match (admitted, adoption) {
            (Ok(()), None) => {
                self.note_function();
                self.note_protocol(Protocol::default());
            }
            (Ok(()), Some(adoption)) => {
                if !connection.adopt(adoption) {
                    connection.dma.clear();
                    self.irqs.clear();
                    session.0.lock().service = Service::Given;
                    return Ended::Given;
                }
            }
            (Err(error), Some(adoption)) => {
                let _ = adoption.ready.send(Err(AdoptError::Keeper(error.to_string())));
                session.0.lock().service = Service::Given;
                return Ended::Given;
            }
            (Err(error), None) => {
                self.error(module_path!(), format_args!("a client is not served: {error}"));
                session.0.lock().client = None;
                let _ = stream.shutdown(Shutdown::Both);
                return Ended::Gone;
            }
        }
        // Code with state that several guests share ends the process if a panic may have left that state inconsistent.
        // All other state belongs to this device, and the reset discards all of it.
        let served = catch_unwind(AssertUnwindSafe(|| connection.run()));
        let _guard = EndOnPanic::new("the clean-up after a client");
        // The lock is held during the clean-up, so that a hand-over never sees half of it.
        let mut state = session.0.lock();
        if state.service == Service::Given {
            return Ended::Given;
        }
        state.client = None;
        if served.is_err() {
            self.stats.counters.client_connections_panicked.increment();
            self.error(module_path!(), format_args!("connection closed by a panic: the device is reset"));
        }
        // The stream is shut down before the clean-up, so that the next client is not turned away meanwhile. This fails
        // if the client has already disconnected.
        let _ = stream.shutdown(Shutdown::Both);
        if served.is_ok() {
            connection.migration.disconnected();
        }
        self.function.reset();
        connection.dma.clear();
        connection.migration.reset();
        self.irqs.clear();
        Ended::Gone
    }
}

/// A client and the resources it has provided.
struct Connection<'a> {
    endpoint: &'a Endpoint,
    stream: &'a UnixStream,
    shape: Shape,
    session: &'a Session,
    dma: DmaMaps<'a>,
    migration: Migration<'a>,
    protocol: Protocol,
    /// Time of the first map change in an uninterrupted series. Clients send such a series without waiting for replies,
    /// so each message of it may have been in flight since then.
    series: Option<Instant>,
    /// Buffer for the message being sent, kept for its capacity.
    out: Vec<u8>,
    /// The reply carries the file that the client may map.
    lends: bool,
    /// Received descriptors with this number or a higher one are refused.
    descriptors: u64,
    /// Work that the writes of the current message have left, to be done after the reply.
    deferred: Deferred,
}

impl<'a> Connection<'a> {
    fn new(endpoint: &'a Endpoint, stream: &'a UnixStream, session: &'a Session) -> Self {
        Self {
            endpoint,
            stream,
            shape: Shape::of(&*endpoint.function, endpoint.intx, endpoint.mappable.as_ref()),
            session,
            dma: DmaMaps::new(endpoint, stream),
            migration: Migration::new(endpoint),
            protocol: Protocol::default(),
            series: None,
            out: Vec::new(),
            lends: false,
            descriptors: usable_descriptors(),
            deferred: Deferred::Nothing,
        }
    }

    /// Takes over a connection as another server has described it, and waits for the permission to serve it. Returns
    /// `false` if the other server keeps the client.
    fn adopt(&mut self, adoption: Adoption) -> bool {
        let Adoption { connection, outline, ready, go } = adoption;
        let prepared = self.prepare(connection, outline.as_ref());
        let adopted = prepared.is_ok();
        if !adopted {
            // This happens before the result is reported, because the caller may adopt the client again.
            self.dma.clear();
            self.endpoint.irqs.clear();
        }
        ready.send(prepared).is_ok() && adopted && go.recv().is_ok()
    }

    fn prepare(
        &mut self,
        connection: ClientConnection,
        outline: Option<&Outline>,
    ) -> Result<Option<String>, AdoptError> {
        // The socket belongs to the session.
        let ClientConnection { stream: _, negotiated, impatient, ranges, files, interrupts } = connection;
        for range in &ranges {
            self.dma.adopt(range, &files).map_err(|errno| AdoptError::Memory { address: range.address, errno })?;
        }
        self.endpoint.irqs.adopt(&self.shape, interrupts).map_err(AdoptError::Interrupts)?;
        self.endpoint.note_interrupts();
        let told = outline.map(|outline| self.endpoint.function.recover(outline));
        self.protocol = Protocol { negotiated, impatient };
        self.publish(&mut self.session.0.lock());
        // Last: a client without this note is not recovered if this process ends before all others are written.
        self.endpoint.note_function();
        self.endpoint.note_protocol(self.protocol);
        Ok(told.and_then(Result::err).map(|error| error.to_string()))
    }

    /// Records the result of the negotiation for a hand-over.
    const fn publish(&self, state: &mut SessionState) {
        if let Some(client) = &mut state.client {
            client.protocol = self.protocol;
        }
    }

    /// Serves the client until it disconnects or is given away.
    fn run(&mut self) {
        let mut receiver = Receiver::new(self.stream, Some(self.endpoint));
        let served = self.serve(&mut receiver);
        if self.session.0.lock().service == Service::Given {
            return;
        }
        if self.endpoint.memory.take_stalled() {
            self.endpoint.stats.counters.client_memory_slow.increment();
            self.endpoint.warn(
                module_path!(),
                format_args!(
                    "connection closed: accesses to guest memory waited for the client {STALLS} times in {} s",
                    REMEMBERED.as_secs()
                ),
            );
            return;
        }
        if self.dma.are_lost() {
            self.endpoint.stats.counters.client_memory_lost.increment();
            self.endpoint.warn(
                module_path!(),
                format_args!("connection closed: the client took guest memory away (its file is shorter)"),
            );
            return;
        }
        match served {
            Ok(()) => self.endpoint.info(module_path!(), format_args!("client disconnected")),
            Err(ConnectionError::Socket(error)) => {
                self.endpoint.info(module_path!(), format_args!("client disconnected ({error})"));
            }
            Err(error) => {
                // The counter is incremented before the connection is closed, so that a client that sees the end also
                // sees the count.
                self.endpoint.stats.counters.client_connections_broken.increment();
                self.endpoint.warn(module_path!(), format_args!("connection closed: {error}"));
            }
        }
    }

    fn serve(&mut self, receiver: &mut Receiver<'_>) -> Result<(), ConnectionError> {
        // Messages that are still in the socket when memory is lost are discarded.
        while !self.dma.are_lost()
            && let Some(seen) = receiver.wait()?
        {
            let mut state = self.session.0.lock();
            if state.service == Service::Given {
                return Ok(());
            }
            let message = receiver.receive(&seen)?;
            self.endpoint.stats.counters.client_messages.increment();
            self.handle(message, receiver.body())?;
            self.publish(&mut state);
        }
        Ok(())
    }

    /// Handles one message and replies unless the client set the no-reply flag.
    fn handle(&mut self, message: Message, body: &[u8]) -> Result<(), ConnectionError> {
        let Message { command, reply, fds, too_many_fds, refused, kind } = message;
        let result = match kind {
            MessageKind::Reply => {
                debug!("{}: a reply to nothing: {command:?}", self.endpoint.name);
                return Ok(());
            }
            MessageKind::Invalid => Err(Errno::INVAL),
            MessageKind::Request | MessageKind::Posted if too_many_fds => Err(Errno::INVAL),
            MessageKind::Request | MessageKind::Posted => match refused {
                Some(refusal) => Err(self.refuse(command, refusal)),
                None => Request::parse(command, body).and_then(|request| self.execute(&request, body, fds)),
            },
        };
        match (reply, result) {
            (Some(reply), Ok(())) => self.answer(reply, command)?,
            (Some(reply), Err(errno)) => {
                self.endpoint.stats.counters.client_messages_refused.increment();
                self.endpoint.warn(module_path!(), format_args!("{command:?} refused: {errno}"));
                reply.error(self.stream, errno)?;
            }
            (None, result) => {
                self.endpoint.stats.counters.client_messages_posted.increment();
                if let Err(errno) = result {
                    debug!("{}: posted {command:?} ignored: {errno}", self.endpoint.name);
                }
            }
        }
        std::mem::replace(&mut self.deferred, Deferred::Nothing).run(&*self.endpoint.function);
        Ok(())
    }

    /// Logs the reason for refusing a descriptor, and returns the error for the client.
    fn refuse(&self, command: Command, refusal: DescriptorError) -> Errno {
        if command == Command::DMA_MAP {
            self.dma.refuse(refusal, refusal.errno())
        } else {
            self.endpoint.warn(module_path!(), format_args!("{refusal}"));
            refusal.errno()
        }
    }

    fn answer(&mut self, reply: Reply, command: Command) -> Result<(), ConnectionError> {
        let received = reply.received();
        let since = if matches!(command, Command::DMA_MAP | Command::DMA_UNMAP) {
            *self.series.get_or_insert(received)
        } else {
            self.series = None;
            received
        };
        let spent = since.elapsed();
        if self.protocol.impatient && spent > self.endpoint.reply_deadline {
            // When a header without a body arrives late, the client ignores it. It would misread a body.
            match command {
                // The body only repeats the request, and this client does not read it.
                Command::DMA_UNMAP => self.out.truncate(HEADER_SIZE),
                _ if self.out.len() > HEADER_SIZE => {
                    return Err(ConnectionError::Late { command, millis: spent.as_millis() });
                }
                _ => {}
            }
        }
        let long = self.out.len() > ATOMIC_ANSWER;
        if long {
            self.endpoint.note_begin();
        }
        let lent = self.endpoint.mappable.as_ref().filter(|_| self.lends).map(AsFd::as_fd);
        reply.send(self.stream, &mut self.out, lent)?;
        if long {
            self.endpoint.note_end();
        }
        if self.out.capacity() > KEPT_BUFFER {
            self.out = Vec::new();
        }
        Ok(())
    }

    /// Executes a request and leaves the reply in `out`, with room for its header.
    // Long: one arm for each request.
    fn execute(&mut self, request: &Request<'_>, body: &[u8], fds: Vec<OwnedFd>) -> Result<(), Errno> {
        self.lends = false;
        self.out.clear();
        self.out.resize(HEADER_SIZE, 0);
        let takes_fds = matches!(request, Request::DmaMap(_) | Request::SetIrqs(_));
        if !takes_fds && !fds.is_empty() {
            return Err(Errno::INVAL);
        }
        // The kernel allocates the lowest free number, so this reserves the highest ones for the rest of the process.
        if fds.iter().any(|fd| u64::from(fd.as_raw_fd().unsigned_abs()) >= self.descriptors) {
            return Err(Errno::MFILE);
        }
        if !self.protocol.negotiated && !matches!(request, Request::Version(_)) {
            return Err(Errno::INVAL);
        }
        if !matches!(request, Request::DmaMap(_) | Request::DmaUnmap(_)) {
            self.dma.settle();
        }
        match *request {
            Request::Version(ref version) => self.negotiate(version),
            Request::DmaMap(ref map) => self.dma.map(map, fds),
            Request::DmaUnmap(ref unmap) => {
                let size = self.dma.unmap(unmap)?;
                self.put_unmap(unmap, size);
                Ok(())
            }
            Request::DeviceInfo => {
                self.shape.device_info(&mut self.out);
                Ok(())
            }
            Request::RegionInfo { index, room } => {
                self.lends = self.shape.region_info(index, room, &mut self.out)?;
                Ok(())
            }
            Request::IrqInfo(index) => self.shape.irq_info(index, &mut self.out),
            Request::SetIrqs(ref set) => {
                self.endpoint.irqs.set(&self.shape, set, fds)?;
                self.endpoint.note_interrupts();
                Ok(())
            }
            Request::RegionRead(access) => self.read(&access),
            Request::RegionWrite(access, data) => {
                let region = self.accessible(access.region)?;
                self.write(region, &access, data);
                self.put_access(&access);
                Ok(())
            }
            Request::RegionWriteMulti(ref multi) => {
                multi.writes().try_for_each(|(access, _)| self.accessible(access.region).map(|_| ()))?;
                for (access, data) in multi.writes() {
                    let region = self.shape.region(access.region)?;
                    self.write(region, &access, data);
                }
                self.out.extend((multi.writes().count() as u64).to_le_bytes());
                Ok(())
            }
            Request::DeviceReset => {
                self.endpoint.function.reset();
                self.endpoint.note_function();
                self.migration.reset();
                Ok(())
            }
            Request::Feature(feature) => {
                let done = self.migration.feature(feature, body, &mut self.out);
                // A restore has replaced the function's outline, or a refusal has reset it.
                self.endpoint.note_function();
                done
            }
            Request::MigDataRead(size) => self.migration.read(size, &mut self.out),
            Request::MigDataWrite(data) => self.migration.write(data),
        }
    }

    fn negotiate(&mut self, version: &Version<'_>) -> Result<(), Errno> {
        if self.protocol.negotiated || version.major != 0 {
            return Err(Errno::INVAL);
        }
        let offered = match version.data {
            // The protocol allows an absent body. All capabilities then have their defaults.
            [] => Value::Null,
            [json @ .., 0] => serde_json::from_slice(json).map_err(|_| Errno::INVAL)?,
            _ => return Err(Errno::INVAL),
        };
        // Only QEMU offers this capability, and of the known clients only QEMU has a reply timeout.
        let qemu = offered.pointer("/capabilities/write_multiple").is_some();
        self.endpoint
            .info(module_path!(), format_args!("client connected, {}", if qemu { "QEMU" } else { "not QEMU" }));
        debug!("{}: client speaks {}.{}: {offered}", self.endpoint.name, version.major, version.minor);
        self.protocol = Protocol { negotiated: true, impatient: qemu };
        self.endpoint.note_protocol(self.protocol);
        // Version 0.0, which every client accepts.
        self.out.extend([0; 4]);
        self.out.extend(CAPABILITIES);
        Ok(())
    }

    /// Returns a region that the client may access now.
    ///
    /// # Errors
    /// The region does not exist, or the device is paused and it is a BAR.
    fn accessible(&self, index: u32) -> Result<Region, Errno> {
        match self.shape.region(index)? {
            Region::Bar(_) if !self.migration.allows_bars() => Err(Errno::INVAL),
            region => Ok(region),
        }
    }

    fn read(&mut self, access: &RegionAccess) -> Result<(), Errno> {
        let region = self.accessible(access.region)?;
        let inside = self.shape.inside(region, access);
        self.put_access(access);
        let start = self.out.len();
        let count = usize::try_from(access.count).map_err(|_| Errno::INVAL)?;
        self.out.resize(start.saturating_add(count), 0);
        let data = self.out.get_mut(start..).and_then(|data| data.get_mut(..inside)).unwrap_or_default();
        if data.is_empty() {
            return Ok(());
        }
        match region {
            Region::Bar(bar) => self.endpoint.function.bar_read(bar, access.offset, data),
            Region::Config => {
                let offset = usize::try_from(access.offset).map_err(|_| Errno::INVAL)?;
                self.endpoint.function.config_read(offset, data);
            }
            Region::Empty => {}
        }
        Ok(())
    }

    fn write(&mut self, region: Region, access: &RegionAccess, data: &[u8]) {
        let data = data.get(..self.shape.inside(region, access)).unwrap_or_default();
        if data.is_empty() {
            return;
        }
        match region {
            Region::Bar(bar) => {
                let deferred = self.endpoint.function.bar_write(bar, access.offset, data);
                self.deferred = self.deferred.and(deferred);
                if self.endpoint.function.outline_bar() == Some(bar) {
                    self.endpoint.note_function();
                }
            }
            Region::Config => {
                if let Ok(offset) = usize::try_from(access.offset) {
                    self.endpoint.function.config_write(offset, data);
                    self.endpoint.note_function();
                }
            }
            Region::Empty => {}
        }
    }

    fn put_access(&mut self, access: &RegionAccess) {
        self.out.extend(access.offset.to_le_bytes());
        self.out.extend(access.region.to_le_bytes());
        self.out.extend(access.count.to_le_bytes());
    }

    fn put_unmap(&mut self, unmap: &DmaUnmap, size: u64) {
        self.out.extend(24u32.to_le_bytes());
        self.out.extend(unmap.flags.to_le_bytes());
        self.out.extend(unmap.address.to_le_bytes());
        self.out.extend(size.to_le_bytes());
    }
}

/// Upper bound (exclusive) for the numbers of clients' descriptors.
fn usable_descriptors() -> u64 {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    limit.saturating_sub(DESCRIPTORS_RESERVED)
}
