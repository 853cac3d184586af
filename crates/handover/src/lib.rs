//! How threads leave each other work and news without waiting for a lock.
//!
//! Each type is one protocol of a flag or an index between threads, with nothing of the product around it, so that
//! [loom](https://docs.rs/loom) can try every order in which its steps may happen, and every value that a load may
//! return under the memory model of Rust. The models are in `tests/models.rs`; each is also shown to fail when the
//! steps it depends on are left out. They need a build of their own:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p pvrdma-handover --test models
//! ```

mod combiner;
mod level;
mod pending;
mod seq_lock;
pub mod sync;
mod turn;
mod wait_flag;

pub use combiner::Combiner;
pub use level::Level;
pub use pending::Pending;
pub use seq_lock::SeqLock;
pub use turn::Turn;
pub use wait_flag::WaitFlag;
