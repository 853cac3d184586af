//! Fake host adapter for tests: a function table of the library filled with functions of this folder.
//!
//! It moves no data. It keeps posted requests until the test completes them, flushes like an adapter when a queue pair
//! enters its error state, and refuses requests as instructed by the test.

mod cm;
mod functions;
mod gate;
mod host;
mod rdmacm;

use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

use pvrdma_packet::MacAddr;
use pvrdma_verbs::{Backend, DeviceContext, Station, VerbsError};
use pvrdma_verbs_types::GidType;
use tempfile::TempDir;

pub(crate) use cm::{ATTRIBUTE_QPN, CmCall, DLID, PKEY_INDEX, SERVICE_LEVEL};
pub(crate) use functions::unacknowledged;
pub(crate) use gate::Call;
pub(crate) use host::FakeHost;

use crate::backend::Ibverbs;
use crate::config::{CmMode, IbverbsConfig};
use crate::gid::{HostGid, HostGids};
use crate::hca::IbvHca;
use crate::rdmacm::Libraries;
use crate::shared::Shared;
use crate::sys::{LINK_LAYER_ETHERNET, TRANSPORT_IB};
use crate::transport::Transport;
use crate::verbs::{HostDevice, OpenError};

/// A backend on a fake adapter.
pub(crate) struct FakeBackend {
    pub(crate) host: Arc<FakeHost>,
    shared: Arc<Shared>,
    _gids: TempDir,
}

/// A station at a fake adapter.
pub(crate) struct FakeStation {
    host: Arc<FakeHost>,
    shared: Arc<Shared>,
    mac: MacAddr,
}

impl FakeBackend {
    pub(crate) fn new() -> Self {
        Self::with(|_| {})
    }

    /// Creates a backend whose configuration the test changes with `change`.
    pub(crate) fn with(change: impl FnOnce(&mut IbverbsConfig)) -> Self {
        Self::that_speaks(TRANSPORT_IB, LINK_LAYER_ETHERNET, change)
    }

    /// Creates a backend on an adapter with this transport and link layer.
    pub(crate) fn that_speaks(transport: c_int, link_layer: u8, change: impl FnOnce(&mut IbverbsConfig)) -> Self {
        let host = Arc::<FakeHost>::default();
        host.speak(transport, link_layer);
        let mut config = IbverbsConfig { poll: Duration::ZERO, ..IbverbsConfig::new("fake0") };
        change(&mut config);
        let folder = tempfile::tempdir().unwrap();
        let gids = HostGids::in_folder(folder.path());
        let default_gid = HostGid { index: 0, gid: pvrdma_verbs::testing::gid(250), kind: GidType::RoceV2 };
        gids.set(&default_gid);
        let library = functions::library();
        let transport = Transport::check(transport, link_layer, &config).unwrap();
        let libraries = Libraries { cm: rdmacm::library(), verbs: Arc::clone(&library) };
        let host_cm = (config.cm == CmMode::Host).then_some(libraries);
        let shared = Arc::new(Shared {
            library,
            config,
            gids,
            default_gid,
            addresses: None,
            given: Default::default(),
            fabric: Arc::default(),
            manager: None,
            host_cm,
            transport,
        });
        Self { host, shared, _gids: folder }
    }

    /// Opens the adapter.
    pub(crate) fn open(&self) -> HostDevice {
        open(&self.host, &self.shared)
    }

    /// Starts a backend on the adapter as the daemon does, up to the GID table, which the host does not have.
    pub(crate) fn start(&self) -> Result<Ibverbs, OpenError> {
        let config = IbverbsConfig::new("fake0");
        functions::with_host(&self.host, || Ibverbs::start(functions::library(), config, |_| Ok(None)))
    }

    /// Runs code in which this thread opens channels of the connection manager.
    pub(crate) fn enter<T>(&self, run: impl FnOnce() -> T) -> T {
        functions::with_host(&self.host, run)
    }

    /// Returns the libraries by which the host connects guests.
    pub(crate) fn libraries(&self) -> &Libraries {
        self.shared.host_cm.as_ref().unwrap()
    }

    /// Adds an entry to the host's GID table.
    pub(crate) fn set_host_gid(&self, entry: &HostGid) {
        self.shared.gids.set(entry);
    }
}

impl Backend for FakeBackend {
    type Hca = IbvHca;
    type Station = FakeStation;

    fn station(&self, mac: MacAddr) -> Result<FakeStation, VerbsError> {
        Ok(FakeStation { host: Arc::clone(&self.host), shared: Arc::clone(&self.shared), mac })
    }
}

impl Station for FakeStation {
    type Hca = IbvHca;

    fn mac(&self) -> MacAddr {
        self.mac
    }

    fn attach(&self, context: DeviceContext) -> Result<IbvHca, VerbsError> {
        IbvHca::start(open(&self.host, &self.shared), self.mac, context, Arc::clone(&self.shared))
    }
}

fn open(host: &Arc<FakeHost>, shared: &Shared) -> HostDevice {
    functions::with_host(host, || HostDevice::open(&shared.library, "fake0")).unwrap()
}
