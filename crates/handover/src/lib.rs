//! Lock-free signalling primitives: threads pass work and notifications to each other without waiting for a lock.
//!
//! Each type is one protocol on a flag or an index that threads share, and contains nothing specific to the product. So
//! [loom](https://docs.rs/loom) can try every order in which its steps may happen, and every value that a load may
//! return under Rust's memory model. The models are in `tests/models/`; for each of them, a test shows that it fails
//! when a step that it depends on is left out. They need a separate build:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p pvrdma-handover --test models
//! ```
//!
//! # Example
//!
//! An object to which several threads give work is on a queue at most once:
//!
//! ```
//! use pvrdma_handover::Pending;
//!
//! const SEND: u8 = 1;
//! const RECEIVE: u8 = 2;
//!
//! let pending = Pending::new();
//! assert!(pending.add(SEND), "the first thread puts the object on the queue");
//! assert!(!pending.add(RECEIVE), "it is there already");
//!
//! // A worker takes the object from the queue, and then the work.
//! assert_eq!(pending.take(), SEND | RECEIVE);
//! assert!(pending.add(SEND), "later work puts the object on the queue again");
//! ```

#[cfg(feature = "locks")]
mod combiner;
mod dirty_bitmap;
mod event;
mod generation;
mod level;
mod pending;
mod present_pages;
mod room;
mod seq_lock;
mod state;
pub mod sync;
mod turn;
#[cfg(feature = "locks")]
mod two_copies;
mod wait_flag;

#[cfg(feature = "locks")]
pub use combiner::Combiner;
pub use dirty_bitmap::DirtyBitmap;
pub use event::{Event, Notice, Waker};
pub use generation::Generation;
pub use level::Level;
pub use pending::Pending;
#[cfg(not(loom))]
pub use present_pages::KeptPages;
pub use present_pages::{PresentPages, Taken};
pub use room::Room;
pub use seq_lock::SeqLock;
pub use state::State;
pub use turn::Turn;
#[cfg(feature = "locks")]
pub use two_copies::TwoCopies;
pub use wait_flag::WaitFlag;
