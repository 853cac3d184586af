//! An end of an iWARP connection on a TCP socket of this machine.

mod host;
pub(crate) mod rping;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pvrdma_iwarp::wire::fpdu;
use pvrdma_iwarp::{Close, Connection, End, Event, Limits, Negotiated, Stream, Tuning};
use pvrdma_verbs_types::{RemoteAddress, SendData, SendFlags, SendOp, SendWr, Sge, WcStatus};

use host::{Host, KEY};

/// Time for which the peer may send nothing.
const PATIENCE: Duration = Duration::from_secs(30);

/// Time between the reply of the peer and the first message of this end.
const REPLY_PAUSE: Duration = Duration::from_millis(500);

/// An end of a connection. It sends everything as soon as it is posted, and reads only while it waits.
pub(crate) struct IwarpPeer {
    tcp: TcpStream,
    connection: Connection,
    host: Host,
    started: Instant,
    negotiated: Negotiated,
}

impl IwarpPeer {
    /// Connects to a peer that listens.
    pub(crate) fn connect(tcp: TcpStream, limits: Limits, memory: usize) -> Result<Self> {
        let connection = Connection::initiate(Duration::ZERO, limits, Tuning::default(), b"")?;
        let mut peer = Self::new(tcp, connection, Host::new(memory))?;
        match peer.event()? {
            Event::Established { negotiated, .. } => peer.negotiated = negotiated,
            other => bail!("the peer does not accept: {other:?}"),
        }
        // After its reply, `siw` changes the callbacks of its socket. It misses data that arrives before that until
        // there is more data, and nothing shows when it is done.
        thread::sleep(REPLY_PAUSE);
        peer.send_all()?;
        Ok(peer)
    }

    /// Accepts the connection of a peer that connects.
    pub(crate) fn accept(tcp: TcpStream, limits: Limits, memory: usize) -> Result<Self> {
        let connection = Connection::respond(Duration::ZERO, Tuning::default());
        let mut peer = Self::new(tcp, connection, Host::new(memory))?;
        match peer.event()? {
            Event::Requested(_) => {}
            other => bail!("the peer does not connect: {other:?}"),
        }
        peer.negotiated = peer.connection.accept(limits, b"")?;
        peer.send_all()?;
        Ok(peer)
    }

    fn new(tcp: TcpStream, connection: Connection, host: Host) -> Result<Self> {
        tcp.set_nodelay(true)?;
        tcp.set_read_timeout(Some(PATIENCE))?;
        tcp.set_write_timeout(Some(PATIENCE))?;
        let negotiated = Negotiated { role: pvrdma_iwarp::Role::Initiator, crc: false, ird: 0, ord: 0, rtr: None };
        let mut peer = Self { tcp, connection, host, started: Instant::now(), negotiated };
        peer.send_all()?;
        Ok(peer)
    }

    /// Properties of the connection.
    pub(crate) const fn negotiated(&self) -> &Negotiated {
        &self.negotiated
    }

    /// Memory of this end. Its peer can access all of it.
    pub(crate) fn memory(&mut self, at: usize, length: usize) -> Result<&mut [u8]> {
        let end = at.checked_add(length).context("a range of memory")?;
        self.host.memory.get_mut(at..end).context("a range of memory")
    }

    /// The key by which the peer accesses it.
    pub(crate) const fn key() -> u32 {
        KEY
    }

    pub(crate) fn post_receive(&mut self, at: usize, length: usize) -> Result<()> {
        self.host.post_receive(sge(at, length)?);
        Ok(())
    }

    pub(crate) fn send(&mut self, at: usize, length: usize) -> Result<()> {
        self.post(SendOp::Send { data: SendData::None, to: None }, sge(at, length)?)
    }

    pub(crate) fn write(&mut self, remote: RemoteAddress, at: usize, length: usize) -> Result<()> {
        self.post(SendOp::Write { remote, immediate: None }, sge(at, length)?)
    }

    pub(crate) fn read(&mut self, remote: RemoteAddress, at: usize, length: usize) -> Result<()> {
        self.post(SendOp::Read { remote }, sge(at, length)?)
    }

    fn post(&mut self, op: SendOp, sge: Sge) -> Result<()> {
        let stream = self.connection.stream_mut().context("no connection")?;
        ensure!(stream.has_room(), "the send queue is full, or the connection has ended");
        let wr = SendWr { wr_id: 0, op, flags: SendFlags::SIGNALED, sges: vec![sge] };
        stream.post(wr, &mut self.host);
        self.send_all()
    }

    /// Waits until the oldest request is done.
    pub(crate) fn finished(&mut self) -> Result<WcStatus> {
        self.run(|peer| peer.host.finished.pop_front()).context("a request is not finished")
    }

    /// Waits for a SEND of the peer, and returns its length.
    pub(crate) fn received(&mut self) -> Result<u32> {
        self.run(|peer| peer.host.received.pop_front()).context("nothing is received")
    }

    /// Waits for the end of the connection, and closes it.
    pub(crate) fn end(mut self) -> Result<End> {
        let end = self.run(|peer| peer.connection.stream().and_then(Stream::end)).context("the connection stays")?;
        self.close()?;
        Ok(end)
    }

    /// Closes the connection in order.
    pub(crate) fn close(mut self) -> Result<()> {
        self.connection.flush(&mut self.host);
        self.send_all()?;
        if self.connection.close() == Some(Close::Finish) {
            // The peer may have reset the connection meanwhile.
            let _ = self.tcp.shutdown(Shutdown::Write);
            let _ = std::io::copy(&mut self.tcp, &mut std::io::sink());
        }
        Ok(())
    }

    fn event(&mut self) -> Result<Event> {
        self.run(|peer| peer.connection.poll_event())
    }

    /// Exchanges bytes until there is a result.
    fn run<T>(&mut self, mut result: impl FnMut(&mut Self) -> Option<T>) -> Result<T> {
        let mut bytes = vec![0; fpdu::MAX_FPDU];
        loop {
            if let Some(result) = result(self) {
                return Ok(result);
            }
            if let Some(end) = self.connection.stream().and_then(Stream::end) {
                bail!("the connection has ended: {end:?}, {:?}", self.host.refused);
            }
            // Not before the result is checked: the caller decides when the first message leaves.
            self.send_all()?;
            match self.tcp.read(&mut bytes) {
                Ok(0) => self.connection.peer_closed(&mut self.host),
                Ok(read) => {
                    let now = self.started.elapsed();
                    let used = self.connection.handle_bytes(now, &bytes[..read], &mut self.host);
                    ensure!(used == read, "a SEND arrives, and no receive is posted");
                }
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {
                    self.connection.reset(&mut self.host);
                }
                Err(error) => {
                    let state = self.connection.stream().map(Stream::inspect);
                    return Err(error).with_context(|| format!("the peer is silent: {state:?}"));
                }
            }
        }
    }

    /// Sends everything that can be sent.
    fn send_all(&mut self) -> Result<()> {
        let mut out = vec![0; fpdu::MAX_FPDU];
        while let Some(length) = self.connection.poll_transmit(&mut out, &mut self.host) {
            self.tcp.write_all(&out[..length]).context("the peer takes nothing")?;
            self.connection.taken(length, &mut self.host);
        }
        Ok(())
    }
}

fn sge(at: usize, length: usize) -> Result<Sge> {
    Ok(Sge { addr: at as u64, length: u32::try_from(length)?, lkey: KEY })
}
