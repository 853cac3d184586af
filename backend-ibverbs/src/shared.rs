//! State shared by all devices of a backend.

use std::sync::Arc;

use crate::addresses::AddressOwner;
use crate::cm::ConnectionManager;
use crate::config::IbverbsConfig;
use crate::gid::{Fabric, GivenAddresses, HostGid, HostGids};
use crate::rdmacm::Libraries;
use crate::sys::library::Library;
use crate::transport::Transport;

/// State of the backend that adapters keep alive.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) library: Arc<Library>,
    pub(crate) config: IbverbsConfig,
    pub(crate) gids: HostGids,
    /// Host GID used for guests whose own address the host does not have.
    pub(crate) default_gid: HostGid,
    /// Adds guests' addresses to the host, if enabled.
    pub(crate) addresses: Option<Arc<dyn AddressOwner>>,
    /// Addresses that were added, and may still be in the process of removal. All others are the host's own.
    pub(crate) given: GivenAddresses,
    pub(crate) fabric: Arc<Fabric>,
    /// Sender and receiver for connection managers outside this process.
    pub(crate) manager: Option<ConnectionManager>,
    /// Libraries by which the host connects guests, if it does.
    pub(crate) host_cm: Option<Libraries>,
    pub(crate) transport: Transport,
}
