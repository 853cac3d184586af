//! Network function beside a device: an emulated vmxnet3 with its own socket.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use pvrdma_guest_memory::{DmaSpace, MemoryBudget, PinPolicy};
use pvrdma_vfio_user_server::{ConnectionStats, Endpoint, IrqTable, MigratableDevice, Server, keeper::client::Keeper};
use pvrdma_vmxnet3::{NicLink, Vmxnet3Config};

use super::hand_over::Arrivals;
use super::reporter::NicReporter;
use super::{Host, recovery};
use crate::config::Device;
use crate::status::FormerCounts;

/// Memory for a migration of a network function, in bytes: its saved state, and the log of written pages of 1 TiB.
const MIGRATION_BYTES: u64 = 33 << 20;

/// A served network function. Dropping it disconnects its client.
#[derive(Debug)]
pub(super) struct NetworkFunction {
    server: Server,
    /// Its end towards the device's port.
    pub(super) link: Arc<NicLink>,
    irqs: Arc<IrqTable>,
    stats: Arc<ConnectionStats>,
    former: FormerCounts,
}

impl NetworkFunction {
    /// Creates the network function of a device and serves it at the socket in `fds`. With `arrivals`, its state and
    /// its client come from there. `left` is called when the VM has moved away.
    ///
    /// # Errors
    /// No descriptors are available, or no thread can be started.
    pub(super) fn start(
        device: &Device,
        fds: Vec<OwnedFd>,
        host: &Arc<dyn Host>,
        (keeper, arrivals): (Option<&Arc<Keeper>>, Option<&mut Arrivals>),
        left: Arc<dyn Fn() + Send + Sync>,
    ) -> Result<Self> {
        let Ok([listener]) = <[OwnedFd; 1]>::try_from(fds) else { bail!("no socket for it") };
        // No thread waits for its memory under a lock that other threads need, so none of it is pinned.
        let memory = DmaSpace::new(PinPolicy::Off);
        let irqs = Arc::new(IrqTable::default());
        let name = format!("{}-nic", device.config.name);
        let config =
            Vmxnet3Config::new(name.clone(), device.mac).with_intx(device.config.intx).with_multifunction(true);
        let link = Arc::new(NicLink::with_device(config, Arc::clone(&memory), irqs.clone())?);
        let stats = Arc::new(ConnectionStats::default());
        let endpoint = Endpoint::new(name, Arc::clone(link.device()) as _, memory, Arc::clone(&irqs))
            .with_files(device.memory.into())
            .with_keeper(keeper.map(|keeper| keeper.network_function()))
            .with_stats(Arc::clone(&stats))
            .with_migration(Some(MigratableDevice {
                function: Arc::clone(link.device()) as _,
                budget: MemoryBudget::new(MIGRATION_BYTES),
                left,
            }))
            .with_intx(device.config.intx);
        let (listener, function) = (UnixListener::from(listener), Arc::clone(link.device()));
        let (server, former) = match arrivals {
            Some(arrivals) => {
                ensure!(
                    arrivals.receive((&device.config.name, true))?.is_none(),
                    "doorbell pages of a network function"
                );
                let server = arrivals.serve(&device.config.name, function, listener, endpoint)?;
                (server, arrivals.take_counts())
            }
            None => {
                let server = recovery::serve((&device.config.name, true), listener, endpoint, host)?;
                (server, FormerCounts::default())
            }
        };
        Ok(Self { server, link, irqs, stats, former })
    }

    /// Splits it into the reporter and the server that keeps it alive.
    pub(super) fn into_parts(self) -> (NicReporter, Server) {
        let Self { server, link, irqs, stats, former } = self;
        (NicReporter { device: Arc::clone(link.device()), irqs, stats, former }, server)
    }
}
