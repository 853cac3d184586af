//! Transfer of a network's plan to another supervisor.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use anyhow::{Context, Result};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::{Plan, Planned, Settings};
use crate::config::{Device, FaultSpec, LinkState, Network};
use crate::doorbells::DoorbellSetup;
use crate::logging::LogFilter;
use crate::protocol::NetworkSetup;
use crate::supervisor::sockets::{DescribedLink, DescribedSockets, DeviceSockets, LinkSockets, Sources};
use crate::supervisor::timing::Timing;

impl Plan {
    /// Describes the plan for a process that takes the network over. Also returns the descriptors.
    ///
    /// # Errors
    /// No descriptors are available.
    pub(in crate::supervisor) fn describe(&self) -> io::Result<(DescribedPlan, Vec<OwnedFd>)> {
        let (mut devices, mut fds) = (Vec::new(), self.uplink()?);
        for planned in self.devices() {
            let sockets = planned.sockets.lock();
            // Removed meanwhile.
            let Some(sockets) = sockets.as_ref() else { continue };
            fds.extend(sockets.duplicates()?);
            let (device, doorbells) = (planned.device.clone(), planned.doorbells.clone());
            devices.push(DescribedDevice { device, link: planned.link, doorbells, sockets: sockets.describe() });
        }
        let Settings { fault, log, interface: _ } = self.settings();
        let [connected, lost] = self.services.clients();
        let uplink = self.uplink.as_ref().map(LinkSockets::describe);
        let fallback = self.stand_ins.duplicate()?;
        let has_fallback = fallback.is_some();
        fds.extend(fallback);
        let setup = self.setup.clone();
        Ok((DescribedPlan { setup, uplink, devices, fault, log, connected, lost, has_fallback }, fds))
    }

    /// Recreates the plan of a network that another process describes. That process owns the files of the sockets until
    /// [`Self::own`] is called.
    ///
    /// # Errors
    /// The descriptors do not fit the description.
    pub(in crate::supervisor) fn adopt(
        described: DescribedPlan,
        fds: Vec<OwnedFd>,
        sources: &Sources,
        timing: Timing,
    ) -> Result<Self> {
        let DescribedPlan { setup, uplink, devices, fault, log, connected, lost, has_fallback } = described;
        let mut fds = VecDeque::from(fds);
        let Network { vlan, uplink: link, .. } = &setup.network;
        let macs: Vec<_> = devices.iter().map(|described| described.device.mac).collect();
        let uplink = link.as_ref().zip(uplink);
        let uplink = uplink.map(|(link, uplink)| LinkSockets::adopt(link, &macs, *vlan, uplink, &mut fds, sources));
        let uplink = uplink.transpose().context("uplink")?;
        let planned = devices.into_iter().map(|described| {
            let DescribedDevice { device, link, doorbells, sockets } = described;
            let sockets = DeviceSockets::adopt(&device, *vlan, sockets, &mut fds, sources)
                .with_context(|| format!("device {}", device.config.name))?;
            Ok(Arc::new(Planned { device, link, doorbells, sockets: Arc::new(Mutex::new(Some(sockets))) }))
        });
        let planned = planned.collect::<Result<Vec<_>>>()?;
        let settings = Settings { fault, log, interface: None };
        let plan = Self::assemble(setup, planned, uplink, settings, sources, timing)?;
        plan.services.adopt_clients([connected, lost]);
        if has_fallback {
            plan.stand_ins.expect(fds.pop_front().context("no socket of a fallback server")?)?;
        }
        Ok(plan)
    }

    /// Makes this process the owner of adopted sockets.
    ///
    /// # Errors
    /// The system refuses.
    pub(in crate::supervisor) fn own(&self) -> io::Result<()> {
        self.uplink.as_ref().map_or(Ok(()), LinkSockets::own)?;
        self.devices().iter().try_for_each(|planned| planned.sockets.lock().as_ref().map_or(Ok(()), DeviceSockets::own))
    }
}

/// A network that another process takes over, without its descriptors.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::supervisor) struct DescribedPlan {
    setup: NetworkSetup,
    uplink: Option<DescribedLink>,
    devices: Vec<DescribedDevice>,
    fault: Option<FaultSpec>,
    log: Option<LogFilter>,
    /// Devices with a connected VMM.
    connected: BTreeSet<String>,
    /// Devices whose VM lost its connection.
    lost: BTreeSet<String>,
    /// The last descriptor is the socket of the fallback server of its doorbell pages.
    #[serde(default)]
    has_fallback: bool,
}

impl DescribedPlan {
    /// Returns the name of the network.
    pub(in crate::supervisor) fn name(&self) -> &str {
        &self.setup.network.name
    }
}

/// A device of such a network.
#[derive(Debug, Serialize, Deserialize)]
struct DescribedDevice {
    device: Device,
    link: LinkState,
    doorbells: DoorbellSetup,
    sockets: DescribedSockets,
}
