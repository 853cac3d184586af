//! Guest verbs on the host's RDMA adapter through libibverbs.
//!
//! A stub: the crate is reserved and holds no code yet, and `pvrdmad` does not offer it.
