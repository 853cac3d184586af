//! The privileged half of a link: opens the socket and selects the frames that it receives.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use parking_lot::Mutex;
use pvrdma_link::Connector;
use pvrdma_packet::MacAddr;
use rustix::io::Errno;

use super::error::AfPacketError;
use super::filter::{MAX_ADDRESSES, VlanFilter, program};
use super::segmentation::{self, Segmentation, SegmentationSample};
use super::socket;

/// A packet socket on an interface of this host, with its receive addresses. Links use duplicates of its descriptor
/// ([`Self::descriptor`]), possibly in other processes; the settings made here apply to the duplicates as well.
#[derive(Debug)]
pub struct AfPacketSocket {
    interface: String,
    vlan: VlanFilter,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    socket: OwnedFd,
    index: i32,
    /// Receive addresses, each with its kind of membership.
    addresses: Vec<(MacAddr, i32)>,
}

impl AfPacketSocket {
    /// Opens a socket on `interface`, which may still be down. It receives nothing until it has [addresses](Connector).
    ///
    /// # Errors
    /// Missing privileges, no such interface, or not an Ethernet interface.
    pub fn open(interface: &str, vlan: VlanFilter) -> Result<Self, AfPacketError> {
        let (socket, index) = open(interface).map_err(|errno| AfPacketError::new(interface, errno))?;
        let state = State { socket, index, addresses: Vec::new() };
        Ok(Self { interface: interface.to_owned(), vlan, state: Mutex::new(state) })
    }

    /// Uses a socket that another process has opened for the same interface and addresses.
    ///
    /// # Errors
    /// It is not a packet socket on that interface, or the system refuses.
    pub fn adopt(interface: &str, vlan: VlanFilter, socket: OwnedFd, addresses: &[MacAddr]) -> io::Result<Self> {
        let index = socket::index(socket.as_fd(), interface)?;
        let mut state = State { socket, index, addresses: Vec::new() };
        // The kernel counts memberships, so those of the other process stay until the socket is closed. They only cost
        // time: the filter decides.
        state.set_addresses(addresses, vlan)?;
        Ok(Self { interface: interface.to_owned(), vlan, state: Mutex::new(state) })
    }

    /// Returns a duplicate of the descriptor for [`AfPacketLink::from_socket`](super::AfPacketLink::from_socket).
    ///
    /// # Errors
    /// The process has no descriptors left.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.state.lock().socket.try_clone()
    }

    /// Returns the name of the interface.
    pub fn interface(&self) -> &str {
        &self.interface
    }

    /// Tests if the kernel segments TCP, and where super-frames are segmented. Sends a TCP frame and a super-frame of
    /// `sample` from `mac` to itself, which the next bridge drops, and inspects the frames that leave the interface.
    /// Takes a tenth of a second if none does.
    ///
    /// # Errors
    /// The system refuses.
    pub fn segmentation(&self, mac: MacAddr, sample: SegmentationSample) -> Result<Segmentation, AfPacketError> {
        segmentation::test(&self.interface, mac, sample).map_err(|errno| AfPacketError::new(&self.interface, errno))
    }
}

fn open(interface: &str) -> Result<(OwnedFd, i32), Errno> {
    // Receives nothing until its addresses are known.
    socket::open(interface, &program(&[], VlanFilter::All))
}

impl State {
    /// Changes the receive addresses. On an error the filter is unchanged. Some memberships may remain, which only
    /// costs time.
    fn set_addresses(&mut self, addresses: &[MacAddr], vlan: VlanFilter) -> Result<(), Errno> {
        if addresses.len() > MAX_ADDRESSES {
            return Err(Errno::NOBUFS);
        }
        let socket = self.socket.as_fd();
        for &mac in addresses {
            if !self.addresses.iter().any(|&(known, _)| known == mac) {
                self.addresses.push((mac, socket::join(socket, self.index, mac)?));
            }
        }
        socket::attach_filter(socket, &program(addresses, vlan))?;
        self.addresses.retain(|&(mac, membership)| {
            let wanted = addresses.contains(&mac);
            if !wanted {
                socket::leave(socket, self.index, mac, membership);
            }
            wanted
        });
        Ok(())
    }
}

/// Opens a new socket on an interface that was deleted and created again.
impl Connector for AfPacketSocket {
    fn connect(&self) -> io::Result<OwnedFd> {
        let state = &mut *self.state.lock();
        let addresses: Vec<_> = state.addresses.iter().map(|&(mac, _)| mac).collect();
        let (socket, index) = open(&self.interface)?;
        let mut new = State { socket, index, addresses: Vec::new() };
        new.set_addresses(&addresses, self.vlan)?;
        let duplicate = new.socket.try_clone()?;
        *state = new;
        Ok(duplicate)
    }

    fn set_addresses(&self, addresses: &[MacAddr]) -> io::Result<()> {
        Ok(self.state.lock().set_addresses(addresses, self.vlan)?)
    }
}
