//! Protocol of the adapter's port.

use std::ffi::c_int;

use serde::Serialize;

use crate::config::{CmMode, IbverbsConfig};
use crate::sys::{LINK_LAYER_ETHERNET, LINK_LAYER_INFINIBAND, TRANSPORT_IB, TRANSPORT_IWARP};

/// Protocol that the port speaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Transport {
    Roce,
    Iwarp,
    InfiniBand,
}

impl Transport {
    /// Checks that guests can use the port. The guest's driver reports RoCE whatever the adapter is, so on any other
    /// port its connections fail, unless the host's connection manager makes them.
    pub(crate) fn check(transport: c_int, link_layer: u8, config: &IbverbsConfig) -> Result<Self, String> {
        const REMEDY: &str = "or the software adapter (--backend rxe) with the Ethernet interface as its uplink";
        let found = match (transport, link_layer) {
            (TRANSPORT_IB, LINK_LAYER_ETHERNET) => return Ok(Self::Roce),
            (TRANSPORT_IWARP, _) if config.cm == CmMode::Host => Self::Iwarp,
            (TRANSPORT_IWARP, _) => {
                return Err(format!(
                    "the adapter speaks iWARP, and guests speak RoCE: let the host connect them (cm=host), switch the \
                     adapter to RoCE if it can, or use an adapter that speaks RoCE, {REMEDY}"
                ));
            }
            (TRANSPORT_IB, LINK_LAYER_INFINIBAND) if config.cm == CmMode::Host && config.untested_infiniband => {
                Self::InfiniBand
            }
            (TRANSPORT_IB, LINK_LAYER_INFINIBAND) => {
                return Err(format!(
                    "its link layer is InfiniBand, where a guest cannot have an address of its own: use an Ethernet \
                     port, {REMEDY}"
                ));
            }
            (TRANSPORT_IB, _) => {
                return Err(format!(
                    "its link layer is unknown ({link_layer}), not Ethernet: use an Ethernet port, {REMEDY}"
                ));
            }
            _ => {
                return Err(format!(
                    "the adapter speaks neither InfiniBand nor RoCE (transport type {transport}): use an adapter that \
                     speaks RoCE, {REMEDY}"
                ));
            }
        };
        if config.add_addresses.is_empty() {
            Ok(found)
        } else {
            Err("only the addresses of a RoCE port can be managed: use addresses=given, and list the address of each \
                 guest that peers connect to (address= of the device)"
                .to_owned())
        }
    }

    pub(crate) fn is_iwarp(self) -> bool {
        self == Self::Iwarp
    }

    /// Returns `true` if the port's GIDs are IP addresses. Otherwise the IP addresses of guests mean nothing to the
    /// adapter, and only the host's connection manager can connect queue pairs.
    pub(crate) fn has_ip_gids(self) -> bool {
        self == Self::Roce
    }
}
