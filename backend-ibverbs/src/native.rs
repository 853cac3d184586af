//! A program of its own on the host's adapter, to compare with (feature `testing`): two connected queue pairs, RDMA
//! writes, and a loop that polls.

use std::io;
use std::sync::Arc;

use pvrdma_guest_memory::HostPiece;
use pvrdma_verbs::{QpAttrMask, QpAttrs};
use vm_memory::mmap::MmapRegion;

use crate::config::GidIndex;
use crate::contiguous_mapping::ContiguousMapping;
use crate::convert::{self, Route};
use crate::gid::{HostGid, HostGids};
use crate::sys::library::Library;
use crate::sys::{QPT_RC, QpCap, SEND_SIGNALED, Sge, Wc};
use crate::verbs::{Channel, HostCq, HostDevice, HostMr, HostOp, HostPd, HostQp, HostQpInit, SendBatch};

/// Requests under way.
const DEPTH: u32 = 64;
const ALL: u32 = 15;

struct End {
    qp: HostQp,
    cq: Arc<HostCq>,
    mr: HostMr,
    start: u64,
}

/// Two connected queue pairs with a registered buffer each.
#[expect(missing_debug_implementations, reason = "for benchmarks")]
pub struct NativePair {
    a: End,
    b: End,
    bytes: usize,
    batch: SendBatch,
    next: usize,
}

impl NativePair {
    /// On port 1 of a device of the host.
    ///
    /// # Errors
    /// The adapter does not want to.
    pub fn connect(device: &str, bytes: usize) -> io::Result<Self> {
        let library = Library::load().map_err(io::Error::other)?;
        let make = || -> io::Result<(End, HostGid)> {
            let device = Arc::new(HostDevice::open(&library, device).map_err(io::Error::other)?);
            let gids = HostGids::new(device.name(), 1, device.port(1)?.gids);
            let gid = gids.choose(GidIndex::Auto).map_err(io::Error::other)?;
            Ok((End::new(&device, bytes)?, gid))
        };
        let ((a, gid), (b, _)) = (make()?, make()?);
        a.connect(&b, gid)?;
        b.connect(&a, gid)?;
        Ok(Self { a, b, bytes, batch: SendBatch::default(), next: 0 })
    }

    /// Writes `count` pieces of `size` bytes, `batch` with each call, and waits for all of each call.
    ///
    /// # Errors
    /// A request failed.
    pub fn write(&mut self, size: u32, count: u32, batch: u32) -> io::Result<()> {
        let mut entries = [Wc::default(); DEPTH as usize];
        let mut done = 0;
        while done < count {
            let now = batch.min(count - done).min(DEPTH);
            self.batch.clear();
            for _ in 0..now {
                if self.next + size as usize > self.bytes {
                    self.next = 0;
                }
                let at = self.next as u64;
                self.next += size as usize;
                let sge = Sge { addr: self.a.start + at, length: size, lkey: self.a.mr.lkey() };
                let op = HostOp::Write { addr: self.b.start + at, rkey: self.b.mr.rkey(), immediate: None };
                self.batch.push(0, SEND_SIGNALED, op, &[sge]);
            }
            self.a.qp.post_send(&mut self.batch).1?;
            let mut left = now as usize;
            while left > 0 {
                let found = self.a.cq.poll(&mut entries)?;
                if entries.iter().take(found).any(|wc| wc.status != 0) {
                    return Err(io::Error::other("a request failed"));
                }
                left = left.saturating_sub(found);
            }
            done += now;
        }
        Ok(())
    }
}

impl End {
    fn new(device: &Arc<HostDevice>, bytes: usize) -> io::Result<Self> {
        let pd = Arc::new(HostPd::new(device)?);
        let channel = Arc::new(Channel::new(device)?);
        let cq = Arc::new(HostCq::new(&channel, 2 * DEPTH)?);
        let mapping = Arc::new(MmapRegion::new(bytes).map_err(io::Error::other)?);
        let mapping = ContiguousMapping::map(&[HostPiece { mapping, offset: 0, len: bytes, writable: true }])?;
        let start = 0x10_0000_0000;
        let mr = HostMr::register(&pd, mapping, 0, bytes, start, ALL)?;
        let cap = QpCap { max_send_wr: DEPTH, max_recv_wr: 1, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
        let (send_cq, recv_cq) = (Arc::clone(&cq), Arc::clone(&cq));
        let qp = HostQp::new(HostQpInit { pd, send_cq, recv_cq, srq: None, cap, qp_type: QPT_RC })?;
        Ok(Self { qp, cq, mr, start })
    }

    fn connect(&self, peer: &Self, gid: HostGid) -> io::Result<()> {
        use QpAttrMask as M;
        use pvrdma_verbs::{Access, Mtu, QpState, Qpn};
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
            attr.ah_attr = convert::route(gid.gid, gid.index, 1, &route);
            self.qp.modify(&attr, bits)?;
        }
        Ok(())
    }
}
