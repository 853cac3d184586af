//! The backend: the library, the device and what all guests of a process share.

use std::fmt;
use std::sync::Arc;

use pvrdma_verbs::{Backend, DeviceContext, VerbsError};

use crate::addresses::HostAddresses;
use crate::cm::ConnectionManager;
use crate::config::{CmMode, IbverbsConfig};
use crate::gid::{Fabric, HostGids};
use crate::hca::IbvHca;
use crate::shared::Shared;
use crate::sys::library::Library;
use crate::verbs::{HostDevice, OpenError};

#[cfg(feature = "testing")]
type Attached = Arc<parking_lot::Mutex<Vec<std::sync::Weak<crate::objects::Objects>>>>;

/// The host's adapter as a backend. Clones are the same backend.
#[derive(Clone)]
pub struct Ibverbs {
    shared: Arc<Shared>,
    /// Every device so far.
    #[cfg(feature = "testing")]
    attached: Attached,
}

impl fmt::Debug for Ibverbs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ibverbs").field("config", &self.shared.config).finish_non_exhaustive()
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
        // Log: once, at the start.
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
                    // Log: once, at the start.
                    log::warn!("{}: rdma_cm works between guests of this process only: {error}", config.device);
                    None
                }
            },
        };
        Ok(Self {
            shared: Arc::new(Shared { library, config, gids, default_gid, addresses, fabric, manager }),
            #[cfg(feature = "testing")]
            attached: Attached::default(),
        })
    }
}

#[cfg(feature = "testing")]
impl Ibverbs {
    /// Tells the device that has `gid` that the host's adapter is gone, as the host's driver would.
    pub fn pretend_loss(&self, gid: pvrdma_verbs::Gid) {
        let attached: Vec<_> = self.attached.lock().iter().filter_map(std::sync::Weak::upgrade).collect();
        let owner = self.shared.fabric.owner(gid);
        for objects in attached {
            if owner.as_ref().is_some_and(|owner| Arc::ptr_eq(owner, &objects.adapter.member)) {
                crate::events::dispatch(&objects, crate::verbs::HostEvent::DeviceFatal);
            }
        }
    }
}

impl Backend for Ibverbs {
    type Hca = IbvHca;

    fn attach(&self, context: DeviceContext) -> Result<IbvHca, VerbsError> {
        // Each device has a context of its own: the kernel takes everything back when it is closed, however that
        // happens.
        let device = HostDevice::open(&self.shared.library, &self.shared.config.device).map_err(|error| {
            context.log.error(format_args!("{error}"));
            VerbsError::Host(std::io::Error::other(error.to_string()))
        })?;
        let hca = IbvHca::start(device, context, Arc::clone(&self.shared))?;
        #[cfg(feature = "testing")]
        self.attached.lock().push(Arc::downgrade(hca.objects()));
        Ok(hca)
    }
}
