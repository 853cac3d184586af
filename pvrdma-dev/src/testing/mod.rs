//! A guest in the same process: for tests and benchmarks without a virtual machine (feature `testing`).
//!
//! [`Driver`] behaves like the Linux driver `vmw_pvrdma` and the rdma-core provider, with their order of operations and
//! their arithmetic, on [`GuestMemory`] and through the two interfaces of a guest: configuration space and BARs. It
//! shares no code with the device, not even constants, so that an error in one does not hide the same error in the
//! other.
//!
//! ```text
//! let memory = GuestMemory::new(64 << 20);
//! let irqs = Irqs::new();
//! let device = Arc::new(PvrdmaDevice::new(config, memory.space().clone(), irqs.clone(), &station)?);
//! let driver = Driver::probe(device, &memory, &irqs)?;
//! driver.bind_gid(0, gid)?;
//! let context = driver.open()?;
//! let pd = driver.create_pd(Some(&context))?;
//! let mut cq = driver.create_cq(Some(&context), 256)?;
//! let mut qp = driver.create_qp(&QpInit::rc(&pd, &cq))?;
//! qp.connect(&Path::to(peer_gid, peer_qpn))?;
//! let buffer = driver.buffer(8192, 0, Placement::Scattered);
//! let mr = driver.reg_mr(&pd, &buffer, access::LOCAL_WRITE)?;
//! qp.post_send(&[SendWr::write(1, &[buffer.sge(&mr, 0, 8192)], peer_address, peer_rkey)])?;
//! let cqe = cq.wait();
//! ```
//!
//! Errors of the test itself panic. A refusal by the device is a [`CommandError`].
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    reason = "a panic of the test guest fails the test"
)]

mod buffer;
mod command;
mod context;
mod cq;
mod driver;
mod irq;
mod mapped;
mod memory;
mod mock_hca;
mod mock_save;
mod moving;
mod mr;
mod pci;
mod probe;
mod qp;
mod qp_attr;
mod ring;
#[cfg(test)]
pub(crate) mod ring_memory;
mod srq;
mod test_device;
#[cfg(test)]
pub(crate) mod typed;
mod window;
mod wr;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub use buffer::Buffer;
pub use command::{CommandError, REQUEST_SIZE, RESPONSE_SIZE, Request, Response, command_id};
pub use context::{Context, Pd};
pub use cq::{Cq, Cqe, status, wc_flag, wc_opcode};
pub use driver::{AsyncEntry, Driver};
pub use irq::Irqs;
pub use mapped::MappedPages;
pub use memory::{Directory, GuestMemory, MEMORY_BASE, Placement};
pub use mock_hca::{MOCK_LIMITS, MockBackend, MockCq, MockDevice, MockHca, MockMr, MockQp, MockSrq, MockStation};
pub use moving::MovingFunction;
pub use mr::{FastMr, Mr, MrRequest, access};
pub use pci::{PciAccess, register};
pub use probe::{ProbeError, ProbeOptions};
pub use qp::{Encoded, Qp, QpInit, qp_type};
pub use qp_attr::{Path, QpAttr, mask, state};
pub use ring::{DriverRing, RingFull};
pub use srq::Srq;
pub use test_device::TestDevice;
pub use window::{Moment, WindowPages};
pub use wr::{AddressHandle, RecvWr, SendWr, opcode, send_flag};

/// Deadline of every wait. It is reached only if something hangs.
pub const DEADLINE: Duration = Duration::from_secs(10);

/// Makes other threads stop when it is dropped, also by a panic.
#[derive(Debug)]
pub struct Stop<'a>(pub &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Calls `look` until it returns something, for at most [`DEADLINE`].
///
/// # Panics
/// It never did; the message contains `what`.
pub fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + DEADLINE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "{what}: nothing came in {DEADLINE:?}");
        std::thread::yield_now();
    }
}
