//! Devices without PCI: guest memory, queues and sinks for tests of adapters (feature `testing`).
//!
//! Errors panic. Every wait has a deadline far beyond the expected time.
#![expect(clippy::unwrap_used, reason = "for tests: a panic fails the test")]

mod abort;
mod counting_allocator;
mod log_lines;
mod node;
mod queues;
mod skipped;

use std::sync::Arc;
use std::time::Duration;

use vm_memory::FileOffset;
use vm_memory::mmap::MmapRegion;

pub use abort::aborts;
pub use counting_allocator::CountingAllocator;
pub use log_lines::LogLines;
pub use node::{BORDER, Buffer, Drive, End, Node, gid, mac, page_list, post_shared};
pub use queues::{Completions, Events, Ring};
pub use skipped::skipped;

use pvrdma_verbs_types::{Access, RemoteAddress, SendData, SendOp};

/// Deadline of every wait. It is reached only if something hangs.
pub const DEADLINE: Duration = Duration::from_secs(20);

/// All access rights.
pub const ALL: Access = Access::all();

/// A send without immediate data or key.
pub const SEND: SendOp = SendOp::Send { data: SendData::None, to: None };

/// Returns an RDMA write.
pub const fn write(remote: RemoteAddress) -> SendOp {
    SendOp::Write { remote, immediate: None }
}

/// Returns memory that can be mapped a second time, as guest memory can.
pub fn shared_memory(bytes: usize) -> Arc<MmapRegion> {
    let fd = rustix::fs::memfd_create("guest-memory", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, bytes as u64).unwrap();
    Arc::new(MmapRegion::from_file(FileOffset::new(fd.into(), 0), bytes).unwrap())
}

/// Returns bytes that differ from offset to offset.
pub fn pattern(seed: u64, len: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[3]
        })
        .collect()
}
