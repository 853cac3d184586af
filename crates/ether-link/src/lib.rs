//! Ethernet links with sockets, through which frames leave and enter the process.
//!
//! The trait [`Link`](pvrdma_link::Link), batches of [`Frames`](pvrdma_link::Frames), the
//! [`switch`](pvrdma_link::switch) and the links inside a process are those of `pvrdma-link`.
//!
//! Each kind of link is a Cargo feature, enabled by default, and has two halves. The first half needs privileges or
//! paths: it opens and binds sockets and sets options. The second half is the link. A `from_` function creates it from
//! the descriptors of the first half; from then on it only reads, writes and waits. A
//! [`Connector`](pvrdma_link::Connector) provides a new descriptor for a connection that ended or an interface that was
//! deleted. `open`, `bind`, `listen` and `connect` do both halves at once, for a process with the necessary rights.
//! [`link_spec`] parses the textual description of any kind of link.
//!
//! * [`af_packet`]: an interface of this host;
//! * [`backup`]: two links, of which one replaces the other;
//! * [`unix`]: QEMU's socket back ends `stream` and `dgram`;
//! * [`vxlan`]: a tunnel over UDP;
//! * [`tls`]: an encrypted connection to another host;
//! * [`tap`]: a virtual network interface of the host.
//!
//! [`InterfaceWatch`] reports whether an interface of this host has a carrier.
//!
//! # Example
//!
//! One end of a cable between two processes, described as on a command line:
//!
//! ```
//! # #[cfg(feature = "unix")] {
//! use pvrdma_ether_link::link_spec::LinkSpec;
//! use pvrdma_link::{Frames, Link};
//!
//! let directory = tempfile::tempdir()?;
//! let [a, b] = ["a", "b"].map(|name| directory.path().join(name).display().to_string());
//! let this: LinkSpec = format!("unix-dgram:{a}:{b}").parse()?;
//! let other: LinkSpec = format!("unix-dgram:{b}:{a}").parse()?;
//! let (this, other) = (this.open()?, other.open()?);
//!
//! let mut frames = Frames::default();
//! frames.push(&[0xff; 60]);
//! assert_eq!(this.send(&frames, 0), 1);
//!
//! let mut received = Frames::default();
//! other.receive(&mut received, 64);
//! assert_eq!(received.get(0), frames.get(0));
//! # }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#[cfg(feature = "af-packet")]
pub mod af_packet;
#[cfg(feature = "af-packet")]
pub mod backup;
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

/// Returns all counters of the links of this crate, at zero. A switch has its own counters
/// ([`pvrdma_link::all_counters`]).
pub fn all_counters() -> Vec<Counter> {
    let lists: &[fn() -> Vec<Counter>] = &[
        #[cfg(feature = "af-packet")]
        backup::all_counters,
        #[cfg(feature = "vxlan")]
        vxlan::all_counters,
        #[cfg(feature = "tls")]
        tls::all_counters,
    ];
    lists.iter().flat_map(|list| list()).collect()
}
