//! Addresses: those of the host, those of guests, and which of the host's stands for which of a guest.
//!
//! A guest binds the addresses of its network interface. Where the host's table has the same address, the host's index
//! of it is used, and peers see the guest's address. Otherwise one address of the host stands for the guest, and what
//! the guest calls a peer by is translated if that peer is a guest of this process, too.

mod fabric;
mod host;
mod table;

pub(crate) use fabric::{Bound, DatagramReceiver, Fabric, Member};
pub(crate) use host::{HostGid, HostGids};
pub(crate) use table::{GidTable, GivenAddresses};
