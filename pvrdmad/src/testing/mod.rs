//! Shared parts of the daemon's tests (feature `testing`): a client of a device's socket, two guests behind sockets,
//! random numbers, and attackers.

mod client;
mod dice;
mod no_load;
mod pair;
mod peer;
mod process;
mod remote_function;
mod targets;

pub use client::{Behind, HostileClient};
pub use dice::Dice;
pub use no_load::NO_LOAD;
pub use pair::{Pair, beside_traffic, gid};
pub use peer::HostilePeer;
pub use process::{HostileProcess, element};
pub use remote_function::RemoteFunction;
pub use targets::{PSN, Target, Targets};
