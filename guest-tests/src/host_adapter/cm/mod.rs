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
    match options.role {
        RpingRole::Serve => rping::serve(backend, options)?,
        RpingRole::Ask { server } => rping::ask(backend, options, server)?,
        RpingRole::Rejected { server } => return rping::rejected(backend, options, server),
        RpingRole::Refused { server } => return rping::refused(backend, options, server),
    }
    println!("{} rounds", options.count);
    Ok(())
}
