//! Resources common to all objects of a device: the host's device, the guest's memory, and the sinks of events and
//! counts. The objects that are created with them are in [`Objects`](crate::objects::Objects); this module does not
//! depend on them.

use std::fmt;
use std::sync::Arc;

use pvrdma_base::{Counter, DeviceLog};
use pvrdma_guest_memory::DmaSpace;
use pvrdma_packet::MacAddr;
use pvrdma_pages::PAGE_SIZE;
use pvrdma_verbs::{AsyncEvent, DeviceContext, EventSink, HcaLimits, PortAttributes, VerbsError};
use pvrdma_verbs_types::{Mtu, PortState};

use crate::cm_paths::CmPaths;
use crate::contiguous_mapping;
use crate::counters::{Counters, registered_bytes};
use crate::gid::{GidTable, Member};
use crate::limits::{self, Limit};
use crate::resolver::Resolver;
use crate::shared::Shared;
use crate::verbs::{Channel, HostDevice};

/// The adapter of one device.
pub(crate) struct Adapter {
    /// Name of the device, for logs.
    pub(crate) name: String,
    /// Log for conditions caused by the guest, a peer or the host's adapter.
    pub(crate) log: Arc<DeviceLog>,
    pub(crate) memory: Arc<DmaSpace>,
    pub(crate) events: Arc<dyn EventSink>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) device: Arc<HostDevice>,
    pub(crate) channel: Arc<Channel>,
    /// Limits of the host's adapter, as reported at start.
    pub(crate) limits: HcaLimits,
    /// Bytes that are registered with the host.
    pub(crate) pinned: Limit,
    /// Number of pieces of scattered memory that are mapped side by side or registered separately.
    pub(crate) mappings: Limit,
    /// Creates address handles.
    pub(crate) resolver: Resolver,
    /// Queue pairs that wait for the thread that connects them through the host.
    pub(crate) cm_paths: CmPaths,
    /// Entry of the device among those of this process.
    pub(crate) member: Arc<Member>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) gids: GidTable,
}

impl fmt::Debug for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adapter").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Adapter {
    /// Queries the limits of the host's device and makes its event descriptor non-blocking.
    ///
    /// # Errors
    /// [`VerbsError::Host`]: the host's device refuses one of these.
    pub(crate) fn new(
        device: Arc<HostDevice>,
        mac: MacAddr,
        context: DeviceContext,
        shared: Arc<Shared>,
    ) -> Result<Self, VerbsError> {
        let limits = limits::of(&device.attributes()?);
        device.make_nonblocking()?;
        let channel = Arc::new(Channel::new(&device)?);
        let member = Arc::new(Member { rules: context.rules.clone(), ..Member::default() });
        let resolver = Resolver::start(&context.name)?;
        Ok(Self {
            gids: GidTable::new(mac, &context, Arc::clone(&shared), Arc::clone(&member)),
            name: context.name,
            log: context.log,
            memory: context.memory,
            events: context.events,
            pinned: Limit::new(shared.config.max_pinned, "registered memory"),
            mappings: Limit::new(shared.config.max_mappings, "piece of scattered memory (max_mappings)"),
            resolver,
            cm_paths: CmPaths::new()?,
            shared,
            device,
            channel,
            limits,
            counters: Arc::clone(&member.counters),
            member,
        })
    }

    /// Returns the number of SGEs that a queue of the host needs for requests with `wanted` SGEs: the adapter's maximum
    /// if one SGE of the guest may become several.
    pub(crate) fn sges(&self, wanted: u32) -> u32 {
        let pieces = self.memory.view().all_pieces();
        let huge = pieces.iter().any(|(_, piece)| contiguous_mapping::page_size(&piece.mapping) as u64 > PAGE_SIZE);
        if huge { wanted.max(self.limits.max_sge) } else { wanted }
    }

    pub(crate) fn counter_list(&self) -> Vec<Counter> {
        let mut list = self.counters.list();
        list.push(registered_bytes(self.pinned.used()));
        if let Some(manager) = &self.shared.manager {
            list.extend(manager.counters());
        }
        list
    }

    /// Returns the port as seen by the guest. The port of a lost device is down.
    pub(crate) fn port(&self) -> PortAttributes {
        let mtu = |code: u32| Mtu::try_from(code).unwrap_or(Mtu::M1024);
        match self.device.port(self.shared.config.port) {
            Ok(port) => PortAttributes {
                state: if port.active { PortState::Active } else { PortState::Down },
                max_mtu: mtu(port.max_mtu),
                active_mtu: mtu(port.active_mtu),
                max_message: port.max_message,
            },
            Err(error) => {
                self.log.warn(module_path!(), format_args!("the host's port cannot be queried: {error}"));
                let (max_mtu, active_mtu) = (Mtu::M4096, Mtu::M1024);
                PortAttributes { state: PortState::Down, max_mtu, active_mtu, max_message: 1 << 30 }
            }
        }
    }

    /// Reports an event to the guest. The caller holds no view of the guest's memory.
    pub(crate) fn event(&self, event: AsyncEvent) {
        self.events.event(&self.memory.view(), event);
    }
}
