//! Access to the host's adapter without a guest (feature `testing`), as a native program has it, for comparison with a
//! device.

use std::io;
use std::sync::Arc;

use pvrdma_guest_memory::HostPiece;
use pvrdma_verbs_types::{Access, Mtu, QpAttrMask, QpAttrs, QpState, Qpn};
use vm_memory::mmap::MmapRegion;

use crate::config::GidIndex;
use crate::contiguous_mapping::ContiguousMapping;
use crate::convert::{self, Route};
use crate::gid::{HostGid, HostGids};
use crate::sys::library::Library;
use crate::sys::{QPT_RC, QpCap, SEND_SIGNALED, Sge, Wc};
use crate::verbs::{Channel, HostCq, HostDevice, HostMr, HostOp, HostPd, HostQp, HostQpInit, RecvBatch, SendBatch};

/// Maximum number of requests in flight of a [`BareQp`].
pub const DEPTH: u32 = 64;
/// Maximum number of receives of a [`BareQp`].
pub const RECEIVES: u32 = 512;

/// A connected queue pair of the host's adapter, with a registered buffer and a completion queue.
#[expect(missing_debug_implementations, reason = "for benchmarks")]
pub struct BareQp {
    qp: HostQp,
    cq: Arc<HostCq>,
    mr: HostMr,
    /// Address of the buffer, also used as its registered address, because some devices support no other.
    start: u64,
    gid: HostGid,
    batch: SendBatch,
    entries: [Wc; DEPTH as usize],
}

impl BareQp {
    /// Creates a queue pair on port 1 of a device of the host, with a buffer of `bytes` bytes.
    ///
    /// # Errors
    /// The device does not exist, or the adapter refuses.
    pub fn open(device: &str, bytes: usize) -> io::Result<Self> {
        let library = Library::load().map_err(io::Error::other)?;
        let device = Arc::new(HostDevice::open(&library, device).map_err(io::Error::other)?);
        let gids = HostGids::new(device.name(), 1, device.port(1)?.gids);
        let gid = gids.choose(GidIndex::Auto).map_err(io::Error::other)?;
        let pd = Arc::new(HostPd::new(&device)?);
        let channel = Arc::new(Channel::new(&device)?);
        let cq = Arc::new(HostCq::new(&channel, 2 * DEPTH)?);
        let memory = Arc::new(MmapRegion::new(bytes).map_err(io::Error::other)?);
        let mapping = ContiguousMapping::map(&[HostPiece { mapping: memory, offset: 0, len: bytes, writable: true }])?;
        let start = mapping.as_ptr().addr() as u64;
        let mr = HostMr::register(&pd, mapping, 0, bytes, start, convert::access(Access::all()))?;
        let cap =
            QpCap { max_send_wr: DEPTH, max_recv_wr: RECEIVES, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
        let (send_cq, recv_cq) = (Arc::clone(&cq), Arc::clone(&cq));
        let qp = HostQp::new(HostQpInit { pd, send_cq, recv_cq, srq: None, cap, qp_type: QPT_RC })?;
        Ok(Self { qp, cq, mr, start, gid, batch: SendBatch::default(), entries: [Wc::default(); DEPTH as usize] })
    }

    /// Connects this end to `peer`, which must be connected to this one likewise.
    ///
    /// # Errors
    /// The adapter refuses.
    pub fn connect(&self, peer: &Self) -> io::Result<()> {
        use QpAttrMask as M;
        let attrs = QpAttrs {
            dest_qpn: Qpn::new(peer.qp.number()),
            access: Access::all(),
            path_mtu: Mtu::M1024,
            max_rd_atomic: 4,
            max_dest_rd_atomic: 4,
            min_rnr_timer: 12,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            ..QpAttrs::default()
        };
        let route = Route { flow_label: 0, hop_limit: 64, traffic_class: 0, service_level: 0 };
        let steps = [
            (QpState::Init, M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS),
            (QpState::Rtr, M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER),
            (QpState::Rts, M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::SQ_PSN | M::MAX_QP_RD_ATOMIC),
        ];
        for (state, mask) in steps {
            let (mut attr, bits) = convert::attributes(&QpAttrs { state, ..attrs }, mask | M::STATE, 1);
            attr.ah_attr = convert::route(self.gid.gid, self.gid.index, 1, &route);
            self.qp.modify(&attr, bits)?;
        }
        Ok(())
    }

    /// Posts RDMA writes of `length` bytes from this buffer to the same offsets of the peer's. Each write completes.
    ///
    /// # Errors
    /// The adapter does not accept all of them.
    pub fn post_writes(
        &mut self,
        peer: &Self,
        offsets: impl IntoIterator<Item = usize>,
        length: u32,
    ) -> io::Result<()> {
        self.batch.clear();
        for offset in offsets {
            let (from, to) = (self.start + offset as u64, peer.start + offset as u64);
            let sge = Sge { addr: from, length, lkey: self.mr.lkey() };
            let op = HostOp::Write { addr: to, rkey: peer.mr.rkey(), immediate: None };
            self.batch.push(0, SEND_SIGNALED, op, &[sge]);
        }
        self.qp.post_send(&mut self.batch).1
    }

    /// Posts a receive of `length` bytes, which completes when the queue pair ends.
    ///
    /// # Errors
    /// The adapter does not accept the receive.
    pub fn post_receive(&self, length: u32) -> io::Result<()> {
        let mut batch = RecvBatch::default();
        batch.push(0, &[Sge { addr: self.start, length, lkey: self.mr.lkey() }]);
        self.qp.post_recv(&mut batch).1
    }

    /// Requests an event for the next completion. No thread waits for the event.
    ///
    /// # Errors
    /// The adapter refuses.
    pub fn arm(&self) -> io::Result<()> {
        self.cq.arm()
    }

    /// Polls the completion queue once. Returns the number of completed requests.
    ///
    /// # Errors
    /// A request failed.
    pub fn poll(&mut self) -> io::Result<usize> {
        let found = self.cq.poll(&mut self.entries)?;
        if self.entries.iter().take(found).any(|wc| wc.status != 0) {
            return Err(io::Error::other("a request failed"));
        }
        Ok(found)
    }
}
