//! The adapters of networks: a file for each kind, and this registry.

mod adapter;
mod ibverbs;
mod rxe;

use std::sync::Arc;

use anyhow::Result;

pub(super) use self::adapter::{Adapter, Created, SoftwareParts, Station};
use super::Host;
use crate::config::BackendSpec;
use crate::failures::FailureLog;
use crate::protocol::NetworkSetup;

/// Starts the adapter of a network. Failed queue pairs of its devices go to `failures`.
///
/// # Errors
/// The adapter cannot be created.
pub(super) fn start(
    setup: &NetworkSetup,
    host: &Arc<dyn Host>,
    failures: &Arc<FailureLog>,
) -> Result<Arc<dyn Adapter>> {
    Ok(match &setup.backend {
        BackendSpec::Rxe => Arc::new(rxe::Software::start(setup, host, failures)?),
        BackendSpec::Ibverbs(config) => Arc::new(ibverbs::HostAdapter::start(config, host)?),
    })
}
