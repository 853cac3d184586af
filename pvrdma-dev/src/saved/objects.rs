//! Restoring of objects: each goes through the checks of the command that creates such an object.

use std::sync::Arc;

use pvrdma_guest_memory::DmaView;
use pvrdma_pages::PageList;
use pvrdma_saved_state::pvrdma as saved;
use pvrdma_verbs::{
    CompletionSink, Object, QpInit, QueueError, QueuePair, RecvSource, SaveHca, SavedMr, SharedReceiveQueue, SrqInit,
};
use pvrdma_verbs_types::{Access, Gid, QpType, Qpn, RecvWr};

use super::convert;
use super::error::RestoreError;
use super::read::Restorer;
use crate::abi::cmd::{CreateMr, CreateQp, SrqAttr, mr_flags, qp_type};
use crate::abi::regs::VERSION_QP_HANDLE;
use crate::cmd;
use crate::core::Core;
use crate::datapath::{CqRing, SavedCqRing};
use crate::error::CmdError;
use crate::objects::{Context, Cq, GSI_HANDLE, GidInspect, HandleTable, KERNEL, Mr, Pd, Qp, Srq};

/// Bits of a QPN that hold the handle, from version 20 on.
const HANDLE_BITS: u32 = 0xffff;

/// Returns the pages if there are as many as `needed`.
fn exactly(pages: PageList, needed: u64) -> Result<PageList, CmdError> {
    let count = u64::from(pages.pages());
    if count == needed { Ok(pages) } else { Err(CmdError::Invalid("number of pages", count)) }
}

/// Checks that a memory region has only the rights, and the values of fields, that regions of its kind have.
fn check_mr(message: &saved::Mr, pages: u32) -> Result<(), CmdError> {
    let &saved::Mr { handle: _, pd: _, kind: _, start, length, access, max_pages } = message;
    let has_rights = |most: Access| Access::from_bits(access).is_some_and(|access| most.contains(access));
    let has_range = start != 0 || length != 0 || pages != 0;
    let fits = match message.kind() {
        saved::MrKind::User => has_rights(Access::all()) && max_pages == 0,
        saved::MrKind::Dma => has_rights(Access::LOCAL_WRITE) && !has_range && max_pages == 0,
        saved::MrKind::FastRegister => access == 0 && !has_range,
        saved::MrKind::None => false,
    };
    if fits { Ok(()) } else { Err(CmdError::Invalid("field of a memory region", access.into())) }
}

/// Returns the request that creates such a queue pair.
fn create_request(message: &saved::Qp) -> Result<CreateQp, CmdError> {
    let &saved::Qp {
        handle: _,
        qpn: _,
        qp_type: kind,
        pd,
        send_cq,
        recv_cq,
        has_srq,
        srq,
        max_send_wr,
        max_recv_wr,
        max_send_sge,
        max_recv_sge,
        signal_all,
        send_pages,
        send_ring: _,
        recv_ring: _,
    } = message;
    let qp_type = match saved::QpType::try_from(kind) {
        Ok(saved::QpType::Rc) => qp_type::RC,
        Ok(saved::QpType::Ud) => qp_type::UD,
        Ok(saved::QpType::Gsi) => qp_type::GSI,
        Ok(saved::QpType::None) | Err(_) => return Err(CmdError::Invalid("QP type", kind.cast_unsigned().into())),
    };
    let too_many = CmdError::Invalid("number of pages", send_pages.into());
    Ok(CreateQp {
        pd_handle: pd,
        send_cq_handle: send_cq.unwrap_or_default(),
        recv_cq_handle: recv_cq.unwrap_or_default(),
        srq_handle: srq.unwrap_or_default(),
        max_send_wr,
        max_recv_wr,
        max_send_sge,
        max_recv_sge,
        send_chunks: u16::try_from(send_pages).map_err(|_| too_many)?,
        sq_sig_all: signal_all.into(),
        qp_type,
        is_srq: has_srq.into(),
        ..CreateQp::default()
    })
}

impl<H: SaveHca> Restorer<'_, H> {
    /// Restores an object with its handle. There are objects only while commands are served.
    fn object<T>(
        &mut self,
        table: impl Fn(&Core<H>) -> &HandleTable<T>,
        handle: u32,
        restore: impl FnOnce(&mut Self) -> Result<Arc<T>, CmdError>,
    ) -> Result<(), RestoreError> {
        let core = self.core;
        let table = table(core);
        if self.session.is_none() {
            return Err(RestoreError::Misplaced("an object"));
        }
        let is_free = table.has_handle(handle) && table.get(handle).is_none();
        let free = if is_free { Ok(()) } else { Err(CmdError::Invalid("handle", handle.into())) };
        let object = free.and_then(|()| restore(self));
        let object = object.map_err(|error| RestoreError::object(table.what(), handle, error))?;
        table.insert_at(handle, object);
        Ok(())
    }

    pub(super) fn context(&mut self, message: &saved::Context) -> Result<(), RestoreError> {
        let &saved::Context { handle, uar_page } = message;
        self.object(
            |core| &core.objects.contexts,
            handle,
            |restorer| {
                let core = restorer.core;
                if !core.uar.bind(uar_page, handle) {
                    return Err(CmdError::Invalid("doorbell page", uar_page.into()));
                }
                core.renew_page(uar_page);
                Ok(Arc::new(Context::new(uar_page)))
            },
        )
    }

    pub(super) fn pd(&mut self, message: &saved::Pd) -> Result<(), RestoreError> {
        let &saved::Pd { handle, owner } = message;
        self.object(
            |core| &core.objects.pds,
            handle,
            |restorer| {
                let core = restorer.core;
                let owner = cmd::pd::owner(core, owner)?;
                let charge = core.charge(Object::Pd, &[])?;
                Ok(Arc::new(Pd { handle, owner, verbs: core.hca.create_pd()?, _charge: charge }))
            },
        )
    }

    pub(super) fn cq(&mut self, message: &saved::Cq) -> Result<(), RestoreError> {
        let &saved::Cq { handle, owner, entries, tail, armed, unheard } = message;
        let armed = convert::restore_armed(convert::number("state of a completion queue", armed)?);
        let unheard = unheard.map(convert::restore_unheard).transpose()?;
        self.object(
            |core| &core.objects.cqs,
            handle,
            |restorer| {
                let (core, pages) = (restorer.core, restorer.take_pages());
                let pages = |needed| exactly(pages, if tail.is_some() { needed } else { 1 });
                let (owner, pages, charge) = cmd::cq::checked(core, owner, entries, pages)?;
                restorer.rings.push(pages.clone());
                let saved = SavedCqRing { entries, pages, tail, armed, unheard };
                let ring = CqRing::restore(handle, saved, owner != KERNEL, Arc::clone(&core.hub))?;
                let verbs = core.hca.create_cq(Arc::<CqRing>::clone(&ring) as Arc<dyn CompletionSink>)?;
                Ok(Arc::new(Cq { owner, ring, verbs, _charge: charge }))
            },
        )
    }

    pub(super) fn srq(&mut self, message: saved::Srq) -> Result<(), RestoreError> {
        let saved::Srq { handle, pd, max_wr, max_sge, limit, ring } = message;
        let position = convert::restore_position(ring, max_wr)?;
        self.object(
            |core| &core.objects.srqs,
            handle,
            |restorer| {
                let (core, pages, part) = (restorer.core, restorer.take_pages(), restorer.take_part());
                restorer.rings.push(pages.clone());
                let attrs = SrqAttr { max_wr, max_sge, srq_limit: limit };
                let pages = |needed| exactly(pages, needed);
                let make = |init: SrqInit<'_, H>| core.hca.restore_srq(init, &part);
                cmd::srq::build(core, (handle, pd), attrs, pages, |ring| ring.at(position), make)
            },
        )
    }

    pub(super) fn mr(&mut self, message: &saved::Mr) -> Result<(), RestoreError> {
        let &saved::Mr { handle, pd, kind, start, length, access, max_pages } = message;
        let (flags, count) = match convert::number("kind of a memory region", kind)? {
            saved::MrKind::User => (0, None),
            saved::MrKind::Dma => (mr_flags::DMA, Some(0)),
            saved::MrKind::FastRegister => (mr_flags::FAST_REGISTER, Some(max_pages)),
            saved::MrKind::None => {
                return Err(RestoreError::Invalid { what: "kind of a memory region", value: 0 });
            }
        };
        self.object(
            |core| &core.objects.mrs,
            handle,
            |restorer| {
                let (core, pages, adapter) = (restorer.core, restorer.take_pages(), restorer.take_part());
                let nchunks = count.unwrap_or_else(|| pages.pages());
                check_mr(message, pages.pages())?;
                let request =
                    CreateMr { start, length, pdir_dma: 0, pd_handle: pd, access_flags: access, flags, nchunks };
                let (pd, request, charge) = cmd::mr::checked(core, &request, || Ok(pages))?;
                let verbs = core.hca.restore_mr(&pd.verbs, SavedMr { request, adapter })?;
                Ok(Arc::new(Mr { pd, verbs, _charge: charge }))
            },
        )
    }

    pub(super) fn qp(&mut self, message: saved::Qp) -> Result<(), RestoreError> {
        let handle = message.handle;
        if self.session.is_some() && handle == GSI_HANDLE && self.core.objects.qps.get(handle).is_none() {
            let qp = self.build_qp(message).map_err(|error| RestoreError::object("queue pair", handle, error))?;
            self.core.objects.qps.insert_at(handle, qp);
            return Ok(());
        }
        self.object(|core| &core.objects.qps, handle, |restorer| restorer.build_qp(message))
    }

    fn build_qp(&mut self, message: saved::Qp) -> Result<Arc<Qp<H>>, CmdError> {
        let core = self.core;
        let (pages, part) = (self.take_pages(), self.take_part());
        self.rings.push(pages.clone());
        let request = create_request(&message)?;
        let gone = Gone {
            cqs: [message.send_cq.is_none(), message.recv_cq.is_none()],
            srq: message.has_srq && message.srq.is_none(),
        };
        let position = |ring, size: u32| {
            convert::restore_position(ring, size).map_err(|_| CmdError::Invalid("state of a ring", size.into()))
        };
        let send_ring = position(message.send_ring, message.max_send_wr)?;
        let recv_ring = position(message.recv_ring, message.max_recv_wr)?;
        let parts = self.parts(&request, gone)?;
        let (handle, qpn) = (message.handle, message.qpn);
        self.check_number(handle, qpn, parts.qp_type)?;
        let pages = |needed| exactly(pages, needed);
        let place =
            |(send, recv): cmd::qp::Rings| Ok((send.at(send_ring)?, recv.map(|recv| recv.at(recv_ring)).transpose()?));
        let make = |init: QpInit<'_, H>| core.hca.restore_qp(init, &part);
        let qp = cmd::qp::build(core, (handle, Qpn::new(qpn)), parts, &request, pages, place, make)?;
        if qp.verbs.qpn().get() != qpn {
            return Err(CmdError::Invalid("QPN", qpn.into()));
        }
        Ok(qp)
    }

    /// Checks that a QPN is one that the device gives out with this handle.
    fn check_number(&self, handle: u32, qpn: u32, kind: QpType) -> Result<(), CmdError> {
        let session = self.session.ok_or(CmdError::Invalid("phase", 0))?;
        let fits = if (kind == QpType::Gsi) != (handle == GSI_HANDLE) {
            false
        } else if kind == QpType::Gsi || session.version < VERSION_QP_HANDLE {
            qpn == handle
        } else {
            qpn & HANDLE_BITS == handle && qpn <= 0x00ff_ffff
        };
        if fits { Ok(()) } else { Err(CmdError::Invalid("QPN", qpn.into())) }
    }

    pub(super) fn gid(&mut self, message: saved::Gid) -> Result<(), RestoreError> {
        let saved::Gid { index, gid, vlan } = message;
        let invalid = |what, value| RestoreError::Invalid { what, value };
        if self.session.is_none() {
            return Err(RestoreError::Misplaced("a GID"));
        }
        let at = cmd::bind::index(self.core, index).map_err(|_| invalid("GID index", index.into()))?;
        let length = gid.len() as u64;
        let gid = Gid(gid.try_into().map_err(|_| invalid("GID", length))?);
        let vlan = match u16::try_from(vlan) {
            Ok(0) => None,
            Ok(vlan) if vlan < cmd::bind::NO_VLAN => Some(vlan),
            _ => return Err(invalid("VLAN", vlan.into())),
        };
        let kind = self.core.config.roce;
        self.core.objects.gids.lock().insert(GidInspect { index: at, gid, kind, vlan });
        Ok(())
    }
}

/// Objects that the guest has destroyed, although a QP uses them.
#[derive(Clone, Copy)]
struct Gone {
    /// Completion queues of sends and receives.
    cqs: [bool; 2],
    srq: bool,
}

impl<H: SaveHca> Restorer<'_, H> {
    /// Checks the parts of a QP. In place of an object that no longer exists, the QP gets an ended one: the QP is then
    /// in its error state and would report nothing to it.
    fn parts(&self, request: &CreateQp, gone: Gone) -> Result<cmd::qp::Parts<H>, CmdError> {
        let objects = &self.core.objects;
        let pd = objects.pds.find(request.pd_handle)?;
        let ended = gone.cqs.contains(&true).then(|| self.ended_cq(&pd)).transpose()?;
        let cq = |gone: bool, handle| match &ended {
            Some(ended) if gone => Ok(Arc::clone(ended)),
            _ => objects.cqs.find(handle),
        };
        let [send_gone, recv_gone] = gone.cqs;
        let (send_cq, recv_cq) = (cq(send_gone, request.send_cq_handle)?, cq(recv_gone, request.recv_cq_handle)?);
        let srq = match request.is_srq {
            0 => None,
            _ if gone.srq => Some(self.ended_srq(&pd)?),
            _ => Some(objects.srqs.find(request.srq_handle)?),
        };
        cmd::qp::checked_parts(self.core, request, pd, (send_cq, recv_cq), srq)
    }

    fn ended_cq(&self, pd: &Pd<H>) -> Result<Arc<Cq<H>>, CmdError> {
        let core = self.core;
        let charge = core.charge(Object::Cq, &[])?;
        let ring = CqRing::ended(Arc::clone(&core.hub));
        let verbs = core.hca.create_cq(Arc::<CqRing>::clone(&ring) as Arc<dyn CompletionSink>)?;
        Ok(Arc::new(Cq { owner: pd.owner, ring, verbs, _charge: charge }))
    }

    fn ended_srq(&self, pd: &Arc<Pd<H>>) -> Result<Arc<Srq<H>>, CmdError> {
        let core = self.core;
        let (max_wr, max_sge) = (1, 1);
        let charge = core.charge(Object::Srq(max_wr), &[])?;
        let queue = Box::new(Empty);
        let init = SrqInit { cookie: u32::MAX, pd: &pd.verbs, queue, limit: 0, max_wr, max_sge };
        let verbs = core.hca.create_srq(init)?;
        verbs.destroy();
        Ok(Arc::new(Srq::ended(Arc::clone(pd), verbs, charge)))
    }
}

/// The ring of a queue that has ended.
struct Empty;

impl RecvSource for Empty {
    fn pop(&mut self, _view: &DmaView<'_>, _work: &mut RecvWr) -> Result<bool, QueueError> {
        Ok(false)
    }

    fn posted(&mut self, _view: &DmaView<'_>) -> Result<u32, QueueError> {
        Ok(0)
    }

    fn reset(&mut self) {}
}
