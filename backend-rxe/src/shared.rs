//! What all adapters of a process share.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::addresses::Addresses;
use crate::capture::Captures;
use crate::drive::Endpoint;
use crate::engine::{Engine, Workers};
use crate::path::directory::Directory;
use crate::port::Ports;
use crate::port::policy::VlanMode;

/// State of the backend that adapters keep alive.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) directory: Arc<Directory<Endpoint>>,
    pub(crate) engine: Arc<Engine>,
    pub(crate) ports: Arc<Ports>,
    /// What ports do with tags.
    pub(crate) vlan: VlanMode,
    /// Who may have which address.
    pub(crate) addresses: Arc<Addresses>,
    /// Devices reach each other directly.
    pub(crate) local: bool,
    pub(crate) captures: Arc<Captures>,
    /// Number of the next adapter.
    pub(crate) next_adapter: AtomicU64,
    /// There are workers, and each port has a thread.
    pub(crate) threaded: bool,
    pub(crate) _workers: Workers,
}
