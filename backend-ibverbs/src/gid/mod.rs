//! Addresses: those of the host, those of guests, and the mapping between them.
//!
//! A guest binds the addresses of its network interface. If the host's table has the same address, the host's index of
//! it is used, and peers see the guest's address. Otherwise one address of the host is used for the guest, and the GID
//! by which the guest names a peer is translated if that peer is a guest of this process, too.

mod fabric;
mod given;
mod host;
mod ip;
mod table;

pub(crate) use fabric::{Bound, DatagramReceiver, Fabric, Member};
pub(crate) use given::GivenAddresses;
pub(crate) use host::{HostGid, HostGids};
pub(crate) use ip::{ip, is_confined};
pub(crate) use table::GidTable;
