//! Ports of the guest on which the host listens.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use crate::adapter::Adapter;
use crate::gid::{Bound, ip, is_confined};
use crate::rdmacm::{CmId, EventChannel};

/// Maximum number of addresses and ports of a device.
const MOST: usize = 256;

/// The host's listening identifiers of a device.
#[derive(Debug, Default)]
pub(super) struct Listeners {
    /// By address. An identifier that could not listen is kept out, and tried again when the addresses change.
    open: HashMap<SocketAddr, (CmId, Bound)>,
}

impl Listeners {
    /// Listens on the listed ports of the device's own addresses, and on no others.
    pub(super) fn update(&mut self, adapter: &Adapter, channel: &Arc<EventChannel>) {
        let ports = &adapter.member.rules.listen;
        let own = adapter.gids.own_addresses();
        let own = own.iter().filter(|bound| !is_confined(ip(bound.gid)));
        let wanted: HashMap<SocketAddr, Bound> = own
            .flat_map(|bound| ports.iter().map(|port| (SocketAddr::new(ip(bound.gid), *port), *bound)))
            .take(MOST)
            .collect();
        self.open.retain(|address, (_, bound)| wanted.get(address) == Some(bound));
        for (address, bound) in wanted {
            if self.open.contains_key(&address) {
                continue;
            }
            let opened = CmId::create(channel).and_then(|id| id.listen(address).map(|()| id));
            match opened {
                Ok(id) => {
                    self.open.insert(address, (id, bound));
                }
                Err(error) => adapter.log.warn(
                    module_path!(),
                    format_args!("the host cannot listen for the guest on {address} (cm-listen): {error}"),
                ),
            }
        }
    }

    /// Returns the guest's address and port of an identifier, by its address.
    pub(super) fn find(&self, id: usize) -> Option<(Bound, u16)> {
        let mut open = self.open.iter();
        open.find_map(|(address, (listener, bound))| (listener.address() == id).then(|| (*bound, address.port())))
    }
}
