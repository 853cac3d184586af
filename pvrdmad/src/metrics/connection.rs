//! A connection of the metrics server: reads a request and writes a response, without ever blocking.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use rustix::event::PollFlags;

use super::request::{Format, MAX_HEAD, Verdict, judge, response_head};
use crate::status::classic;

#[derive(Debug)]
pub(super) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

/// Origin of a connection: a host, or a user of this host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Origin {
    /// An IPv4 address, or an IPv6 prefix of 64 bits, because a host usually controls all addresses of its prefix.
    Host(u128),
    User(u32),
}

impl Stream {
    fn origin(&self) -> io::Result<Origin> {
        Ok(match self {
            Self::Unix(stream) => Origin::User(rustix::net::sockopt::socket_peercred(stream)?.uid.as_raw()),
            Self::Tcp(stream) => Origin::Host(match stream.peer_addr()?.ip().to_canonical() {
                std::net::IpAddr::V4(address) => address.to_ipv6_mapped().to_bits(),
                std::net::IpAddr::V6(address) => address.to_bits() & (!0 << 64),
            }),
        })
    }

    fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.set_nonblocking(true),
            Self::Tcp(stream) => stream.set_nonblocking(true),
        }
    }

    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.read(bytes),
            Self::Tcp(stream) => stream.read(bytes),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.write(bytes),
            Self::Tcp(stream) => stream.write(bytes),
        }
    }
}

/// The metrics in each format.
#[derive(Clone, Debug)]
pub(super) struct Texts {
    openmetrics: Arc<str>,
    classic: Arc<str>,
}

impl Texts {
    /// Makes them from OpenMetrics.
    pub(super) fn new(openmetrics: String) -> Self {
        Self { classic: classic(&openmetrics).into(), openmetrics: openmetrics.into() }
    }

    const fn of(&self, format: Format) -> &Arc<str> {
        match format {
            Format::OpenMetrics => &self.openmetrics,
            Format::Classic => &self.classic,
        }
    }
}

/// The metrics, or the reason why there are none.
pub(super) type Text = Result<Texts, String>;

/// Stage of a connection.
#[derive(Debug)]
pub(super) enum Stage {
    /// The head of the request is being read; the bytes received so far.
    Reading(Vec<u8>),
    /// The connection waits for the metrics.
    Asked { body: bool, format: Format },
    /// The response is being written, from `at` on.
    Writing { head: String, body: Arc<str>, at: usize },
    /// The connection has ended.
    Done,
}

#[derive(Debug)]
pub(super) struct Connection {
    stream: Stream,
    pub(super) origin: Origin,
    pub(super) stage: Stage,
    /// It may be readable or writable.
    pub(super) ready: bool,
    pub(super) until: Instant,
}

impl Connection {
    /// # Errors
    /// The system does not report the origin of the connection.
    pub(super) fn new(stream: Stream, until: Instant) -> io::Result<Self> {
        stream.set_nonblocking()?;
        let origin = stream.origin()?;
        Ok(Self { stream, origin, stage: Stage::Reading(Vec::new()), ready: true, until })
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.stream {
            Stream::Unix(stream) => stream.as_fd(),
            Stream::Tcp(stream) => stream.as_fd(),
        }
    }

    /// Returns the events that let it continue. The end of the connection is always reported.
    pub(super) const fn flags(&self) -> PollFlags {
        match self.stage {
            Stage::Reading(_) => PollFlags::IN,
            Stage::Asked { .. } | Stage::Done => PollFlags::empty(),
            Stage::Writing { .. } => PollFlags::OUT,
        }
    }

    /// Returns `true` if its request is not complete yet.
    pub(super) const fn is_reading(&self) -> bool {
        matches!(self.stage, Stage::Reading(_))
    }

    /// Continues as far as possible without blocking.
    pub(super) fn step(&mut self) {
        if !std::mem::take(&mut self.ready) {
            return;
        }
        let stepped = match self.stage {
            Stage::Reading(_) => self.read(),
            Stage::Writing { .. } => self.write(),
            // The client has closed the connection.
            Stage::Asked { .. } => Err(io::ErrorKind::ConnectionReset.into()),
            Stage::Done => Ok(()),
        };
        match stepped {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                log::debug!("metrics: {error}");
                self.stage = Stage::Done;
            }
            Ok(()) => {}
        }
    }

    /// Reads until the head of the request is complete, or no more data is available.
    fn read(&mut self) -> io::Result<()> {
        let mut chunk = [0; 1024];
        while let Stage::Reading(head) = &mut self.stage {
            let room = MAX_HEAD.saturating_sub(head.len()).min(chunk.len());
            let count = match self.stream.read(chunk.get_mut(..room).unwrap_or_default())? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => count,
            };
            head.extend_from_slice(chunk.get(..count).unwrap_or_default());
            match judge(head) {
                None => {}
                Some(Verdict::Metrics { body, format }) => self.stage = Stage::Asked { body, format },
                Some(Verdict::Refused(status)) => return self.tell(status, "text/plain", Arc::from(""), true),
            }
        }
        Ok(())
    }

    /// Answers a waiting request with the metrics, or with the reason why there are none.
    pub(super) fn answer(&mut self, text: &Text) {
        let Stage::Asked { body, format } = self.stage else { return };
        let told = match text {
            Ok(texts) => self.tell("200 OK", format.media_type(), Arc::clone(texts.of(format)), body),
            Err(problem) => self.tell("503 Service Unavailable", "text/plain", Arc::from(format!("{problem}\n")), true),
        };
        if told.is_err_and(|error| error.kind() != io::ErrorKind::WouldBlock) {
            self.stage = Stage::Done;
        }
    }

    fn tell(&mut self, status: &str, kind: &str, body: Arc<str>, with_body: bool) -> io::Result<()> {
        let head = response_head(status, kind, body.len());
        let body = if with_body { body } else { Arc::from("") };
        self.stage = Stage::Writing { head, body, at: 0 };
        self.write()
    }

    fn write(&mut self) -> io::Result<()> {
        while let Stage::Writing { head, body, at } = &mut self.stage {
            let left = match head.as_bytes().get(*at..) {
                Some(left @ [_, ..]) => left,
                _ => body.as_bytes().get(at.saturating_sub(head.len())..).unwrap_or_default(),
            };
            if left.is_empty() {
                self.stage = Stage::Done;
                break;
            }
            *at = at.saturating_add(self.stream.write(left)?);
        }
        Ok(())
    }
}
