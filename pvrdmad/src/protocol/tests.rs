use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use pvrdma_dev::ObjectKind;
use serde_json::json;

use super::frame::{MAX_DESCRIPTORS, encode, send};
use super::*;

fn pair() -> [UnixStream; 2] {
    let (a, b) = UnixStream::pair().unwrap();
    [a, b]
}

#[track_caller]
fn frame(received: Received) -> Frame {
    match received {
        Received::Frame(frame) => frame,
        other => panic!("{other:?}"),
    }
}

#[test]
fn frames_are_unchanged_however_they_are_cut() {
    let [a, b] = pair();
    b.set_nonblocking(true).unwrap();
    let mut reader = FrameReader::new();
    let bytes = [encode(&json!({"a": 1})).unwrap(), encode(&"").unwrap()].concat();
    let mut whole = Vec::new();
    for byte in &bytes {
        assert!(matches!(reader.receive(&b, 100), Ok(Received::Pending)));
        (&a).write_all(&[*byte]).unwrap();
        if let Received::Frame(frame) = reader.receive(&b, 100).unwrap() {
            whole.push(String::from_utf8(frame.body).unwrap());
        }
    }
    assert_eq!(whole, ["{\"a\":1}", "\"\""]);
    // Many frames also arrive in one piece.
    (&a).write_all(&bytes.repeat(50)).unwrap();
    (0..100).for_each(|_| drop(frame(reader.receive(&b, 100).unwrap())));
    drop(a);
    assert!(matches!(reader.receive(&b, 100), Ok(Received::Closed)));
}

#[test]
fn an_announced_length_takes_no_memory_before_the_data() {
    let [a, b] = pair();
    b.set_nonblocking(true).unwrap();
    let mut reader = FrameReader::new();
    (&a).write_all(&u32::MAX.to_le_bytes()).unwrap();
    assert!(matches!(reader.receive(&b, 1 << 20), Err(FrameError::TooLong { most: 0x10_0000, .. })));
    let mut reader = FrameReader::new();
    (&a).write_all(&(1_u32 << 30).to_le_bytes()).unwrap();
    (&a).write_all(b"[").unwrap();
    assert!(matches!(reader.receive(&b, 1 << 30), Ok(Received::Pending)));
    assert!(reader.held() <= 128 << 10, "{}", reader.held());
}

#[test]
fn a_stream_that_ends_inside_a_frame() {
    for cut in [1, 3, 4, 5, 10] {
        let [a, b] = pair();
        let bytes = encode(&json!({"a": 1})).unwrap();
        (&a).write_all(&bytes[..cut]).unwrap();
        drop(a);
        assert!(matches!(FrameReader::new().receive(&b, 100), Err(FrameError::Cut)), "{cut}");
    }
}

#[test]
fn descriptors_belong_to_their_frame() {
    let [a, b] = pair();
    let mut reader = FrameReader::with_descriptors();
    let many = vec![a.as_fd(); MAX_DESCRIPTORS];
    for fds in [&many[..2], &[], &many] {
        send(&a, &encode(&fds.len()).unwrap(), fds).unwrap();
    }
    for count in [2, 0, MAX_DESCRIPTORS] {
        let frame = frame(reader.receive(&b, 100).unwrap());
        assert_eq!((frame.body, frame.fds.len()), (count.to_string().into_bytes(), count));
    }
    assert!(send(&a, b"x", &[a.as_fd(); MAX_DESCRIPTORS + 1]).is_err());
}

#[test]
fn unexpected_descriptors_end_the_connection() {
    let [a, b] = pair();
    let (mut reader, writer) = std::io::pipe().unwrap();
    send(&a, &encode(&1).unwrap(), &[writer.as_fd(); 3]).unwrap();
    assert!(matches!(FrameReader::new().receive(&b, 100), Err(FrameError::Descriptors)));
    drop(writer);
    // The pipe reports its end only when all descriptors of its other end are closed.
    assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    // Descriptors with each byte of a frame are refused as well.
    let [a, b] = pair();
    let mut reader = FrameReader::with_descriptors();
    for byte in 100_u32.to_le_bytes() {
        send(&a, &[byte], &[a.as_fd(); MAX_DESCRIPTORS]).unwrap();
    }
    assert!(matches!(reader.receive(&b, 100), Err(FrameError::Descriptors)));
}

#[test]
fn requests_are_those_of_the_control_socket() {
    let request: Request = serde_json::from_value(json!({"request": "status"})).unwrap();
    assert!(matches!(request, Request::Status { .. }) && !request.is_internal());
    let request = json!({"request": "show", "device": "vm0", "object": "qp"});
    let request: Request = serde_json::from_value(request).unwrap();
    assert!(matches!(&request, Request::Show { object: ObjectKind::Qp, .. }));
    assert!(request.max_reply(1) > Request::Status { describe: true }.max_reply(100));
    let request = json!({"request": "remove-device", "device": "vm0"});
    let remove: Request = serde_json::from_value(request).unwrap();
    assert!(!remove.is_internal() && remove.is_answered_by::<()>(&Reply::Done {}));
    assert!(!remove.is_answered_by::<()>(&Reply::Capturing {}));
    for wrong in [json!({"request": "status", "x": 1}), json!({"request": "stop"}), json!({}), json!([1])] {
        assert!(serde_json::from_value::<Request>(wrong.clone()).is_err(), "{wrong}");
    }
}

#[test]
fn requests_of_workers_are_as_long_as_is_taken() {
    let longest = HostRequest::ClientConnected { device: "\u{1}".repeat(32) };
    let frame = encode(&Outgoing { id: u64::MAX, body: &longest }).unwrap();
    assert!(frame.len() <= MAX_HOST_REQUEST, "{}", frame.len());
    for wrong in [json!({"host": "connect", "device": 7}), json!({"host": "exec"}), json!({"host": "connect", "x": 1})]
    {
        assert!(serde_json::from_value::<HostRequest>(wrong.clone()).is_err(), "{wrong}");
    }
}
