//! The transport on virtual time: two ends, a network with faults from a seed, and what a capture says about the peer.

#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod captured;
mod datagrams;
mod errors;
mod host;
mod hostile;
mod missing;
mod mixed;
mod net;
#[path = "../pcap/mod.rs"]
#[expect(dead_code, reason = "only single captures are read here")]
mod pcap;
