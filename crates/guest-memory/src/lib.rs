//! Guest memory as a device accesses it: bus addresses that resolve to shared mappings.
//!
//! A [`DmaSpace`] holds the memory map of one device. Code that accesses guest memory takes a [`DmaView`], does a
//! bounded amount of work through it and drops it. Removing a memory range ([`DmaSpace::unmap`]) and
//! [`DmaSpace::barrier`] wait for every view, so when they return nothing uses the old map or anything that was looked
//! up in it.
//!
//! A view hands out no pointers, but [`vm_memory::VolatileSlice`]s that cannot outlive it. An adapter that registers
//! memory with hardware gets the mapping itself ([`HostPiece`]), and learns of its removal as a [`MemoryWatcher`].
//!
//! # Example
//!
//! ```
//! use pvrdma_guest_memory::{Direction, DmaSpace, PinPolicy};
//! use vm_memory::{GuestAddress, GuestMemoryMmap};
//!
//! let memory: GuestMemoryMmap = GuestMemoryMmap::from_ranges(&[(GuestAddress(0x10_0000), 1 << 20)])?;
//! let space = DmaSpace::from_guest_memory(&memory, PinPolicy::Off)?;
//!
//! let view = space.view();
//! view.write(0x10_0040, b"completion")?;
//! let mut copy = [0; 10];
//! view.read(0x10_0040, &mut copy)?;
//! assert_eq!(&copy, b"completion");
//! assert!(view.slice(0, 4, Direction::Read).is_err(), "no memory is mapped there");
//! drop(view);
//!
//! // Waits for every view. Afterwards no thread uses the range.
//! space.unmap(0x10_0000, 1 << 20)?;
//! assert!(space.view().read(0x10_0040, &mut copy).is_err());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod budget;
mod dirty;
mod error;
mod limits;
mod map;
mod part;
mod pin;
mod range;
mod space;
mod stall;
#[cfg(test)]
mod tests;
mod view;
mod watcher;

pub use budget::{Charge, Kept, MemoryBudget, OverBudget};
pub use dirty::DirtyLogError;
pub use error::{DmaError, MapError};
pub use limits::{MAX_RANGES, MemoryLimits};
pub use pin::guard::PinGuard;
pub use pin::{PinError, PinPolicy, PinRefusal};
pub use range::{Backing, Direction, DmaRange, SpaceId};
pub use space::DmaSpace;
pub use stall::{REMEMBERED, STALLS, Stall, StallMeter};
pub use view::{DmaView, HostPiece};
pub use watcher::MemoryWatcher;
