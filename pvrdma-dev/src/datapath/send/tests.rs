//! Decoding of send elements (conformance 46, 53 to 58, ring level).

use proptest::prelude::*;
use pvrdma_packet::MacAddr;
use pvrdma_pages::PAGE_SIZE;
use pvrdma_verbs_types::{Gid, RemoteAddress, Sge, UdDestination};

use super::*;
use crate::abi::layout::write_field;
use crate::testing::ring_memory::RingMemory;

const ENTRIES: u32 = 16;
const PD: u32 = 0x12_3456;

/// Send queue with the guest's side of it.
struct SendFixture {
    guest: RingMemory,
    ring: SendRing,
    max_sge: u32,
    tail: u32,
}

impl SendFixture {
    fn new(qp_type: QpType, user: bool, max_sge: u32) -> Self {
        let stride = send_stride(max_sge).unwrap();
        let page_count = (ENTRIES * stride).div_ceil(4096);
        let guest = RingMemory::new(1 + page_count as usize);
        let params = SendRingParams {
            pages: guest.list(),
            first_page: 1,
            page_count,
            entries: ENTRIES,
            max_sge,
            qp_type,
            user,
            pd_handle: PD,
        };
        Self { guest, ring: SendRing::new(params).unwrap(), max_sge, tail: 0 }
    }

    fn post(&mut self, wqe: &[u8]) {
        let slot = self.guest.slot(self.tail, ENTRIES, send_stride(self.max_sge).unwrap());
        self.guest.memory.write(slot, wqe);
        self.tail = (self.tail + 1) % (2 * ENTRIES);
        self.guest.memory.store(self.guest.state(), self.tail);
    }

    fn pop(&mut self) -> SendWr {
        let mut work = SendWr::default();
        let view = self.guest.memory.space().view();
        assert!(self.ring.pop(&view, &mut work).unwrap());
        self.ring.retire(&view);
        work
    }

    fn decode(&mut self, wqe: &[u8]) -> SendWr {
        self.post(wqe);
        self.pop()
    }
}

/// Returns a header full of stale values of an earlier element, with the given opcode.
fn stale(opcode: u32, flags: u32) -> [u8; SQ_HEADER] {
    let mut wqe = [0xee; SQ_HEADER];
    write_field(&mut wqe, 0, &0x1122_3344_5566_7788_u64);
    write_field(&mut wqe, 8, &0_u32);
    write_field(&mut wqe, 16, &opcode);
    write_field(&mut wqe, 20, &flags);
    wqe
}

fn rdma(opcode: u32) -> [u8; SQ_HEADER] {
    let mut wqe = stale(opcode, 2);
    write_field(&mut wqe, 32, &0xa0a1_a2a3_a4a5_a6a7_u64);
    write_field(&mut wqe, 40, &0xb0b1_b2b3_u32);
    wqe
}

fn ud(opcode: u32, port_pd: u32) -> [u8; SQ_HEADER] {
    let mut wqe = stale(opcode, 2);
    write_field(&mut wqe, 32, &0x1234_u32);
    write_field(&mut wqe, 36, &0x8000_0001_u32);
    write_field(&mut wqe, 40, &port_pd);
    write_field(&mut wqe, 44, &0_u32);
    write_field(&mut wqe, 48, &[9; 16]);
    write_field(&mut wqe, 64, &[0x80, 2, 0, 1, 1, 2, 3, 4, 5, 6]);
    wqe
}

/// Conformance 53, 55, 62: the seven operations of a connection, each decoded from its own fields only.
#[test]
fn connected_operations() {
    let remote = RemoteAddress { addr: 0xa0a1_a2a3_a4a5_a6a7, rkey: 0xb0b1_b2b3 };
    for user in [false, true] {
        let mut fixture = SendFixture::new(QpType::Rc, user, 4);
        let mut with_imm = rdma(opcode::RDMA_WRITE_WITH_IMM);
        write_field(&mut with_imm, 24, &[1, 2, 3, 4]);
        assert_eq!(fixture.decode(&rdma(opcode::RDMA_WRITE)).op, SendOp::Write { remote, immediate: None });
        assert_eq!(fixture.decode(&with_imm).op, SendOp::Write { remote, immediate: Some([1, 2, 3, 4]) });
        write_field(&mut with_imm, 16, &opcode::SEND_WITH_IMM);
        let data = SendData::Immediate([1, 2, 3, 4]);
        assert_eq!(fixture.decode(&with_imm).op, SendOp::Send { data, to: None });
        let work = fixture.decode(&stale(opcode::SEND, 0xffff_fff5));
        assert_eq!(work.op, SendOp::Send { data: SendData::None, to: None });
        assert_eq!(work.flags, SendFlags::FENCE | SendFlags::SOLICITED, "other bits are ignored");
        assert_eq!((work.wr_id, work.sges.len()), (0x1122_3344_5566_7788, 0));
        assert_eq!(fixture.decode(&rdma(opcode::RDMA_READ)).op, SendOp::Read { remote });
        let mut atomic = stale(opcode::ATOMIC_CMP_AND_SWP, 0);
        write_field(&mut atomic, 32, &0xa0a1_a2a3_a4a5_a6a7_u64);
        write_field(&mut atomic, 40, &5_u64);
        write_field(&mut atomic, 48, &6_u64);
        write_field(&mut atomic, 56, &0xb0b1_b2b3_u32);
        assert_eq!(fixture.decode(&atomic).op, SendOp::CompareSwap { remote, compare: 5, swap: 6 });
        write_field(&mut atomic, 16, &opcode::ATOMIC_FETCH_AND_ADD);
        assert_eq!(fixture.decode(&atomic).op, SendOp::FetchAdd { remote, add: 5 });
    }
}

/// Conformance 54: opcodes of a process from 7 on are no operations, and neither are the unused ones of the kernel.
#[test]
fn unsupported_operations() {
    let mut user = SendFixture::new(QpType::Rc, true, 4);
    let mut kernel = SendFixture::new(QpType::Rc, false, 4);
    for number in (7..=16).chain([0x100, 0x8000_0000, u32::MAX]) {
        let unsupported = SendOp::Unsupported { opcode: number };
        assert_eq!(user.decode(&stale(number, 2)).op, unsupported);
        if ![opcode::SEND_WITH_INV, opcode::LOCAL_INV, opcode::FAST_REG_MR].contains(&number) {
            assert_eq!(kernel.decode(&stale(number, 2)).op, unsupported);
        }
    }
    for (kind, allowed) in [(QpType::Ud, 2), (QpType::Gsi, 1)] {
        let mut fixture = SendFixture::new(kind, false, 2);
        let supported =
            (0..20).filter(|&n| !matches!(fixture.decode(&ud(n, PD | 1 << 24)).op, SendOp::Unsupported { .. }));
        assert_eq!(supported.count(), allowed);
    }
}

/// Conformance 53: kernel memory management operations; the page list is copied when the request is taken.
#[test]
fn memory_management() {
    let mut fixture = SendFixture::new(QpType::Rc, false, 4);
    let mut invalidate = stale(opcode::LOCAL_INV, 2);
    write_field(&mut invalidate, 24, &0x0102_0304_u32);
    assert_eq!(fixture.decode(&invalidate).op, SendOp::LocalInvalidate(Invalidate { key: 0x0102_0304 }));
    write_field(&mut invalidate, 16, &opcode::SEND_WITH_INV);
    let data = SendData::Invalidate(0x0102_0304);
    assert_eq!(fixture.decode(&invalidate).op, SendOp::Send { data, to: None });

    let pages = fixture.guest.memory.alloc(3, crate::testing::Placement::Scattered);
    let directory = fixture.guest.memory.directory(&pages);
    let fast_register = |shift: u32, count: u32, length: u32| {
        let mut wqe = stale(opcode::FAST_REG_MR, 2);
        write_field(&mut wqe, 32, &0x7000_0800_u64);
        write_field(&mut wqe, 40, &directory.addr);
        write_field(&mut wqe, 48, &shift);
        write_field(&mut wqe, 52, &count);
        write_field(&mut wqe, 56, &length);
        write_field(&mut wqe, 60, &0x10_0007_u32);
        write_field(&mut wqe, 64, &0x0003_0142_u32);
        wqe
    };
    let mut decode = |wqe: [u8; SQ_HEADER]| match fixture.decode(&wqe).op {
        SendOp::FastRegister(request) => *request,
        other => panic!("{other:?}"),
    };
    let request = decode(fast_register(12, 3, 0x2800));
    assert_eq!((request.key, request.iova, request.length), (0x0003_0142, 0x7000_0800, 0x2800));
    assert_eq!(request.access, Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ);
    let list = request.pages.unwrap();
    for (offset, &page) in (0..).step_by(4096).zip(&pages) {
        assert_eq!(list.locate(offset).unwrap().0, page);
    }
    assert!(decode(fast_register(12, 3, 0x2801)).pages.is_none(), "longer than its pages");
    assert!(decode(fast_register(12, 3, u32::MAX)).pages.is_none());
    assert!(decode(fast_register(21, 3, 0x800)).pages.is_none(), "not the page size");
    assert!(decode(fast_register(12, 0, 0)).pages.is_none());
    assert!(decode(fast_register(12, 4, 0x800)).pages.is_none(), "the fourth entry is empty");
    assert!(decode(fast_register(12, 129, 0x800)).pages.is_none());
    assert!(decode(fast_register(12, u32::MAX, 0x800)).pages.is_none());
}

/// Conformance 53, 58: datagrams, and address vectors of another owner.
#[test]
fn datagrams() {
    let to = UdDestination {
        qpn: pvrdma_verbs_types::Qpn::new(0x1234),
        qkey: 0x8000_0001,
        sgid_index: 2,
        dgid: Gid([9; 16]),
        dmac: MacAddr([1, 2, 3, 4, 5, 6]),
        service_level: 0,
        traffic_class: 0,
        flow_label: 0,
        hop_limit: 1,
    };
    let mut fixture = SendFixture::new(QpType::Ud, true, 2);
    let good = PD | 1 << 24;
    assert_eq!(fixture.decode(&ud(opcode::SEND, good)).op, SendOp::Send { data: SendData::None, to: Some(to) });
    let mut wqe = ud(opcode::SEND_WITH_IMM, good);
    write_field(&mut wqe, 24, &[4, 3, 2, 1]);
    let data = SendData::Immediate([4, 3, 2, 1]);
    assert_eq!(fixture.decode(&wqe).op, SendOp::Send { data, to: Some(to) });
    for port_pd in [PD, PD | 2 << 24, (PD + 1) | 1 << 24, 0, u32::MAX] {
        assert_eq!(fixture.decode(&ud(opcode::SEND, port_pd)).op, SendOp::Malformed, "{port_pd:#x}");
    }
}

/// Every number of SGEs up to the limit and beyond. None is read from the next element.
#[test]
fn scatter_gather_lists() {
    for max_sge in [1, 3, 4, 16, 128, 251] {
        let mut fixture = SendFixture::new(QpType::Rc, true, max_sge);
        for count in [0, 1, 2, 3, 4, 18, 19, 20, 35, 127, 128, 250, 251, 252, u32::MAX] {
            let mut wqe = rdma(opcode::RDMA_WRITE).to_vec();
            wqe[8..12].copy_from_slice(&count.to_le_bytes());
            let expected: Vec<Sge> = (0..count.min(max_sge))
                .map(|i| Sge { addr: u64::from(i) << 32 | 7, length: i + 1, lkey: !i })
                .collect();
            for sge in &expected {
                wqe.extend(sge.addr.to_le_bytes());
                wqe.extend(sge.length.to_le_bytes());
                wqe.extend(sge.lkey.to_le_bytes());
            }
            let work = fixture.decode(&wqe);
            if count > max_sge {
                assert_eq!((work.op, work.sges.len()), (SendOp::Malformed, 0));
            } else {
                assert_eq!(work.sges, expected);
            }
        }
    }
}

/// Conformance 46: writes of the guest after a request was taken have no effect, and the buffer of SGEs is reused.
#[test]
fn one_copy() {
    let mut fixture = SendFixture::new(QpType::Rc, true, 1);
    let mut wqe = rdma(opcode::RDMA_WRITE).to_vec();
    wqe[8] = 1;
    wqe[9..12].fill(0);
    wqe.extend([3; 16]);
    fixture.post(&wqe);
    fixture.post(&wqe);
    let view = fixture.guest.memory.space().view();
    let mut work = SendWr::default();
    assert!(fixture.ring.pop(&view, &mut work).unwrap());
    let copy = work.clone();
    fixture.guest.memory.write(fixture.guest.slot(0, ENTRIES, 128), &[0xff; 96]);
    assert_eq!(work, copy);
    let buffer = work.sges.as_ptr();
    assert!(fixture.ring.pop(&view, &mut work).unwrap());
    assert_eq!(work, copy);
    assert_eq!(work.sges.as_ptr(), buffer);
    assert!(!fixture.ring.pop(&view, &mut work).unwrap());
    assert_eq!(fixture.guest.memory.load(fixture.guest.state() + 4), 0, "slots are held until the requests are done");
    fixture.ring.retire(&view);
    assert_eq!(fixture.guest.memory.load(fixture.guest.state() + 4), 1);
}

proptest! {
    /// Random bytes decode to a request of bounded size, on every kind of queue.
    #[test]
    fn random_elements(
        bytes in proptest::collection::vec(any::<u8>(), 128),
        count in prop_oneof![0u32..5, any::<u32>()],
        number in prop_oneof![0u32..18, any::<u32>()],
        kind in prop_oneof![Just(QpType::Rc), Just(QpType::Ud), Just(QpType::Gsi)],
        user: bool,
    ) {
        let mut fixture = SendFixture::new(kind, user, 3);
        let mut wqe = bytes;
        wqe[8..12].copy_from_slice(&count.to_le_bytes());
        wqe[16..20].copy_from_slice(&number.to_le_bytes());
        let work = fixture.decode(&wqe);
        prop_assert!(work.sges.len() <= 3);
        prop_assert!(!user || !matches!(work.op, SendOp::FastRegister(_) | SendOp::LocalInvalidate(_)));
        if let SendOp::FastRegister(request) = work.op {
            prop_assert!(request.pages.is_none_or(|pages| pages.bytes() <= 128 * PAGE_SIZE));
        }
    }
}
