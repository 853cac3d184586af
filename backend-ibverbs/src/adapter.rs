//! What the objects of one device share.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock};
use pvrdma_guest_memory::{DmaSpace, MemoryWatcher};
use pvrdma_verbs::{
    AsyncEvent, Counter, DeviceContext, EventSink, Gid, GidType, Mtu, PortAttributes, PortEvent, PortState, QpEvent,
    SrqEvent, VerbsError,
};

use crate::addresses::{AddedAddress, MAX_ADDED};
use crate::backend::Shared;
use crate::counters::registered_bytes;
pub(crate) use crate::counters::{Counters, bump};
use crate::cq::Cq;
use crate::gid::{Bound, HostGid};
use crate::gsi::Gsi;
use crate::limits::Limit;
use crate::mr::MrTable;
use crate::poller;
use crate::qp::Qp;
use crate::srq::Srq;
use crate::sys::DeviceAttr;
use crate::verbs::{AsyncNotice, Channel, HostDevice};
use crate::worker::Worker;

const GID_INDICES: usize = 256;

/// The adapter of one device.
pub(crate) struct Adapter {
    pub(crate) me: Weak<Self>,
    pub(crate) name: String,
    pub(crate) memory: Arc<DmaSpace>,
    pub(crate) events: Arc<dyn EventSink>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) device: Arc<HostDevice>,
    pub(crate) channel: Arc<Channel>,
    pub(crate) attributes: DeviceAttr,
    pub(crate) pinned: Limit,
    pub(crate) mrs: MrTable,
    pub(crate) counters: Arc<Counters>,
    /// By the address of the host's object.
    pub(crate) cqs: RwLock<HashMap<usize, Weak<Cq>>>,
    pub(crate) srqs: RwLock<HashMap<usize, Weak<Srq>>>,
    /// By number on the wire.
    pub(crate) qps: RwLock<HashMap<u32, Weak<Qp>>>,
    pub(crate) gsi: Mutex<Option<Weak<Gsi>>>,
    gids: RwLock<Box<[Option<Bound>]>>,
    /// Addresses that are on the host's interface because of this device.
    added: Mutex<HashMap<Gid, AddedAddress>>,
    poller: Mutex<Option<Worker>>,
}

impl fmt::Debug for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adapter").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Adapter {
    /// Makes it and starts its thread.
    pub(crate) fn start(
        device: Arc<HostDevice>,
        context: DeviceContext,
        shared: Arc<Shared>,
    ) -> Result<Arc<Self>, VerbsError> {
        let attributes = device.attributes()?;
        device.make_nonblocking()?;
        let channel = Arc::new(Channel::new(&device)?);
        let adapter = Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            name: context.name,
            memory: context.memory,
            events: context.events,
            pinned: Limit::new(shared.config.max_pinned, "registered memory"),
            shared,
            device,
            channel,
            attributes,
            mrs: MrTable::default(),
            counters: Arc::default(),
            cqs: RwLock::default(),
            srqs: RwLock::default(),
            qps: RwLock::default(),
            gsi: Mutex::new(None),
            gids: RwLock::new(vec![None; GID_INDICES].into_boxed_slice()),
            added: Mutex::default(),
            poller: Mutex::new(None),
        });
        let watcher: Weak<dyn MemoryWatcher> = Weak::<Self>::clone(&adapter.me);
        adapter.memory.watch(watcher);
        *adapter.poller.lock() = Some(poller::start(&adapter)?);
        Ok(adapter)
    }

    /// Ends the thread. The caller may be that thread.
    pub(crate) fn stop(&self) {
        let poller = self.poller.lock().take();
        drop(poller);
    }

    pub(crate) fn counter_list(&self) -> Vec<Counter> {
        let mut list = self.counters.list();
        list.push(registered_bytes(self.pinned.used()));
        if let Some(manager) = &self.shared.manager {
            list.extend(manager.counters());
        }
        list
    }

    /// What is bound at a table index.
    pub(crate) fn gid(&self, index: u8) -> Option<Bound> {
        self.gids.read().get(usize::from(index)).copied().flatten()
    }

    pub(crate) fn bind_gid(&self, index: u8, gid: Gid, kind: GidType) -> Result<(), VerbsError> {
        let shared = &self.shared;
        let found = shared.gids.find(gid, kind);
        let host = found.unwrap_or(shared.default_gid);
        let bound = Bound { gid, kind, host };
        // Before anything of the host changes: another guest may have the address.
        shared.fabric.bind(&self.me, bound)?;
        self.replace_gid(index, Some(bound));
        if found.is_some() {
            return Ok(());
        }
        match self.add_to_host(gid, kind) {
            Some(host) => {
                let bound = Bound { gid, kind, host };
                shared.fabric.bind(&self.me, bound)?;
                self.replace_gid(index, Some(bound));
            }
            None => log::debug!("{}: the host does not have {gid}, {} stands for it", self.name, host.gid),
        }
        Ok(())
    }

    /// Puts a guest's address on the host's interface, if that is wanted; what the host's table then has.
    fn add_to_host(&self, gid: Gid, kind: GidType) -> Option<HostGid> {
        let addresses = self.shared.addresses.as_ref()?;
        let mut added = self.added.lock();
        if !added.contains_key(&gid) {
            let address = if added.len() < MAX_ADDED { addresses.add(gid) } else { None };
            let Some(address) = address else {
                bump(&self.counters.addresses_refused);
                return None;
            };
            added.insert(gid, address);
            bump(&self.counters.addresses_added);
        }
        let host = self.shared.gids.await_new(gid, kind);
        if host.is_none() {
            log::warn!("{}: {gid} was added to the host's interface and is not among the adapter's GIDs", self.name);
            added.remove(&gid);
        }
        host
    }

    pub(crate) fn replace_gid(&self, index: u8, new: Option<Bound>) {
        let mut gids = self.gids.write();
        let Some(slot) = gids.get_mut(usize::from(index)) else { return };
        let old = std::mem::replace(slot, new);
        if let Some(old) = old
            && !gids.iter().flatten().any(|bound| bound.gid == old.gid)
        {
            self.shared.fabric.unbind(&self.me, old.gid);
            self.added.lock().remove(&old.gid);
        }
    }

    /// The port as the guest sees it. A device that is lost has a port that is down.
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
                log::warn!("{}: the host's port cannot be queried: {error}", self.name);
                let (max_mtu, active_mtu) = (Mtu::M4096, Mtu::M1024);
                PortAttributes { state: PortState::Down, max_mtu, active_mtu, max_message: 1 << 30 }
            }
        }
    }

    pub(crate) fn qp(&self, qpn: u32) -> Option<Arc<Qp>> {
        self.qps.read().get(&qpn)?.upgrade()
    }

    /// The connection manager's queue pair, if the guest has one.
    pub(crate) fn gsi(&self) -> Option<Arc<Gsi>> {
        self.gsi.lock().as_ref().and_then(Weak::upgrade)
    }

    fn event(&self, event: AsyncEvent) {
        self.events.event(&self.memory.view(), event);
    }

    /// An event of the host becomes one of the guest.
    pub(crate) fn notice(&self, notice: AsyncNotice) {
        bump(&self.counters.async_events);
        let qp_event = match notice.kind {
            1 => QpEvent::Fatal,
            2 => QpEvent::RequestError,
            3 => QpEvent::AccessError,
            4 => QpEvent::CommunicationEstablished,
            5 => QpEvent::SendQueueDrained,
            16 => QpEvent::LastWqeReached,
            _ => return self.other_notice(notice),
        };
        let found = self.qps.read().values().filter_map(Weak::upgrade).find(|qp| qp.address() == notice.element);
        if let Some(qp) = found {
            qp.host_event(qp_event);
        }
    }

    fn other_notice(&self, notice: AsyncNotice) {
        match notice.kind {
            0 => {
                let cq = self.cqs.read().get(&notice.element).and_then(Weak::upgrade);
                if let Some(cq) = cq {
                    log::error!("{}: the host's completion queue overran", self.name);
                    cq.fail(self);
                }
            }
            8 => self.lost(),
            9 => self.event(AsyncEvent::Port(PortEvent::Active)),
            10 => self.event(AsyncEvent::Port(PortEvent::Error)),
            14 | 15 => {
                let srq = self.srqs.read().get(&notice.element).and_then(Weak::upgrade);
                if let Some(srq) = srq {
                    let event = if notice.kind == 15 { SrqEvent::LimitReached } else { SrqEvent::Error };
                    srq.host_event(self, event);
                }
            }
            other => log::debug!("{}: event {other} of the host means nothing to guests", self.name),
        }
    }

    /// The host's device is gone: everything ends with an error, and nothing stays registered.
    fn lost(&self) {
        log::error!("{}: the host's device {} is lost", self.name, self.device.name());
        self.event(AsyncEvent::Port(PortEvent::Error));
        let qps: Vec<_> = self.qps.read().values().filter_map(Weak::upgrade).collect();
        for qp in qps {
            qp.host_event(QpEvent::Fatal);
            qp.abandon();
        }
        self.disabled();
    }
}

impl MemoryWatcher for Adapter {
    fn unmapped(&self, ranges: &[(u64, u64)]) {
        let revoked = self.mrs.revoke(|iova, len| {
            ranges.iter().any(|&(start, count)| iova < start.saturating_add(count) && start < iova.saturating_add(len))
        });
        self.counters.regions_revoked.add(revoked);
    }

    fn disabled(&self) {
        let revoked = self.mrs.revoke(|_, _| true);
        self.counters.regions_revoked.add(revoked);
    }
}
