//! A worker that sends anything to its supervisor: frames, replies and requests. Also users of the control socket, with
//! any line.
#![no_main]

use std::io::Write;
use std::os::unix::net::UnixStream;

use libfuzzer_sys::fuzz_target;
use pvrdma_dev::Limits;
use pvrdmad::config::{DeviceSpec, NetworkSpec};
use pvrdmad::protocol::json_rpc::{self, Call};
use pvrdmad::protocol::{FrameReader, HostRequest, Incoming, MAX_HOST_REQUEST, Received, Reply, Request};
use rustix::net::sockopt::set_socket_send_buffer_size;
use serde_json::Value;

/// Maximum size of an input. The socket holds it without a reader.
const MAX_INPUT: usize = 64 << 10;

fuzz_target!(|data: &[u8]| {
    let Some((&mode, data)) = data.split_first() else { return };
    let data = &data[..data.len().min(MAX_INPUT)];
    control(data);
    // Saves the fuzzer from finding out how frames are built.
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

/// Checks a line of the control socket. An accepted one can be written again; a device is parsed as when it is added.
fn control(line: &[u8]) {
    match Call::parse_line(line).request() {
        Ok(request) => {
            assert!(!request.is_internal());
            let again = json_rpc::call(&request).unwrap();
            let parsed = Call::parse_line(&again).request().unwrap();
            assert_eq!(json_rpc::call(&parsed).unwrap(), again);
            match request {
                Request::AddDevice { device, network } => {
                    drop(device.parse::<DeviceSpec>());
                    drop(network.map(|network| network.parse::<NetworkSpec>()));
                }
                Request::Limits { set, .. } => {
                    let mut limits = Limits::default();
                    let before = limits;
                    match limits.set_all(&set) {
                        Ok(()) => limits.check().unwrap(),
                        Err(_) => assert_eq!(limits, before),
                    }
                }
                _ => {}
            }
        }
        Err(problem) => assert!(!problem.contains(char::is_control), "{problem:?}"),
    }
}

/// Parses a frame as each message that either socket carries.
fn content(frame: &[u8]) {
    let _ = HostRequest::parse(frame);
    let Ok(message) = serde_json::from_slice::<Incoming<'_>>(frame) else { return };
    match Reply::parse(message.body) {
        Ok(Reply::Ok(status)) => assert!(is_printable(&serde_json::to_value(status).unwrap())),
        Ok(Reply::Limits(limits)) => {
            assert!(limits.iter().all(|limit| !limit.name.contains(char::is_control)));
        }
        Ok(Reply::Error(problem)) => assert!(!problem.contains(char::is_control), "{problem:?}"),
        _ => {}
    }
}

/// Returns `true` if no text in `value` contains terminal control characters.
fn is_printable(value: &Value) -> bool {
    let plain = |text: &str| !text.contains(char::is_control);
    match value {
        Value::String(text) => plain(text),
        Value::Array(values) => values.iter().all(is_printable),
        Value::Object(members) => members.iter().all(|(name, member)| plain(name) && is_printable(member)),
        _ => true,
    }
}
