//! What tests of the daemon share (feature `testing`): the other end of a device's socket, two guests behind such, and
//! numbers at random.

mod dice;
mod pair;
mod remote_function;

pub use dice::Dice;
pub use pair::{Pair, beside_traffic, gid};
pub use remote_function::RemoteFunction;
