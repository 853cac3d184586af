//! Guests' addresses on the host's network interface, present while a guest uses them.
//!
//! A guest is an untrusted source of addresses. Only addresses in networks that the administrator names are added to
//! the interface, each as a single address (`/32` or `/128`), and only a few per device. They carry a mark, by which
//! the next start finds addresses that a killed daemon has left.
//!
//! Changing an interface takes privileges that the process with the guests does not need: the creator of the backend
//! passes an [`AddressOwner`], which may be in another process. [`HostAddresses`] changes the interface itself.

mod netlink;

use std::fmt;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::Arc;

use parking_lot::Mutex;
use pvrdma_base::LogLimit;
use pvrdma_verbs::Network;
use pvrdma_verbs_types::Gid;

use netlink::Netlink;

/// Mark of the addresses, shown by `ip address show` as `proto 0x52`. The kernel's own values end at 3.
const MARK: u8 = 0x52;
/// Maximum number of addresses that one device may have on the interface.
pub const MAX_ADDRESSES: usize = 16;

/// Limited, because guests decide how often addresses change. The counters count all changes.
static LOG: LogLimit = LogLimit::new();

/// Manages addresses of guests on the host's interface.
pub trait AddressOwner: Send + Sync + fmt::Debug {
    /// Adds an address to the interface.
    ///
    /// # Errors
    /// The address is in none of the configured networks, it exists already, or the kernel refuses.
    fn add(&self, address: IpAddr) -> io::Result<()>;

    /// Removes an address.
    ///
    /// # Errors
    /// The address does not exist, or the kernel refuses.
    fn remove(&self, address: IpAddr) -> io::Result<()>;
}

/// Addresses on the interface of an adapter's port.
#[derive(Debug)]
pub struct HostAddresses {
    name: String,
    index: u32,
    networks: Vec<Network>,
    netlink: Mutex<Netlink>,
    /// Guards the mark: only one process may treat marked addresses as its own. The kernel releases this name when the
    /// process ends.
    _only: UnixListener,
}

impl HostAddresses {
    /// Opens the interface called `name`, and removes the addresses that an earlier process has left there. Returns
    /// those as GIDs.
    ///
    /// # Errors
    /// The interface does not exist, another process manages addresses on it, or it may not be changed.
    pub(crate) fn open(name: &str, networks: Vec<Network>) -> Result<(Self, Vec<Gid>), String> {
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
            // Log: once, at the start.
            log::info!("{name}: {address} is of a guest of an earlier process and is removed");
            netlink.remove(index, address).map_err(problem)?;
        }
        let netlink = Mutex::new(netlink);
        let left = left.into_iter().map(Gid::from).collect();
        let host = Self { name: name.to_owned(), index, networks, netlink, _only: only };
        Ok((host, left))
    }

    fn is_for_guests(&self, address: IpAddr) -> bool {
        self.networks.iter().any(|network| network.contains(address))
    }
}

impl AddressOwner for HostAddresses {
    fn add(&self, address: IpAddr) -> io::Result<()> {
        if !self.is_for_guests(address) {
            return Err(io::ErrorKind::AddrNotAvailable.into());
        }
        self.netlink.lock().add(self.index, address, MARK).inspect_err(|error| {
            LOG.warn(
                module_path!(),
                &self.name,
                format_args!("the address {address} of a guest cannot be added: {error}"),
            );
        })
    }

    fn remove(&self, address: IpAddr) -> io::Result<()> {
        self.netlink.lock().remove(self.index, address)
    }
}

/// An address on the interface, removed when dropped.
#[derive(Debug)]
pub(crate) struct AddedAddress {
    owner: Arc<dyn AddressOwner>,
    address: IpAddr,
}

impl AddedAddress {
    /// Adds a guest's address to the interface. Returns `None` if the address is not allowed, or exists already.
    pub(crate) fn add(owner: &Arc<dyn AddressOwner>, gid: Gid) -> Option<Self> {
        let address = IpAddr::V6(Ipv6Addr::from(gid.0)).to_canonical();
        match owner.add(address) {
            Ok(()) => Some(Self { owner: Arc::clone(owner), address }),
            Err(error) => {
                log::debug!("the address {address} of a guest is not added: {error}");
                None
            }
        }
    }
}

impl Drop for AddedAddress {
    fn drop(&mut self) {
        if let Err(error) = self.owner.remove(self.address) {
            LOG.warn(
                module_path!(),
                "host",
                format_args!("the address {} of a guest cannot be removed: {error}", self.address),
            );
        }
    }
}
