//! Errors of the connection manager.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Reason the host's QP 1 is unavailable.
#[derive(Debug, Error)]
pub(crate) enum CmError {
    #[error("port {port} of {device} has no /dev/infiniband/umad file (is the kernel's ib_umad loaded?)")]
    NoFile { device: String, port: u8 },
    #[error("cannot open {}: {source} (needs read and write access)", .path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error(
        "the host's kernel has its own connection manager on QP 1 (rmmod rdma_ucm rdma_cm ib_cm, and other users of ib_cm)"
    )]
    KernelHasIt,
    #[error("{}: another process has the connection manager on QP 1", .path.display())]
    ProcessHasIt { path: PathBuf },
    #[error("{}: {source}", .path.display())]
    Refused { path: PathBuf, source: io::Error },
    #[error("no thread for the connection manager: {0}")]
    Thread(io::Error),
}
