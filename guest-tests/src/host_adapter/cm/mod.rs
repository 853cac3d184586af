//! Guests' connection managers on the host's adapter: a minimal one acts for the guest, and `rping` runs over its
//! connections.

mod cm_agent;
mod message;
mod rping;

use anyhow::Result;
use pvrdma_ibverbs::Ibverbs;

use crate::cli::{RpingOptions, RpingRole};

/// Plays one end.
pub(super) fn run(backend: &Ibverbs, options: &RpingOptions) -> Result<()> {
    let RpingOptions { guest, count, size, .. } = *options;
    match options.role {
        RpingRole::Serve => rping::serve(backend, guest, count)?,
        RpingRole::Ask { server } => rping::ask(backend, guest, server, count, size)?,
        RpingRole::Refused { server } => return rping::refused(backend, guest, server),
    }
    println!("{count} rounds");
    Ok(())
}
