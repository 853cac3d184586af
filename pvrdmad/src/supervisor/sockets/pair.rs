//! Sockets on the two interfaces of an uplink with fail-over.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use anyhow::{Context, Result};
use parking_lot::Mutex;
use pvrdma_ether_link::InterfaceName;
use pvrdma_ether_link::af_packet::{AfPacketSocket, VlanFilter};
use pvrdma_ether_link::backup::Member;
use pvrdma_link::Connector;
use pvrdma_packet::MacAddr;

/// A packet socket on each interface. Only that of the active interface receives frames, so that the kernel drops the
/// frames of the backup before they occupy memory.
#[derive(Debug)]
pub(super) struct PairSockets {
    pub(super) sockets: [Arc<AfPacketSocket>; 2],
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    active: Member,
    addresses: Vec<MacAddr>,
}

impl PairSockets {
    /// Opens the sockets for frames to `macs`. The first interface is active.
    ///
    /// # Errors
    /// Missing privileges, no such interface, or not an Ethernet interface.
    pub(super) fn open(names: &[InterfaceName; 2], vlan: VlanFilter, macs: &[MacAddr]) -> Result<Self> {
        let [first, second] = names.each_ref().map(|name| AfPacketSocket::open(name.as_str(), vlan));
        let pair = Self::new([first?, second?], macs);
        pair.set_addresses(macs)?;
        Ok(pair)
    }

    /// Uses sockets that another process has opened for these interfaces and addresses. The first interface is active.
    ///
    /// # Errors
    /// They are not packet sockets on these interfaces, or the system refuses.
    pub(super) fn adopt(
        [first, second]: &[InterfaceName; 2],
        vlan: VlanFilter,
        [one, other]: [OwnedFd; 2],
        macs: &[MacAddr],
    ) -> Result<Self> {
        let adopt = |name: &InterfaceName, socket, macs: &[MacAddr]| {
            AfPacketSocket::adopt(name.as_str(), vlan, socket, macs).with_context(|| name.to_string())
        };
        Ok(Self::new([adopt(first, one, macs)?, adopt(second, other, &[])?], macs))
    }

    fn new(sockets: [AfPacketSocket; 2], macs: &[MacAddr]) -> Self {
        let state = State { active: Member::First, addresses: macs.to_vec() };
        Self { sockets: sockets.map(Arc::new), state: Mutex::new(state) }
    }

    /// Makes an interface the one that receives.
    ///
    /// # Errors
    /// The system refuses.
    pub(super) fn select(&self, active: Member) -> io::Result<()> {
        let mut state = self.state.lock();
        if state.active == active {
            return Ok(());
        }
        self.apply(active, &state.addresses)?;
        state.active = active;
        Ok(())
    }

    fn apply(&self, active: Member, addresses: &[MacAddr]) -> io::Result<()> {
        active.other().of(&self.sockets).set_addresses(&[])?;
        let socket = active.of(&self.sockets);
        if socket.set_addresses(addresses).is_err() {
            // The interface was deleted and created again since the socket was opened.
            socket.connect()?;
            socket.set_addresses(addresses)?;
        }
        Ok(())
    }
}

impl Connector for PairSockets {
    /// Fails: each interface has a connector of its own.
    fn connect(&self) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn set_addresses(&self, addresses: &[MacAddr]) -> io::Result<()> {
        let mut state = self.state.lock();
        self.apply(state.active, addresses)?;
        state.addresses = addresses.to_vec();
        Ok(())
    }
}
