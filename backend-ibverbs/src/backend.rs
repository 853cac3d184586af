//! The backend: the library, the device and the state that all guests of a process share.

use std::fmt;
use std::sync::Arc;

use pvrdma_packet::MacAddr;
use pvrdma_verbs::{Backend, DeviceContext, Station, VerbsError};

use crate::addresses::{AddressOwner, HostAddresses};
use crate::cm::ConnectionManager;
use crate::config::{CmMode, IbverbsConfig};
use crate::gid::{Fabric, GivenAddresses, HostGids};
use crate::hca::IbvHca;
use crate::rdmacm::{EventChannel, Libraries};
use crate::shared::Shared;
use crate::sys::library::Library;
use crate::sys::rdmacm::RdmaCm;
use crate::transport::Transport;
use crate::verbs::{HostDevice, OpenError};

#[cfg(feature = "testing")]
type Attached = Arc<parking_lot::Mutex<Vec<std::sync::Weak<crate::objects::Objects>>>>;

/// Backend on the host's adapter. Clones share one backend.
#[derive(Clone)]
pub struct Ibverbs {
    shared: Arc<Shared>,
    /// All devices created so far.
    #[cfg(feature = "testing")]
    attached: Attached,
}

impl fmt::Debug for Ibverbs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ibverbs").field("config", &self.shared.config).finish_non_exhaustive()
    }
}

impl Ibverbs {
    /// Loads the library, and opens the device once to check that it is suitable.
    ///
    /// # Errors
    /// The library, the device, the port or the GID does not exist, guests cannot use the port, or the connection
    /// manager is required but unavailable.
    pub fn new(config: IbverbsConfig) -> Result<Self, OpenError> {
        let owner = |config: &_| Ok(host_addresses(config)?.map(|addresses| addresses as Arc<dyn AddressOwner>));
        Self::start(Library::load()?, config, owner)
    }

    /// Like [`Self::new`], with an `owner` that adds guests' addresses to the host's interface, if
    /// [`IbverbsConfig::add_addresses`] enables this.
    ///
    /// # Errors
    /// As for [`Self::new`].
    pub fn with_addresses(config: IbverbsConfig, owner: Arc<dyn AddressOwner>) -> Result<Self, OpenError> {
        Self::start(Library::load()?, config, |config| Ok((!config.add_addresses.is_empty()).then_some(owner)))
    }

    pub(crate) fn start(
        library: Arc<Library>,
        config: IbverbsConfig,
        owner: impl FnOnce(&IbverbsConfig) -> Result<Option<Arc<dyn AddressOwner>>, String>,
    ) -> Result<Self, OpenError> {
        let device = HostDevice::open(&library, &config.device)?;
        let unfit = |problem: String| OpenError::Unfit { name: config.device.clone(), problem };
        let port = device
            .port(config.port)
            .map_err(|error| unfit(format!("port {} cannot be queried: {error}", config.port)))?;
        let transport = Transport::check(device.transport(), port.link_layer, &config)
            .map_err(|problem| unfit(format!("port {}: {problem}", config.port)))?;
        // This must precede the choice of a GID, because the addresses that an earlier process left are removed here.
        let addresses = owner(&config).map_err(unfit)?;
        let gids = HostGids::new(&config.device, config.port, port.gids);
        let default_gid = gids.choose(config.gid_index).map_err(unfit)?;
        // Log: once, at the start.
        log::info!(
            "{}: port {}, GID {} (index {}) stands for guests without an address of their own",
            config.device,
            config.port,
            default_gid.gid,
            default_gid.index
        );
        let host_cm = match config.cm {
            CmMode::Host => Some(host_libraries(&library, &config, transport).map_err(unfit)?),
            CmMode::Auto | CmMode::Umad | CmMode::Local => None,
        };
        let fabric = Arc::<Fabric>::default();
        let manager = match config.cm {
            CmMode::Local | CmMode::Host => None,
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
            shared: Arc::new(Shared {
                library,
                config,
                gids,
                default_gid,
                addresses,
                given: GivenAddresses::default(),
                fabric,
                manager,
                host_cm,
                transport,
            }),
            #[cfg(feature = "testing")]
            attached: Attached::default(),
        })
    }
}

/// Loads `librdmacm`, and checks that the host's connection manager is available.
fn host_libraries(library: &Arc<Library>, config: &IbverbsConfig, transport: Transport) -> Result<Libraries, String> {
    let cm = RdmaCm::load().map_err(|error| format!("cm=host: {error}"))?;
    let libraries = Libraries { cm, verbs: Arc::clone(library) };
    EventChannel::open(&libraries).map_err(|error| {
        format!(
            "cm=host: the host's connection manager cannot be used: {error} (is the kernel's rdma_ucm loaded, and may \
             /dev/infiniband/rdma_cm be opened?)"
        )
    })?;
    // Log: once, at the start.
    log::info!("{}: the host's connection manager connects the guests", config.device);
    if transport == Transport::InfiniBand {
        // Log: once, at the start.
        log::warn!("{}: guests on an InfiniBand port are untested: none has been run", config.device);
    }
    Ok(libraries)
}

/// Opens the interface of the host's GID for guests, and removes the addresses that an earlier process has left there.
/// Returns `None` if no networks for addresses are configured.
///
/// # Errors
/// The interface does not exist, another process manages addresses on it, or it may not be changed.
pub fn host_addresses(config: &IbverbsConfig) -> Result<Option<Arc<HostAddresses>>, String> {
    if config.add_addresses.is_empty() {
        return Ok(None);
    }
    let gids = HostGids::new(&config.device, config.port, u32::MAX);
    let interface = gids.interface(gids.choose(config.gid_index)?.index)?;
    let (addresses, removed) = HostAddresses::open(&interface, config.add_addresses.clone())?;
    gids.await_gone(&removed);
    Ok(Some(Arc::new(addresses)))
}

#[cfg(feature = "testing")]
impl Ibverbs {
    /// Reports the loss of the host's adapter to the device that has `gid`, as the host's driver would.
    pub fn pretend_loss(&self, gid: pvrdma_verbs_types::Gid) {
        let attached: Vec<_> = self.attached.lock().iter().filter_map(std::sync::Weak::upgrade).collect();
        let owner = self.shared.fabric.owner(gid);
        for objects in attached {
            if owner.as_ref().is_some_and(|owner| Arc::ptr_eq(owner, &objects.adapter.member)) {
                crate::events::dispatch(&objects, crate::events::Event::DeviceFatal);
            }
        }
    }
}

impl Backend for Ibverbs {
    type Hca = IbvHca;
    type Station = IbverbsStation;

    fn station(&self, mac: MacAddr) -> Result<IbverbsStation, VerbsError> {
        Ok(IbverbsStation { backend: self.clone(), mac })
    }
}

/// Station of a device at the host's adapter, which is its network: there is nothing to plug in.
#[derive(Clone, Debug)]
pub struct IbverbsStation {
    backend: Ibverbs,
    mac: MacAddr,
}

impl Station for IbverbsStation {
    type Hca = IbvHca;

    fn mac(&self) -> MacAddr {
        self.mac
    }

    fn attach(&self, context: DeviceContext) -> Result<IbvHca, VerbsError> {
        let shared = &self.backend.shared;
        // Each device has a context of its own, because the kernel releases all resources of a context when it is
        // closed, for whatever reason.
        let device = HostDevice::open(&shared.library, &shared.config.device).map_err(|error| {
            context.log.error(module_path!(), format_args!("{error}"));
            VerbsError::Host(std::io::Error::other(error.to_string()))
        })?;
        let hca = IbvHca::start(device, self.mac, context, Arc::clone(shared))?;
        #[cfg(feature = "testing")]
        self.backend.attached.lock().push(Arc::downgrade(hca.objects()));
        Ok(hca)
    }
}
