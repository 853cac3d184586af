//! What all devices of a backend share.

use std::sync::Arc;

use crate::addresses::AddressOwner;
use crate::cm::ConnectionManager;
use crate::config::IbverbsConfig;
use crate::gid::{Fabric, GivenAddresses, HostGid, HostGids};
use crate::sys::library::Library;

/// State of the backend that adapters keep alive.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) library: Arc<Library>,
    pub(crate) config: IbverbsConfig,
    pub(crate) gids: HostGids,
    /// Stands for guests.
    pub(crate) default_gid: HostGid,
    /// Where guests' addresses are added, if that is wanted.
    pub(crate) addresses: Option<Arc<dyn AddressOwner>>,
    /// Those that were, and may be on their way out. What else the host has is its own.
    pub(crate) given: GivenAddresses,
    pub(crate) fabric: Arc<Fabric>,
    /// The way to connection managers beyond this process.
    pub(crate) manager: Option<ConnectionManager>,
}
