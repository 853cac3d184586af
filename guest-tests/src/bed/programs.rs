//! Our own programs for the guest, compiled in the builder system.

use anyhow::{Context, Result};

use super::Bed;
use super::log_command::StepLog;
use super::roots::write;

/// What the programs depend on besides the steps before.
pub(crate) const KEY: &str = INTEGRITY;

/// Compiles them and puts them into the guest's system.
pub(crate) fn build(bed: &Bed, log: &StepLog) -> Result<()> {
    let root = bed.builder_root();
    write(&root.join("bed/integrity.c"), INTEGRITY)?;
    log.shell_in(&root, "gcc -O2 -Wall -Wextra -Werror -o /bed/integrity /bed/integrity.c -libverbs")?;
    std::fs::copy(root.join("bed/integrity"), bed.guest_root().join("usr/local/bin/integrity"))
        .context("cannot copy a program")?;
    Ok(())
}

const INTEGRITY: &str = include_str!("../../guest/integrity.c");
