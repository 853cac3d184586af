//! The half of a link that needs privileges: it opens the socket and says which frames come to it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use parking_lot::Mutex;
use pvrdma_packet::MacAddr;
use rustix::io::Errno;

use super::filter::{MAX_ADDRESSES, VlanFilter, program};
use super::segmentation::{self, Segmentation, SegmentationSample};
use super::{AfPacketError, socket};
use crate::Connector;

/// A packet socket on an interface of this host, with the addresses that it takes frames to. Duplicates of its
/// descriptor ([`Self::descriptor`]) are for links, of another process as well: what is set here holds for them.
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
    /// With the membership that each has.
    addresses: Vec<(MacAddr, i32)>,
}

impl AfPacketSocket {
    /// Opens a socket on `interface`, which may be down yet. Nothing comes before it has [addresses](Connector).
    ///
    /// # Errors
    /// No right to, no such interface, or not an Ethernet.
    pub fn open(interface: &str, vlan: VlanFilter) -> Result<Self, AfPacketError> {
        let (socket, index) = open(interface).map_err(|errno| AfPacketError::new(interface, errno))?;
        let state = State { socket, index, addresses: Vec::new() };
        Ok(Self { interface: interface.to_owned(), vlan, state: Mutex::new(state) })
    }

    /// A duplicate for [`AfPacketLink::from_socket`](super::AfPacketLink::from_socket).
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.state.lock().socket.try_clone()
    }

    /// Name of the interface.
    pub fn interface(&self) -> &str {
        &self.interface
    }

    /// Finds out whether the kernel cuts TCP, and where super-frames are cut: sends a TCP frame and a super-frame of
    /// `sample` from `mac` to itself, which the next bridge drops, and looks at what leaves the interface. Takes a
    /// tenth of a second if nothing does.
    ///
    /// # Errors
    /// The system refuses.
    pub fn segmentation(&self, mac: MacAddr, sample: SegmentationSample) -> Result<Segmentation, AfPacketError> {
        segmentation::test(&self.interface, mac, sample).map_err(|errno| AfPacketError::new(&self.interface, errno))
    }
}

fn open(interface: &str) -> Result<(OwnedFd, i32), Errno> {
    // Nothing comes before it is known for whom.
    socket::open(interface, &program(&[], VlanFilter::All))
}

impl State {
    /// Changes who gets frames. On an error the filter is as it was, and memberships may be left over, which only cost.
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

/// Opens the socket anew on an interface that was deleted and made again.
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
