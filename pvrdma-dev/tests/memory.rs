//! What a guest costs in memory of this process, counted by the allocator. Alone in its process.
#![expect(clippy::unwrap_used, reason = "what goes wrong ends the test")]

mod common;
mod counting_allocator;

use common::{Process, rxe_member};
use counting_allocator::CountingAllocator;
use pvrdma_dev::testing::{GuestMemory, Placement, QpInit, access};
use pvrdma_rxe::{Rxe, RxeConfig};

#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator::new();

/// Objects of a kind.
const COUNT: usize = 2_000;

/// Bytes of the heap for each of [`COUNT`] objects that `make` makes, without what it returns.
fn bytes_each<T>(make: impl FnMut(usize) -> T) -> usize {
    let before = HEAP.bytes();
    let made: Vec<T> = (0..COUNT).map(make).collect();
    drop(made);
    (HEAP.bytes() - before) / COUNT
}

/// A guest has tens of thousands of each. What grew was not worth it, or the bound says why it was.
#[test]
fn objects_stay_small() {
    let backend = Rxe::new(RxeConfig::default()).unwrap();
    let (_test, driver) = rxe_member(&backend, 1, GuestMemory::new(128 << 20));
    let process = Process::new(&driver, true, 1024);
    let buffer = driver.buffer(16 << 10, 0, Placement::Contiguous);
    let rc = QpInit { max_send_wr: 16, max_recv_wr: 16, ..QpInit::rc(&process.pd, &process.cq) };
    let [qp, mr, cq] = [
        // Rings of three scattered pages. The tables double, so that up to half of them is room to grow.
        bytes_each(|_| driver.create_qp(&rc).unwrap()),
        bytes_each(|_| driver.reg_mr(&process.pd, &buffer, access::ALL).unwrap()),
        bytes_each(|_| driver.create_cq(None, 16).unwrap()),
    ];
    println!("bytes of a QP {qp}, of an MR {mr}, of a CQ {cq}");
    assert!(qp <= 1344 && mr <= 224 && cq <= 384, "bytes of a QP {qp}, of an MR {mr}, of a CQ {cq}");
}
