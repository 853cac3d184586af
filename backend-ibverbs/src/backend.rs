//! The backend: the library, the device and what all guests of a process share.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use pvrdma_verbs::{Backend, DeviceContext, VerbsError};

use crate::adapter::Adapter;
use crate::addresses::{HostAddresses, Network};
use crate::cm::{CmMode, ConnectionManager};
use crate::gid::{Fabric, HostGid, HostGids};
use crate::hca::IbvHca;
use crate::sys::library::Library;
use crate::verbs::{HostDevice, OpenError};

/// Which GID of the host stands for guests whose own address the host does not have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum GidIndex {
    /// The first RoCE v2 address that routers know, or else the first at all.
    #[default]
    Auto,
    /// This one.
    Fixed(u32),
}

/// What to use of the host, and how much.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IbverbsConfig {
    /// Name of the RDMA device, as in `/sys/class/infiniband`.
    pub device: String,
    /// Its port.
    pub port: u8,
    /// The host's GID for guests.
    pub gid_index: GidIndex,
    /// Bytes of guest memory that one device may have registered, counted once for each registration.
    pub max_pinned: u64,
    /// Networks whose addresses are put on the host's interface while guests have them. Others must be there already.
    pub add_addresses: Vec<Network>,
    /// How far the guests' connection managers reach.
    pub cm: CmMode,
    /// For how long after a completion the host's queues are polled before the thread sleeps.
    pub poll: Duration,
}

impl IbverbsConfig {
    /// Port 1 of a device, with its own choice of GID, 64 GiB a guest, and the connection manager if it can be had.
    pub fn new(device: impl Into<String>) -> Self {
        Self {
            device: device.into(),
            port: 1,
            gid_index: GidIndex::Auto,
            max_pinned: 64 << 30,
            add_addresses: Vec::new(),
            cm: CmMode::Auto,
            poll: Duration::from_micros(50),
        }
    }
}

/// State of the backend that adapters keep alive.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) library: Arc<Library>,
    pub(crate) config: IbverbsConfig,
    pub(crate) gids: HostGids,
    /// Stands for guests.
    pub(crate) default_gid: HostGid,
    /// Where guests' addresses are added, if that is wanted.
    pub(crate) addresses: Option<Arc<HostAddresses>>,
    pub(crate) fabric: Arc<Fabric>,
    /// The way to connection managers beyond this process.
    pub(crate) manager: Option<ConnectionManager>,
}

/// The host's adapter as a backend. Clones are the same backend.
#[derive(Clone)]
pub struct Ibverbs(Arc<Shared>);

impl fmt::Debug for Ibverbs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ibverbs").field("config", &self.0.config).finish_non_exhaustive()
    }
}

impl Ibverbs {
    /// Loads the library, and opens the device once to see whether it will do.
    ///
    /// # Errors
    /// The library, the device, the port or the GID is not there, or the connection manager that was insisted on.
    pub fn new(config: IbverbsConfig) -> Result<Self, OpenError> {
        let library = Library::load()?;
        let device = HostDevice::open(&library, &config.device)?;
        let unfit = |problem: String| OpenError::Unfit { name: config.device.clone(), problem };
        let port = device
            .port(config.port)
            .map_err(|error| unfit(format!("port {} cannot be queried: {error}", config.port)))?;
        if !port.ethernet {
            return Err(unfit(format!("port {} is not Ethernet; guests speak RoCE", config.port)));
        }
        let gids = HostGids::new(&config.device, config.port, port.gids);
        let mut default_gid = gids.choose(config.gid_index).map_err(unfit)?;
        let addresses = if config.add_addresses.is_empty() {
            None
        } else {
            let interface = gids.interface(default_gid.index).map_err(unfit)?;
            let (addresses, removed) = HostAddresses::open(&interface, config.add_addresses.clone()).map_err(unfit)?;
            gids.await_gone(&removed);
            // It may have been one of these.
            default_gid = gids.choose(config.gid_index).map_err(unfit)?;
            Some(addresses)
        };
        log::info!(
            "{}: port {}, GID {} (index {}) stands for guests without an address of their own",
            config.device,
            config.port,
            default_gid.gid,
            default_gid.index
        );
        let fabric = Arc::<Fabric>::default();
        let manager = match config.cm {
            CmMode::Local => None,
            CmMode::Auto | CmMode::Umad => match ConnectionManager::start(&config, &gids, &fabric) {
                Ok(manager) => Some(manager),
                Err(error) if config.cm == CmMode::Umad => return Err(unfit(format!("cm=umad: {error}"))),
                Err(error) => {
                    log::warn!("{}: rdma_cm works between guests of this process only: {error}", config.device);
                    None
                }
            },
        };
        Ok(Self(Arc::new(Shared { library, config, gids, default_gid, addresses, fabric, manager })))
    }
}

#[cfg(feature = "testing")]
impl Ibverbs {
    /// Tells the device that has `gid` that the host's adapter is gone, as the host's driver would.
    pub fn pretend_loss(&self, gid: pvrdma_verbs::Gid) {
        const DEVICE_FATAL: std::ffi::c_int = 8;
        if let Some(adapter) = self.0.fabric.owner(gid).and_then(|owner| owner.upgrade()) {
            adapter.notice(crate::verbs::AsyncNotice { kind: DEVICE_FATAL, element: 0 });
        }
    }
}

impl Backend for Ibverbs {
    type Hca = IbvHca;

    fn attach(&self, context: DeviceContext) -> Result<IbvHca, VerbsError> {
        // Each device has a context of its own: the kernel takes everything back when it is closed, however that happens.
        let device = HostDevice::open(&self.0.library, &self.0.config.device).map_err(|error| {
            log::error!("{}: {error}", context.name);
            VerbsError::Host(std::io::Error::other(error.to_string()))
        })?;
        Ok(IbvHca(Adapter::start(Arc::new(device), context, Arc::clone(&self.0))?))
    }
}
