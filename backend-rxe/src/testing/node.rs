//! A device: its memory, its objects and the buffers that it registers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use pvrdma_guest_memory::{DmaSpace, PAGE_SIZE, PageListBuilder};
use pvrdma_verbs::{
    Access, CompletionSink, Hca, MemoryRegion, MrRequest, QpCaps, QpInit, QpType, Qpn, RecvSource, RecvWr,
    RemoteAddress, SendWr, Sge, VerbsError,
};

use super::queues::Consumer;
use super::{ALL, Completions, End, Events, Ring};
use crate::{Rxe, RxeCq, RxeHca, RxeMr, RxePd, RxeQp, RxeSrq};

/// One device.
pub(crate) struct Node {
    pub(crate) number: u8,
    pub(crate) pd: RxePd,
    pub(crate) hca: RxeHca,
    pub(crate) memory: Arc<DmaSpace>,
    pub(crate) events: Arc<Events>,
    /// What has to run for a packet to cross the cable and back.
    pub(super) wire: Vec<Rxe>,
    pub(super) next_page: AtomicU64,
    pub(super) next_qpn: AtomicU32,
}

impl Node {
    /// Registered memory of `len` bytes that begins `offset` bytes into a page. Pages are in reverse order, so that none
    /// follows its neighbour.
    pub(crate) fn buffer_at(&self, offset: u64, len: u64, access: Access) -> Buffer {
        let count = (offset + len).div_ceil(PAGE_SIZE).max(1);
        let first = self.next_page.fetch_add((count + 1) * PAGE_SIZE, Ordering::SeqCst);
        let pages: Vec<u64> = (0..count).rev().map(|i| first + i * PAGE_SIZE).collect();
        self.register(&pages, offset, len, access)
    }

    pub(crate) fn buffer(&self, len: u64) -> Buffer {
        self.buffer_at(0, len, ALL)
    }

    pub(crate) fn register(&self, pages: &[u64], offset: u64, len: u64, access: Access) -> Buffer {
        let start = 0x7f00_0000_0000 + pages[0] + offset;
        let mut list = PageListBuilder::default();
        for &page in pages {
            list.push(page).unwrap();
        }
        let request = MrRequest::User { start, length: len, pages: list.finish(), access };
        let mr = self.hca.register_mr(&self.pd, request).unwrap();
        Buffer { mr, start, len, offset, pages: pages.to_vec(), memory: Arc::clone(&self.memory) }
    }

    pub(crate) fn cq(&self) -> (RxeCq, Arc<Completions>) {
        let sink = Completions::new();
        (self.hca.create_cq(Arc::clone(&sink) as Arc<dyn CompletionSink>).unwrap(), sink)
    }

    pub(crate) fn qp(&self, qp_type: QpType) -> End {
        self.qp_with(qp_type, None, |_| {})
    }

    pub(crate) fn qp_with(
        &self,
        qp_type: QpType,
        srq: Option<&RxeSrq>,
        change: impl FnOnce(&mut QpInit<'_, RxeHca>),
    ) -> End {
        self.qp_on(qp_type, srq, (None, None), change)
    }

    /// With completion queues of the caller, for sends and receives.
    pub(crate) fn qp_on(
        &self,
        qp_type: QpType,
        srq: Option<&RxeSrq>,
        cqs: (Option<&RxeCq>, Option<&RxeCq>),
        change: impl FnOnce(&mut QpInit<'_, RxeHca>),
    ) -> End {
        let qpn = if qp_type == QpType::Gsi { 1 } else { self.next_qpn.fetch_add(1, Ordering::SeqCst) };
        let (sends, receives) = (Arc::new(Ring::default()), Arc::new(Ring::default()));
        let ((send_cq, scq), (recv_cq, rcq)) = (self.cq(), self.cq());
        let mut init = QpInit {
            cookie: qpn,
            qpn: Qpn::new(qpn),
            qp_type,
            pd: &self.pd,
            send_cq: cqs.0.unwrap_or(&send_cq),
            recv_cq: cqs.1.unwrap_or(&recv_cq),
            srq,
            send_queue: Box::new(Consumer(Arc::clone(&sends))),
            recv_queue: srq.is_none().then(|| Box::new(Consumer(Arc::clone(&receives))) as Box<dyn RecvSource>),
            caps: QpCaps::default(),
            signal_all: false,
        };
        change(&mut init);
        let qp = self.hca.create_qp(init).unwrap();
        End {
            wire: self.wire.clone(),
            node: self.number,
            qp,
            sends,
            receives,
            scq,
            rcq,
            cookie: qpn,
            _cqs: (send_cq, recv_cq),
        }
    }

    /// A QP of that number, if the adapter makes one, whose queues stay empty.
    pub(crate) fn empty_qp(&self, qp_type: QpType, qpn: Qpn, cqs: (&RxeCq, &RxeCq)) -> Result<RxeQp, VerbsError> {
        self.hca.create_qp(QpInit {
            cookie: 0,
            qpn,
            qp_type,
            pd: &self.pd,
            send_cq: cqs.0,
            recv_cq: cqs.1,
            srq: None,
            send_queue: Box::new(Consumer::<SendWr>(Arc::default())),
            recv_queue: None,
            caps: QpCaps::default(),
            signal_all: false,
        })
    }

    pub(crate) fn srq(&self, limit: u32) -> (RxeSrq, Arc<Ring<RecvWr>>) {
        let ring = Arc::new(Ring::default());
        let queue = Box::new(Consumer(Arc::clone(&ring)));
        let init = pvrdma_verbs::SrqInit { cookie: 77, pd: &self.pd, queue, limit, max_wr: 64, max_sge: 4 };
        (self.hca.create_srq(init).unwrap(), ring)
    }

    pub(crate) fn counter(&self, name: &str) -> u64 {
        self.hca.counters().into_iter().find(|counter| counter.name == name).unwrap().value
    }
}

/// Registered memory.
pub(crate) struct Buffer {
    pub(crate) mr: RxeMr,
    pub(crate) start: u64,
    pub(crate) len: u64,
    offset: u64,
    pages: Vec<u64>,
    memory: Arc<DmaSpace>,
}

impl Buffer {
    pub(crate) fn sge(&self, offset: u64, length: u64) -> Sge {
        Sge { addr: self.start + offset, length: u32::try_from(length).unwrap(), lkey: self.mr.lkey() }
    }

    pub(crate) fn all(&self) -> Sge {
        self.sge(0, self.len)
    }

    pub(crate) fn remote(&self, offset: u64) -> RemoteAddress {
        RemoteAddress { addr: self.start + offset, rkey: self.mr.rkey() }
    }

    /// Bus addresses of the pieces behind `offset..offset+len`.
    fn pieces(&self, offset: u64, len: u64) -> Vec<(u64, usize)> {
        let mut pieces = Vec::new();
        let (mut at, end) = (self.offset + offset, self.offset + offset + len);
        while at < end {
            let count = (PAGE_SIZE - at % PAGE_SIZE).min(end - at);
            let page = self.pages[usize::try_from(at / PAGE_SIZE).unwrap()];
            pieces.push((page + at % PAGE_SIZE, usize::try_from(count).unwrap()));
            at += count;
        }
        pieces
    }

    pub(crate) fn write(&self, offset: u64, data: &[u8]) {
        let view = self.memory.view();
        let mut rest = data;
        for (bus, count) in self.pieces(offset, data.len() as u64) {
            view.write(bus, &rest[..count]).unwrap();
            rest = &rest[count..];
        }
    }

    pub(crate) fn read(&self, offset: u64, len: u64) -> Vec<u8> {
        let view = self.memory.view();
        let mut data = vec![0; usize::try_from(len).unwrap()];
        let mut done = 0;
        for (bus, count) in self.pieces(offset, len) {
            view.read(bus, &mut data[done..done + count]).unwrap();
            done += count;
        }
        data
    }
}
