//! A worker that says anything to its supervisor: frames, replies and requests of its own.
#![no_main]

use std::io::Write;
use std::os::unix::net::UnixStream;

use libfuzzer_sys::fuzz_target;
use pvrdmad::protocol::{FrameReader, HostRequest, Incoming, MAX_HOST_REQUEST, Received, Reply};
use rustix::net::sockopt::set_socket_send_buffer_size;
use serde_json::Value;

/// Bytes of an input. The socket takes them all before anybody reads.
const MAX_INPUT: usize = 64 << 10;

fuzz_target!(|data: &[u8]| {
    let Some((&mode, data)) = data.split_first() else { return };
    let data = &data[..data.len().min(MAX_INPUT)];
    // Without the work of finding out how frames are made.
    if mode & 1 == 0 {
        content(data);
        return;
    }
    let (worker, supervisor) = UnixStream::pair().unwrap();
    set_socket_send_buffer_size(&worker, 2 * MAX_INPUT).unwrap();
    supervisor.set_nonblocking(true).unwrap();
    let mut reader = FrameReader::new();
    let most = if mode & 2 == 0 { MAX_HOST_REQUEST } else { MAX_INPUT };
    // In pieces, as the bits say.
    for piece in data.chunks(usize::from(mode >> 2).max(1) * 16) {
        (&worker).write_all(piece).unwrap();
        loop {
            match reader.receive(&supervisor, most) {
                Ok(Received::Frame(frame)) => {
                    assert!(frame.body.len() <= most && frame.fds.is_empty());
                    content(&frame.body);
                }
                Ok(Received::Pending) => break,
                Ok(Received::Closed) | Err(_) => return,
            }
        }
    }
    drop(worker);
    assert!(!matches!(reader.receive(&supervisor, most), Ok(Received::Pending)));
});

/// What is in a frame, on either socket.
fn content(frame: &[u8]) {
    let _ = HostRequest::parse(frame);
    let Ok(message) = serde_json::from_slice::<Incoming<'_>>(frame) else { return };
    match Reply::parse(message.body) {
        Ok(Reply::Ok(status)) => assert!(is_printable(&serde_json::to_value(status).unwrap())),
        Ok(Reply::Error(problem)) => assert!(!problem.contains(char::is_control), "{problem:?}"),
        _ => {}
    }
}

/// Returns `true` if no text in `value` has what a terminal obeys.
fn is_printable(value: &Value) -> bool {
    let plain = |text: &str| !text.contains(char::is_control);
    match value {
        Value::String(text) => plain(text),
        Value::Array(values) => values.iter().all(is_printable),
        Value::Object(members) => members.iter().all(|(name, member)| plain(name) && is_printable(member)),
        _ => true,
    }
}
