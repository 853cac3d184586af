use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_link::{Connector, Frames, Link, NoConnector};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;

fn frames(list: &[&[u8]]) -> Frames {
    let mut frames = Frames::default();
    for frame in list {
        frames.push(frame);
    }
    frames
}

fn received(link: &impl Link) -> Vec<Vec<u8>> {
    let mut got = Frames::default();
    link.receive(&mut got, 64);
    got.iter().map(<[u8]>::to_vec).collect()
}

/// A directory that is deleted with the test.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("rxe-link-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn the_format_of_a_stream() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let link = StreamLink::over(ours);
    assert_eq!(link.send(&frames(&[b"abc", b"", b"de"]), 0), 3);
    let mut bytes = [0; 17];
    theirs.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"\0\0\0\x03abc\0\0\0\0\0\0\0\x02de");
    // Written in pieces that do not match the frames.
    theirs.write_all(b"\0\0").unwrap();
    assert!(received(&link).is_empty());
    theirs.write_all(b"\0\x02xy\0\0\0\x01").unwrap();
    assert_eq!(received(&link), [b"xy"]);
    theirs.write_all(b"z\0\0\0\x01w").unwrap();
    let mut got = Frames::default();
    link.receive(&mut got, 1);
    assert_eq!(got.get(0), Some(&b"z"[..]));
    assert_eq!(link.readiness().wait, Some(std::time::Duration::ZERO), "a frame waits in the buffer");
    assert_eq!(received(&link), [b"w"]);
    assert_eq!(link.readiness().wait, None);
    // No frame has this length, so the peer does not use the protocol.
    theirs.write_all(&[0xff; 8]).unwrap();
    assert!(received(&link).is_empty());
    assert_eq!(link.send(&frames(&[b"lost"]), 0), 1);
    assert_eq!(link.lost(), 1);
    assert!(matches!(theirs.read(&mut [0; 8]), Ok(0) | Err(_)), "hung up");
}

#[test]
fn a_full_stream_takes_no_more_and_continues_where_it_was() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (link, peer) = (StreamLink::over(ours), StreamLink::over(theirs));
    let mut batch = Frames::default();
    for number in 0..5000_u32 {
        let mut frame = number.to_be_bytes().to_vec();
        frame.resize(4000, 7);
        batch.push(&frame);
    }
    let (mut sent, mut got) = (0, Frames::default());
    let first = link.send(&batch, 0);
    assert!(first < 5000, "the buffer cannot hold all");
    sent += first;
    while got.len() < 5000 {
        peer.receive(&mut got, 16);
        sent += link.send(&batch, sent);
    }
    assert!(got.iter().eq(batch.iter()));
    assert_eq!((link.lost(), peer.lost()), (0, 0));
}

#[test]
fn connections_come_and_go() {
    let directory = Directory::new("stream");
    let path = directory.0.join("socket");
    let server = StreamLink::listen(UnixListener::bind(&path).unwrap()).unwrap();
    let client = StreamLink::connect(path.clone());
    assert_eq!(client.send(&frames(&[b"no cable"]), 0), 1);
    assert_eq!(client.lost(), 1);
    for _ in 0..2 {
        assert!(received(&client).is_empty());
        assert!(received(&server).is_empty());
        client.send(&frames(&[b"up"]), 0);
        assert_eq!(received(&server), [b"up"]);
        server.send(&frames(&[b"down"]), 0);
        assert_eq!(received(&client), [b"down"]);
        // The other end closes; both links notice, and the next iteration connects again.
        client.connection().unwrap().end();
        assert!(received(&client).is_empty() && received(&server).is_empty());
    }
}

/// Sends until the link keeps the rest of a frame that found no room.
fn fill(link: &StreamLink, mut peer: &UnixStream) {
    let long = frames(&[&[7; 50_000]]);
    while !link.unsent() {
        if link.send(&long, 0) == 0 {
            // The socket is full between two frames.
            peer.read_exact(&mut [0; 1000]).unwrap();
        }
    }
}

/// A sender that still uses an ended connection does not affect the next one, and a thread that waits for it wakes up.
#[test]
fn unsent_data_belongs_to_its_connection() {
    let directory = Directory::new("left");
    let path = directory.0.join("socket");
    let link = StreamLink::listen(UnixListener::bind(&path).unwrap()).unwrap();
    let mut first = UnixStream::connect(&path).unwrap();
    assert!(received(&link).is_empty());
    fill(&link, &first);
    let (old, writable) = (link.connection().unwrap(), link.readiness().writable.unwrap());
    let wakes_up = || poll(&mut [PollFd::new(&*writable, PollFlags::OUT)], Some(&Timespec::default())).unwrap() > 0;
    assert!(!wakes_up(), "there is no room");
    // No frame has this length.
    first.write_all(&[0xff; 8]).unwrap();
    assert!(received(&link).is_empty());
    assert_eq!((link.lost(), link.unsent(), wakes_up()), (1, false, true));

    let second = UnixStream::connect(&path).unwrap();
    assert!(received(&link).is_empty());
    fill(&link, &second);
    // At this time there would be room.
    first.read_to_end(&mut Vec::new()).unwrap();
    assert!(old.send(&Frames::default(), 0).is_err(), "it has ended");
    assert!(link.unsent());
}

#[test]
fn datagrams_in_any_order_of_starting() {
    let directory = Directory::new("dgram");
    let path = |name: &str| directory.0.join(name);
    let open = |local: &str, remote: &str| {
        let _ = std::fs::remove_file(path(local));
        DatagramLink::new(UnixDatagram::bind(path(local)).unwrap(), path(remote)).unwrap()
    };
    let a = open("a", "b");
    assert_eq!(a.send(&frames(&[b"no peer"]), 0), 1);
    assert_eq!(a.lost(), 1);
    for _ in 0..2 {
        let b = open("b", "a");
        assert_eq!(b.send(&frames(&[b"back"]), 0), 1);
        assert_eq!(received(&a), [b"back"]);
        assert_eq!(a.send(&frames(&[b"one", b"two"]), 0), 2);
        assert_eq!(received(&b), [b"one", b"two"]);
    }
    assert_eq!(a.lost(), 1);
    // The reader does not read, so the rest stays with the sender.
    let b = open("b", "a");
    let many = frames(&[&[1_u8; 4096][..]; 4096]);
    let taken = a.send(&many, 0);
    assert!(taken > 0 && taken < many.len());
    assert!(!received(&b).is_empty());
    assert!(a.send(&many, taken) > 0);
}

/// Connector that provides one descriptor, once.
#[derive(Debug)]
struct Shelf(Mutex<Option<OwnedFd>>);

impl Shelf {
    fn of(descriptor: OwnedFd) -> Self {
        Self(Mutex::new(Some(descriptor)))
    }
}

impl Connector for Shelf {
    fn connect(&self) -> io::Result<OwnedFd> {
        self.0.lock().take().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

#[test]
fn a_frame_that_was_written_in_part_is_not_mixed_with_others() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (link, peer) = (StreamLink::over(ours), StreamLink::over(theirs));
    let numbered = |number: u32| {
        let mut frame = number.to_be_bytes().to_vec();
        frame.resize(50_000, 7);
        frame
    };
    let (mut number, mut unsent, mut got, mut expected) = (0_u32, 0, Vec::new(), Vec::new());
    // Each batch is offered once. Frames that the link does not take are never offered again.
    while number < 3000 {
        let batch: Vec<_> = (number..number + 5).map(numbered).collect();
        let taken = link.send(&frames(&batch.iter().map(Vec::as_slice).collect::<Vec<_>>()), 0);
        expected.extend((number..).take(taken));
        number += 5;
        unsent += usize::from(link.unsent());
        if link.unsent() || taken < 5 {
            got.extend(received(&peer));
        }
    }
    while link.unsent() {
        got.extend(received(&peer));
        assert_eq!(link.send(&Frames::default(), 0), 0);
    }
    while got.len() < expected.len() {
        got.extend(received(&peer));
    }
    assert!(unsent > 3, "the socket is full in the middle of a frame: {unsent}");
    assert!(got.iter().all(|frame| frame.len() == 50_000));
    let numbers: Vec<_> = got.iter().map(|frame| u32::from_be_bytes(*frame.first_chunk().unwrap())).collect();
    assert!(numbers == expected);
    assert_eq!(link.lost(), 0);
}

#[test]
fn descriptors_are_enough_without_paths() {
    let directory = Directory::new("given");
    let path = |name: &str| directory.0.join(name);
    let listener = UnixListener::bind(path("stream")).unwrap();
    let stream = Arc::new(Shelf::of(connect_stream(&path("stream")).unwrap()));
    let (a, b) = (UnixDatagram::bind(path("a")).unwrap(), UnixDatagram::bind(path("b")).unwrap());
    let to_b = Arc::new(Shelf::of(connect_datagram(&path("b")).unwrap()));
    let [a, b] = [a, b].map(|socket| ready_datagram(socket).unwrap());
    let listener = ready_listener(listener).unwrap();
    std::fs::remove_dir_all(&directory.0).unwrap();

    let server = StreamLink::from_listener(listener, path("stream"));
    let client = StreamLink::with_connector(stream, path("stream"));
    assert!(received(&client).is_empty() && received(&server).is_empty());
    assert_eq!(client.send(&frames(&[b"up"]), 0), 1);
    assert_eq!(received(&server), [b"up"]);
    assert_eq!(server.inspect().name, path("stream").display().to_string());

    let other = b.try_clone().unwrap();
    let a = DatagramLink::from_socket(a, path("a"), path("b"), to_b);
    let b = DatagramLink::from_socket(b, path("b"), path("a"), Arc::new(NoConnector));
    assert_eq!((a.send(&frames(&[b"one"]), 0), b.send(&frames(&[b"no way back"]), 0)), (1, 1));
    assert_eq!((received(&b), a.lost(), b.lost()), (vec![b"one".to_vec()], 0, 1));
    // The holder of the receiving socket cannot send from it, to any path.
    let somewhere = Directory::new("elsewhere");
    let target = UnixDatagram::bind(somewhere.0.join("target")).unwrap();
    let error = UnixDatagram::from(other).send_to(b"x", somewhere.0.join("target")).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    target.set_nonblocking(true).unwrap();
    assert_eq!(target.recv(&mut [0; 8]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
}

#[test]
fn a_listener_that_does_not_keep_up_is_not_waited_for() {
    let directory = Directory::new("busy");
    let path = directory.0.join("socket");
    let _listener = UnixListener::bind(&path).unwrap();
    let mut held = Vec::new();
    let error = loop {
        match connect_stream(&path) {
            Ok(socket) => held.push(socket),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "not one that is in progress");
}
