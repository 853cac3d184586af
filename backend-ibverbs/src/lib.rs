//! Guest verbs on the host's RDMA adapter through libibverbs.
//!
//! A stub: the crate is reserved and holds no code yet. `pvrdmad --backend ibverbs` says so and refuses to start.
