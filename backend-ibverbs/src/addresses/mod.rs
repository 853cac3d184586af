//! Guests' addresses on the host's network interface, for as long as a guest has them.
//!
//! An address of a guest is a wish of an untrusted program. Only those in networks that the administrator names are put
//! on the interface, each alone (`/32` or `/128`), and not more than a few for each device. They carry a mark, by which
//! the next start finds what a daemon that was killed has left there.

mod netlink;
mod network;

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_verbs::{Gid, LogLimit};

use netlink::Netlink;
pub use network::Network;

/// What `ip address show` calls `proto 0x52`. The kernel's own end at 3.
const MARK: u8 = 0x52;
/// Addresses that one device may have on the interface.
pub(crate) const MAX_ADDED: usize = 16;

/// The interface of an adapter's port.
#[derive(Debug)]
pub(crate) struct HostAddresses {
    name: String,
    index: u32,
    networks: Vec<Network>,
    netlink: Mutex<Netlink>,
    log: LogLimit,
    /// Only one process may take what is marked for its own. The kernel forgets this name with the process.
    _only: UnixListener,
}

impl HostAddresses {
    /// Those of the interface called `name`, without what an earlier process has left there, and as GIDs what that was.
    ///
    /// # Errors
    /// There is no such interface, another process does the same on it, or it may not be changed.
    pub(crate) fn open(name: &str, networks: Vec<Network>) -> Result<(Arc<Self>, Vec<Gid>), String> {
        let path = format!("/sys/class/net/{name}/ifindex");
        let text = fs::read_to_string(&path).map_err(|error| format!("cannot read {path}: {error}"))?;
        let index = text.trim().parse().map_err(|_| format!("{path} is not a number"))?;
        let only = SocketAddr::from_abstract_name(format!("pvrdmad-addresses-{name}"))
            .and_then(|address| UnixListener::bind_addr(&address))
            .map_err(|error| match error.kind() {
                io::ErrorKind::AddrInUse => format!("another daemon puts guests' addresses on {name}"),
                _ => format!("the lock of {name}'s addresses: {error}"),
            })?;
        let problem = |error: io::Error| format!("the addresses of {name} cannot be changed: {error}");
        let mut netlink = Netlink::open().map_err(problem)?;
        let left = netlink.marked(index, MARK).map_err(problem)?;
        for &address in &left {
            // Log: at the start.
            log::info!("{name}: {address} is of a guest of an earlier process and is removed");
            netlink.remove(index, address).map_err(problem)?;
        }
        let netlink = Mutex::new(netlink);
        let left = left.into_iter().map(Gid::from).collect();
        let host = Self { name: name.to_owned(), index, networks, netlink, log: LogLimit::new(), _only: only };
        Ok((Arc::new(host), left))
    }

    /// Puts a guest's address on the interface if it is in one of the networks. `None` if not, or if it is there
    /// without us.
    pub(crate) fn add(self: &Arc<Self>, gid: Gid) -> Option<AddedAddress> {
        let address = IpAddr::V6(Ipv6Addr::from(gid.0)).to_canonical();
        if !self.networks.iter().any(|network| network.contains(address)) {
            return None;
        }
        match self.netlink.lock().add(self.index, address, MARK) {
            Ok(()) => Some(AddedAddress { host: Arc::clone(self), address }),
            Err(error) => {
                // Guests decide how often; the counter has them all.
                self.log.warn(&self.name, format_args!("the address {address} of a guest cannot be added: {error}"));
                None
            }
        }
    }
}

/// An address on the interface, removed when dropped.
#[derive(Debug)]
pub(crate) struct AddedAddress {
    host: Arc<HostAddresses>,
    address: IpAddr,
}

impl Drop for AddedAddress {
    fn drop(&mut self) {
        let Self { host, address } = self;
        if let Err(error) = host.netlink.lock().remove(host.index, *address) {
            host.log.warn(&host.name, format_args!("the address {address} of a guest cannot be removed: {error}"));
        }
    }
}
