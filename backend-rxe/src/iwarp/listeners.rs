//! Ports of the guest on which peers may connect.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr, TcpListener};

use pvrdma_verbs_types::GidType;

use super::meeting::Meeting;
use super::poller::{Poller, Watched};
use crate::adapter::Adapter;
use crate::gid::BoundGid;

/// Maximum number of addresses and ports of a device.
const MOST: usize = 256;

/// A listening socket.
#[derive(Debug)]
struct Listener {
    socket: TcpListener,
    token: u64,
    own: BoundGid,
}

/// The listening sockets of a device.
#[derive(Debug, Default)]
pub(super) struct Listeners {
    /// By address. An address on which the embedder could not listen is kept out, and tried again when the addresses
    /// change.
    open: HashMap<SocketAddr, Listener>,
}

impl Listeners {
    /// Listens on the listed ports of the device's own addresses, and on no others.
    pub(super) fn update(&mut self, adapter: &Adapter, meeting: &Meeting, poller: &mut Poller) {
        let ports = &adapter.rules.listen;
        let own = (0..=u8::MAX).filter_map(|index| adapter.gids.get(index)).filter(|own| own.kind == GidType::RoceV2);
        let address = |own: &BoundGid| Some(IpAddr::from(own.gid)).filter(|address| !is_link_local(*address));
        let wanted: HashMap<SocketAddr, BoundGid> = own
            .filter_map(|own| Some((address(&own)?, own)))
            .flat_map(|(address, own)| ports.iter().map(move |port| (SocketAddr::new(address, *port), own)))
            .take(MOST)
            .collect();
        self.open.retain(|address, listener| {
            let stays = wanted.get(address) == Some(&listener.own);
            if !stays {
                poller.remove(listener.token);
            }
            stays
        });
        for (address, own) in wanted {
            if self.open.contains_key(&address) {
                continue;
            }
            let opened = meeting.config.sockets.listen(address);
            let opened = opened.and_then(|socket| Ok((poller.add_edge(&socket, Watched::Listener)?, socket)));
            match opened {
                Ok((token, socket)) => {
                    self.open.insert(address, Listener { socket, token, own });
                }
                Err(error) => adapter.log.warn(
                    module_path!(),
                    format_args!("iWARP peers cannot connect to {address} of the guest: {error}"),
                ),
            }
        }
    }

    /// Returns the socket with this number, and the guest's address and port.
    pub(super) fn find(&self, token: u64) -> Option<(&TcpListener, BoundGid, u16)> {
        let mut open = self.open.iter();
        open.find_map(|(address, listener)| {
            (listener.token == token).then_some((&listener.socket, listener.own, address.port()))
        })
    }
}

/// Returns `true` if an address means another host on each interface.
const fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}
