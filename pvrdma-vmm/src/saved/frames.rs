//! Frames of a stream: a kind, a length, and a body of at most [`MAX_BODY`] bytes.

use std::io::{ErrorKind, Read, Write};

use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use prost::Message;

/// First bytes of a stream, with the version of its format.
const MAGIC: [u8; 8] = *b"PVMACH\x01\x00";
/// Maximum length of a body: a run of pages with its address.
pub(crate) const MAX_BODY: usize = (1 << 20) + 8;

/// Kind of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Kind {
    /// [`Hello`](super::messages::Hello): the machine and its host.
    Hello = 1,
    /// Guest address and bytes of a run of pages.
    Pages = 2,
    /// [`Processor`](super::messages::Processor), in the order of their numbers.
    Processor = 3,
    /// [`Controllers`](super::messages::Controllers).
    Controllers = 4,
    /// [`Ports`](super::messages::Ports): serial ports and the address register of the bus.
    Ports = 5,
    /// [`Slot`](super::messages::Slot), in the order of the bus.
    Slot = 6,
    /// A part of the network function's state.
    Network = 7,
    /// A part of the RDMA function's state.
    Rdma = 8,
    /// The end of the state. The body is empty, as in all frames below except [`Self::Refused`].
    End = 9,
    /// From a destination: its machine is the one of the hello.
    Accepted = 10,
    /// From a destination: it does not continue the machine. The body is the reason.
    Refused = 11,
    /// From a destination: the machine is complete, and waits for the commit.
    Ready = 12,
    /// From a source: the machine does not run there any more.
    Commit = 13,
    /// From a destination: the machine runs.
    Running = 14,
}

impl Kind {
    pub(super) fn new(code: u8) -> Option<Self> {
        use Kind::{Accepted, Commit, Ready, Refused, Running};
        use Kind::{Controllers, End, Hello, Network, Pages, Ports, Processor, Rdma, Slot};
        let state = [Hello, Pages, Processor, Controllers, Ports, Slot, Network, Rdma, End];
        let talk = [Accepted, Refused, Ready, Commit, Running];
        state.into_iter().chain(talk).find(|kind| *kind as u8 == code)
    }
}

/// Writes a stream.
#[derive(Debug)]
pub(crate) struct Sender<W> {
    to: W,
}

impl<W: Write> Sender<W> {
    /// Begins a stream.
    pub(crate) fn new(mut to: W) -> Result<Self> {
        to.write_all(&MAGIC).context("cannot write the state")?;
        Ok(Self { to })
    }

    /// Writes a frame whose body is a message.
    pub(crate) fn message(&mut self, kind: Kind, message: &impl Message) -> Result<()> {
        self.frame(kind, &[&message.encode_to_vec()])
    }

    /// Writes a frame, whose body consists of these parts, at once.
    pub(crate) fn frame(&mut self, kind: Kind, parts: &[&[u8]]) -> Result<()> {
        let length = parts.iter().map(|part| part.len()).sum::<usize>();
        ensure!(length <= MAX_BODY, "a frame of {length} bytes");
        let [a, b, c, d] = u32::try_from(length)?.to_le_bytes();
        let head = [kind as u8, a, b, c, d];
        let frame = [&[&head[..]], parts].concat().concat();
        self.to.write_all(&frame).context("cannot write the state")
    }

    /// Writes bytes as any number of frames.
    pub(crate) fn bytes(&mut self, kind: Kind, bytes: &[u8]) -> Result<()> {
        bytes.chunks(MAX_BODY).try_for_each(|part| self.frame(kind, &[part]))
    }

    /// Writes a frame without a body, and makes the output pass on all that it has kept.
    pub(crate) fn last(&mut self, kind: Kind) -> Result<()> {
        self.frame(kind, &[])?;
        self.flush()
    }

    /// Makes the output pass on all that it has kept.
    pub(crate) fn flush(&mut self) -> Result<()> {
        self.to.flush().context("cannot write the state")
    }

    /// Writes the end and returns the output.
    pub(crate) fn finish(mut self) -> Result<W> {
        self.last(Kind::End)?;
        Ok(self.to)
    }
}

/// Reads a stream, which may come from anywhere. One frame is in memory at a time.
#[derive(Debug)]
pub(crate) struct Receiver<R> {
    from: R,
    body: Vec<u8>,
}

impl<R: Read> Receiver<R> {
    /// Reads the beginning of a stream.
    pub(crate) fn new(mut from: R) -> Result<Self> {
        let mut magic = [0; MAGIC.len()];
        read_exact(&mut from, &mut magic)?;
        let ([start @ .., version, _], [ours @ .., our_version, _]) = (magic, MAGIC);
        ensure!(start == ours, "this is no saved machine");
        ensure!(version == our_version, "the state has format {version}, this program reads format {our_version}");
        Ok(Self { from, body: Vec::new() })
    }

    /// Reads the next frame.
    pub(crate) fn next(&mut self) -> Result<(Kind, &[u8])> {
        let mut head = [0; 5];
        read_exact(&mut self.from, &mut head)?;
        let [code, length @ ..] = head;
        let kind = Kind::new(code).with_context(|| format!("the state has a frame of kind {code}"))?;
        let length = u32::from_le_bytes(length);
        let bytes = usize::try_from(length).ok().filter(|bytes| *bytes <= MAX_BODY);
        let bytes = bytes.with_context(|| format!("the state has a frame of {length} bytes"))?;
        self.body.resize(bytes, 0);
        read_exact(&mut self.from, &mut self.body)?;
        Ok((kind, &self.body))
    }

    /// Reads the next frame, which must be a message of this kind.
    pub(crate) fn expect<M: Message + Default>(&mut self, kind: Kind) -> Result<M> {
        match self.next()? {
            (found, body) if found == kind => decode(kind, body),
            (found, _) => bail!("the state has a frame {found:?} in place of {kind:?}"),
        }
    }
}

fn read_exact(from: &mut impl Read, bytes: &mut [u8]) -> Result<()> {
    from.read_exact(bytes).map_err(|error| match error.kind() {
        ErrorKind::UnexpectedEof => anyhow!("the state is truncated"),
        _ => Error::from(error).context("cannot read the state"),
    })
}

/// Decodes a message.
pub(crate) fn decode<M: Message + Default>(kind: Kind, body: &[u8]) -> Result<M> {
    M::decode(body).with_context(|| format!("the frame {kind:?} of the state is malformed"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::saved::messages::Slot;

    fn stream() -> Vec<u8> {
        let mut sender = Sender::new(Vec::new()).unwrap();
        sender.message(Kind::Slot, &Slot { number: 7, ..Slot::default() }).unwrap();
        sender.bytes(Kind::Rdma, &vec![1; MAX_BODY + 1]).unwrap();
        sender.finish().unwrap()
    }

    fn refusal(stream: &[u8]) -> String {
        let mut receiver = match Receiver::new(stream) {
            Ok(receiver) => receiver,
            Err(error) => return format!("{error:#}"),
        };
        loop {
            match receiver.next() {
                Ok((Kind::End, _)) => return String::new(),
                Ok(_) => {}
                Err(error) => return format!("{error:#}"),
            }
        }
    }

    #[test]
    fn frames_arrive_as_they_were_sent() {
        let stream = stream();
        let mut receiver = Receiver::new(&stream[..]).unwrap();
        assert_eq!(receiver.expect::<Slot>(Kind::Slot).unwrap().number, 7);
        let mut lengths = Vec::new();
        while let (Kind::Rdma, body) = receiver.next().unwrap() {
            lengths.push(body.len());
        }
        assert_eq!((lengths, receiver.from.len()), (vec![MAX_BODY, 1], 0));
        assert!(Sender::new(Vec::new()).unwrap().frame(Kind::Pages, &[&[0; MAX_BODY], &[0]]).is_err());
    }

    #[test]
    fn damaged_streams_are_refused() {
        let stream = stream();
        for end in [0, 7, 8, 12, 13, 20, stream.len() - 1] {
            assert!(refusal(&stream[..end]).contains("truncated"), "{end}");
        }
        for (at, value, what) in
            [(0, 0, "no saved machine"), (6, 9, "format 9"), (8, 0, "kind 0"), (8, 15, "kind 15"), (12, 0xff, "bytes")]
        {
            let mut stream = stream.clone();
            stream[at] = value;
            assert!(refusal(&stream).contains(what), "{what}: {}", refusal(&stream));
        }
        let mut receiver = Receiver::new(&stream[..]).unwrap();
        let error = receiver.expect::<Slot>(Kind::Hello).unwrap_err();
        assert!(error.to_string().contains("Slot in place of Hello"), "{error}");
        assert!(decode::<Slot>(Kind::Slot, &[0xff]).is_err());
    }
}
