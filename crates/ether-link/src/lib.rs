//! Ethernet links with sockets: the places where frames leave the process and enter it.
//!
//! The trait [`Link`], batches of [`Frames`], the [`switch`] and the links inside a process are those of `pvrdma-link`,
//! which this crate re-exports.
//!
//! Each kind of link is a Cargo feature, on by default. It has two halves. One needs privileges or paths: it opens,
//! binds and sets options. The other is the link, made `from_` the descriptors that the first half gave; from then on
//! it only reads, writes and waits. A [`Connector`] gives it a new descriptor for a connection that ended or an
//! interface that was deleted. `open`, `bind`, `listen` and `connect` do both at once, for a process that is allowed
//! to; [`link_spec`] names any kind in words.
//!
//! * [`af_packet`]: an interface of this host;
//! * [`unix`]: the socket back ends of QEMU, `stream` and `dgram`;
//! * [`vxlan`]: a tunnel through UDP;
//! * [`tls`]: a connection to another host, encrypted;
//! * [`tap`]: a virtual network interface of the host.
//!
//! [`InterfaceWatch`] tells whether an interface of this host carries anything.

#[cfg(feature = "af-packet")]
pub mod af_packet;
#[cfg(any(feature = "tls", feature = "unix"))]
mod framing;
mod interface_name;
#[cfg(feature = "interface-watch")]
mod interface_watch;
#[cfg(any(feature = "af-packet", feature = "tap", feature = "tls", feature = "unix", feature = "vxlan"))]
pub mod link_spec;
#[cfg(test)]
#[cfg(any(feature = "af-packet", feature = "interface-watch"))]
mod namespace;
#[cfg(feature = "tap")]
pub mod tap;
#[cfg(feature = "tls")]
pub mod tls;
#[cfg(feature = "unix")]
pub mod unix;
#[cfg(feature = "vxlan")]
pub mod vxlan;

use pvrdma_base::Counter;

pub use interface_name::InterfaceName;
#[cfg(feature = "interface-watch")]
pub use interface_watch::{InterfaceState, InterfaceWatch};
#[cfg(any(test, feature = "testing"))]
pub use pvrdma_link::testing;
pub use pvrdma_link::{
    Bell, Clock, Connector, Frames, GsoLink, Link, LinkInspect, LinkReader, LinkReceiver, MAX_LINK_FRAME, ManualClock,
    MonotonicClock, NoConnector, Offload, Readiness, fault, memory, switch,
};

/// Everything that the links of this crate count, at zero. A switch counts on its own
/// ([`pvrdma_link::all_counters`]).
pub fn all_counters() -> Vec<Counter> {
    let lists: &[fn() -> Vec<Counter>] = &[
        #[cfg(feature = "vxlan")]
        vxlan::all_counters,
        #[cfg(feature = "tls")]
        tls::all_counters,
    ];
    lists.iter().flat_map(|list| list()).collect()
}
