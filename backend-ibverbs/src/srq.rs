//! Shared receive queues.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use parking_lot::Mutex;
use pvrdma_base::Snapshot;
use pvrdma_guest_memory::DmaView;
use pvrdma_verbs::{AsyncEvent, RecvSource, SrqEvent, VerbsError};
use serde::Serialize;

use crate::adapter::Adapter;
use crate::directory::Directory;
use crate::inflight::RecvInflight;
use crate::mr::MrTable;
use crate::qp::{Filled, RecvSide};
use crate::verbs::{HostPd, HostSrq};

/// Like [`SrqInit`](pvrdma_verbs::SrqInit), with the backend's objects.
pub(crate) struct SrqParts {
    pub(crate) cookie: u32,
    pub(crate) pd: Arc<HostPd>,
    pub(crate) queue: Box<dyn RecvSource>,
    pub(crate) limit: u32,
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
}

/// A shared receive queue of the host, and the guest's ring that feeds it.
pub(crate) struct Srq {
    adapter: Arc<Adapter>,
    mrs: Arc<MrTable>,
    srqs: Arc<Directory<usize, Self>>,
    pd: Arc<HostPd>,
    cookie: u32,
    pub(crate) max_wr: u32,
    /// Changed only while `arming` is held.
    limit: AtomicU32,
    arming: Mutex<Arming>,
    /// `None` once it is destroyed.
    side: Mutex<Option<RecvSide>>,
    host: Mutex<Option<Arc<HostSrq>>>,
    pub(crate) inflight: Mutex<RecvInflight>,
    /// The ring could not be read.
    broken: AtomicBool,
}

/// State of arming the limit. Held while the limit changes, here and on the host.
#[derive(Default)]
struct Arming {
    /// Number of times the guest has set the limit.
    commands: u64,
    /// The host's limit has fired too early. It is armed again once receives have been posted to the host, or none are
    /// left to post.
    again: bool,
}

/// Snapshot of a shared receive queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct SrqInspect {
    /// Number of receives below which the guest is notified, 0 if it is not.
    limit: u32,
    /// Number of receives posted to the host.
    receives_in_flight: Snapshot<usize>,
    /// Maximum number of receives posted to the host.
    max_receives_in_flight: u32,
    /// The ring could not be read.
    broken: bool,
}

impl fmt::Debug for Srq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Srq").field("cookie", &self.cookie).finish_non_exhaustive()
    }
}

impl Srq {
    pub(crate) fn create(
        adapter: &Arc<Adapter>,
        mrs: &Arc<MrTable>,
        srqs: &Arc<Directory<usize, Self>>,
        parts: SrqParts,
    ) -> Result<Arc<Self>, VerbsError> {
        let SrqParts { cookie, pd, queue, limit, max_wr, max_sge } = parts;
        let (max_wr, max_sge) = (max_wr.max(1), max_sge.max(1));
        // An adapter may not have room for a long queue with many SGEs per request. In that case the guest's own number
        // is tried.
        let host = HostSrq::new(&pd, max_wr, adapter.sges(max_sge)).or_else(|_| HostSrq::new(&pd, max_wr, max_sge))?;
        let host = Arc::new(host);
        let srq = Arc::new(Self {
            adapter: Arc::clone(adapter),
            mrs: Arc::clone(mrs),
            srqs: Arc::clone(srqs),
            pd,
            cookie,
            max_wr,
            limit: AtomicU32::new(0),
            arming: Mutex::default(),
            side: Mutex::new(Some(RecvSide::new(queue))),
            host: Mutex::new(Some(Arc::clone(&host))),
            inflight: Mutex::new(RecvInflight::new(max_wr)),
            broken: AtomicBool::new(false),
        });
        srqs.insert(host.address(), &srq);
        srq.set_limit(limit);
        Ok(srq)
    }

    /// Returns a snapshot. Does not wait for locks.
    pub(crate) fn inspect(&self) -> SrqInspect {
        SrqInspect {
            limit: self.limit(),
            receives_in_flight: self.inflight.try_lock().map(|inflight| inflight.len()).into(),
            max_receives_in_flight: self.max_wr,
            broken: self.broken.load(Ordering::Relaxed),
        }
    }

    /// Returns the host's queue, or `None` once it is destroyed.
    pub(crate) fn host(&self) -> Option<Arc<HostSrq>> {
        self.host.lock().clone()
    }

    /// Posts the receives in the guest's ring, as far as there is room on the host.
    pub(crate) fn run(&self) {
        let Some(host) = self.host() else { return };
        let mut side = self.side.lock();
        let Some(side) = side.as_mut() else { return };
        if self.post_all(&host, side) {
            self.arm_again(&host);
        }
    }

    /// Returns `true` if receives were posted to the host, or none are left in the ring.
    fn post_all(&self, host: &HostSrq, side: &mut RecvSide) -> bool {
        let mut posted = false;
        loop {
            let view = self.adapter.memory.view();
            let filled = side.fill(&self.mrs, &view, &self.pd, &self.inflight);
            if let Filled::Broken(error) = &filled {
                self.adapter.log.warn(module_path!(), format_args!("shared receive queue {}: {error}", self.cookie));
                if !self.broken.swap(true, Ordering::AcqRel) {
                    self.event(&view, SrqEvent::Error);
                }
            }
            drop(view);
            if side.is_filled() {
                let (_, result) = side.post(&self.adapter, |batch| host.post(batch), &self.inflight);
                if let Err(error) = result {
                    self.adapter
                        .log
                        .warn(module_path!(), format_args!("the host takes no receive for an SRQ: {error}"));
                    return posted;
                }
                posted = true;
            }
            match filled {
                Filled::More if side.is_filled() => {}
                Filled::More => return posted,
                Filled::Empty | Filled::Broken(_) => return true,
            }
        }
    }

    /// Returns the number of receives in the guest's ring that are not posted to the host yet.
    fn waiting(&self) -> u32 {
        let mut side = self.side.lock();
        let view = self.adapter.memory.view();
        side.as_mut().and_then(|side| side.source.posted(&view).ok()).unwrap_or(0)
    }

    fn event(&self, view: &DmaView<'_>, event: SrqEvent) {
        self.adapter.events.event(view, AsyncEvent::Srq(event, self.cookie));
    }

    /// Handles an event of the host.
    pub(crate) fn host_event(&self, event: SrqEvent) {
        if event != SrqEvent::LimitReached || self.limit_reached() {
            self.event(&self.adapter.memory.view(), event);
        }
    }

    /// Handles the limit event of the host, which disarms the host's limit. Returns `true` if the guest's limit is
    /// reached. Receives that are in the guest's ring but not posted to the host count as well; if they keep the number
    /// above the limit, it is armed again.
    fn limit_reached(&self) -> bool {
        let (commands, limit) = {
            let arming = self.arming.lock();
            (arming.commands, self.limit())
        };
        if limit == 0 {
            return false;
        }
        let waiting = self.waiting() > 0;
        {
            let mut arming = self.arming.lock();
            if arming.commands != commands {
                // A command has armed the limit again in the meantime, so this event belongs to an old limit.
                return false;
            }
            if !waiting {
                self.limit.store(0, Ordering::Release);
                return true;
            }
            // Arming the limit now would fire it again at once, repeatedly, while the host has no room for waiting
            // receives.
            arming.again = true;
        }
        self.run();
        false
    }

    /// Arms the host's limit again if it fired early.
    fn arm_again(&self, host: &HostSrq) {
        let mut arming = self.arming.lock();
        if std::mem::take(&mut arming.again) {
            self.arm_host(host);
        }
    }

    /// Sets the limit and arms its event, or disarms it with 0.
    pub(crate) fn set_limit(&self, limit: u32) {
        let host = self.host();
        let mut arming = self.arming.lock();
        *arming = Arming { commands: arming.commands.wrapping_add(1), again: false };
        self.limit.store(limit, Ordering::Release);
        if let Some(host) = host {
            self.arm_host(&host);
        }
    }

    /// Sets the limit on the host. The caller holds `arming`.
    fn arm_host(&self, host: &HostSrq) {
        let limit = self.limit();
        if let Err(error) = host.set_limit(limit) {
            self.adapter.log.warn(module_path!(), format_args!("the host refuses an SRQ limit of {limit}: {error}"));
        }
    }

    /// Returns the armed limit, 0 after it fired.
    pub(crate) fn limit(&self) -> u32 {
        self.limit.load(Ordering::Acquire)
    }

    /// Destroys the queue. When this returns, the ring is no longer accessed.
    pub(crate) fn destroy(&self) {
        let side = self.side.lock().take();
        let host = self.host.lock().take();
        if let Some(host) = &host {
            self.srqs.remove(host.address());
        }
        // The queue pairs keep the host's object alive until they end, but no more receives are posted to it.
        drop((side, host));
    }
}
