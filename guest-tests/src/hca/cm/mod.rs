//! Guests' connection managers on the host's adapter: a small one speaks for the guest, `rping` runs over what it connects.

mod message;
mod rping;
mod speaker;

use anyhow::Result;
use pvrdma_ibverbs::Ibverbs;

use crate::cli::{RpingEnd, RpingOptions};

/// Plays one end.
pub(super) fn run(backend: &Ibverbs, options: &RpingOptions) -> Result<()> {
    let RpingOptions { guest, count, size, .. } = *options;
    match options.end {
        RpingEnd::Serve => rping::serve(backend, guest, count)?,
        RpingEnd::Ask { server } => rping::ask(backend, guest, server, count, size)?,
        RpingEnd::Refused { server } => return rping::refused(backend, guest, server),
    }
    println!("{count} rounds");
    Ok(())
}
