//! Connections over TCP sockets of the kernel, on the loopback interface. The adapter in `endpoint` is the whole
//! distance between a socket and a [`Connection`](pvrdma_iwarp::Connection).

#![expect(clippy::disallowed_types, reason = "the sockets of the adapter")]

mod bad_input;
mod bad_startup;
mod endpoint;
mod peer;
mod startup;
mod transfers;

use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use pvrdma_iwarp::{Limits, Tuning};

const START: Duration = Duration::from_secs(100);
const LIMITS: Limits = Limits { ird: 16, ord: 16, crc: true };

/// Two connected sockets: of the end that connected, and of the one that accepted.
fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let connected = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (connected, listener.accept().unwrap().0)
}

fn tuning() -> Tuning {
    Tuning::default()
}
