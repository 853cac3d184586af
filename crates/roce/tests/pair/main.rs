//! The transport in virtual time: two endpoints, a network with faults from a seed, and captured packets of another
//! implementation.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

mod bottleneck;
mod captured;
mod datagrams;
mod dumbbell;
mod errors;
mod fabric;
mod flow;
mod forged;
mod forger;
mod held;
mod host;
mod hostile;
mod inspect;
mod lost_buffer;
mod missing;
mod mixed;
mod msn;
mod multipath;
mod net;
mod pcap;
mod reads;
mod refused;
mod saved;
mod simulation;
mod slow_line;
mod strict;
mod without_icrc;
