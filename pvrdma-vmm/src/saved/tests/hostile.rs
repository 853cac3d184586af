//! Ends that violate the protocol.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::*;
use crate::saved::frames::{MAX_BODY, Sender};

/// Returns the reason for which a source keeps its machine, if the destination answers with these frames.
fn stays(answers: &[(Kind, &[u8])]) -> String {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut sender = Sender::new(Vec::new()).unwrap();
    answers.iter().for_each(|(kind, body)| sender.frame(*kind, &[body]).unwrap());
    let mut answers = sender.finish().unwrap();
    // The end of the list is no frame.
    answers.truncate(answers.len() - 5);
    let destination = thread::spawn(move || {
        theirs.write_all(&answers).unwrap();
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        theirs.read_to_end(&mut Vec::new()).unwrap();
    });
    let test = Move::new(&[1500]);
    let left = test.source(test.link(ours));
    destination.join().unwrap();
    match left {
        AtSource::Stays(error) | AtSource::Unknown(error) => error,
        AtSource::Moved => panic!("moved"),
    }
}

#[test]
fn a_source_needs_each_answer_in_its_turn() {
    let accepted: (Kind, &[u8]) = (Kind::Accepted, &[]);
    let no_mac = "the state has mac [1]\u{7}".as_bytes();
    for (answers, reason) in [
        (&[][..], "no answer of the destination: the state is truncated"),
        (&[(Kind::Ready, &[][..])], "answers Ready in place of Accepted"),
        (&[(Kind::Refused, no_mac)], "the destination refuses: the state has mac [1]"),
        (&[accepted], "no answer of the destination"),
        (&[accepted, (Kind::Running, &[])], "answers Running in place of Ready"),
        (&[accepted, (Kind::Refused, b"no memory")], "the destination refuses: no memory"),
        (&[accepted, (Kind::Ready, &[]), accepted], "answers Accepted in place of Running"),
    ] {
        let error = stays(answers);
        assert!(error.contains(reason), "{reason}: {error}");
        assert!(!error.contains('\u{7}'), "{error}");
    }
    let long = stays(&[(Kind::Refused, &[b'x'; MAX_BODY])]);
    assert!(long.len() < 600, "{}", long.len());
}

/// A destination that closes the connection while memory arrives has said why.
#[test]
fn a_reason_arrives_although_the_connection_is_closed() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let destination = thread::spawn(move || {
        let mut arrival = Arrival::new(Link::new(theirs, LONG, Arc::default()).unwrap()).unwrap();
        let small = crate::memory::allocate(1 << 20).unwrap();
        let error = arrival.read(&small).unwrap_err();
        arrival.refuse(&error);
    });
    let test = Move::new(&[2000; 10]);
    let AtSource::Stays(error) = test.source(test.link(ours)) else { panic!("moved") };
    destination.join().unwrap();
    assert!(error.contains("the destination refuses: ") && error.contains("where the machine has none"), "{error}");
}

#[test]
fn a_silent_end_is_not_waited_for_longer_than_the_limit() {
    let (ours, _silent) = UnixStream::pair().unwrap();
    let test = Move::new(&[]);
    let link = test.link(ours);
    link.limit(Duration::from_millis(1));
    let AtSource::Stays(error) = test.source(link) else { panic!("moved") };
    assert!(error.contains("the time for the migration is over"), "{error}");
    let (ours, _silent) = UnixStream::pair().unwrap();
    let link = Link::new(ours, Duration::from_millis(1), Arc::default()).unwrap();
    let error = format!("{:#}", arrive(link).unwrap_err());
    assert!(error.contains("the time for the migration is over"), "{error}");
}

/// Records all that a source sends.
fn recorded() -> Vec<u8> {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut answers = Sender::new(Vec::new()).unwrap();
    [Kind::Accepted, Kind::Ready, Kind::Running].iter().for_each(|kind| answers.last(*kind).unwrap());
    let mut answers = answers.finish().unwrap();
    answers.truncate(answers.len() - 5);
    let recorder = thread::spawn(move || {
        theirs.write_all(&answers).unwrap();
        let mut stream = Vec::new();
        theirs.read_to_end(&mut stream).unwrap();
        stream
    });
    let test = Move::new(&[]);
    let left = test.source(test.link(ours));
    assert!(matches!(left, AtSource::Moved), "{left:?}");
    recorder.join().unwrap()
}

/// Feeds a stream to a destination, and then ends it.
fn feed(stream: &[u8]) -> Result<GuestMemoryMmap> {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let link = Link::new(ours, LONG, Arc::default()).unwrap();
    let destination = thread::spawn(move || {
        let memory = crate::memory::allocate(MEMORY)?;
        let mut arrival = Arrival::new(link)?;
        arrival.read(&memory)?;
        arrival.wait_for_commit()?;
        Ok(memory)
    });
    // The destination may have closed the connection.
    let _ = theirs.write_all(stream);
    let _ = theirs.shutdown(std::net::Shutdown::Write);
    destination.join().unwrap()
}

#[test]
fn a_damaged_stream_runs_nothing() {
    let stream = recorded();
    feed(&stream).unwrap();
    let commit = stream.len() - 5;
    for end in (0..stream.len()).step_by(611).chain(commit - 20..stream.len()) {
        assert!(feed(&stream[..end]).is_err(), "{end}");
    }
    // Whatever becomes of the other bytes, without a commit nothing runs.
    for at in (0..200).chain((200..commit).step_by(97)).chain(commit - 20..commit) {
        for value in [0, 1, 0x0d, 0xff] {
            let mut stream = stream[..commit].to_vec();
            stream[at] = value;
            assert!(feed(&stream).is_err(), "{value} at {at}");
        }
    }
    for (code, reason) in [(Kind::End as u8, "sends End in place of a commit"), (0xff, "kind 255")] {
        let mut stream = stream.clone();
        stream[commit] = code;
        let error = format!("{:#}", feed(&stream).unwrap_err());
        assert!(error.contains(reason), "{error}");
    }
}
