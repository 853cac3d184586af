//! Results of other projects' test suites on the device. `docs/suites.json` has the outcome of each case, with the
//! version of the suite and the commit; `docs/suites.md` is generated from it.

pub(crate) mod formats;
mod page;
mod reasons;
mod record;

use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

pub(crate) use record::{Record, Stored};

/// Takes records that tests have written into the stored results, and generates the page.
///
/// # Errors
/// A file cannot be read or written.
pub(crate) fn take(documents: &Path, records: &[impl AsRef<Path>]) -> Result<()> {
    let mut stored = Stored::read(documents)?;
    for path in records {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        stored.put(serde_json::from_str(&text).with_context(|| format!("{}", path.display()))?);
    }
    write_json(&documents.join("suites.json"), &stored)?;
    let page = documents.join("suites.md");
    let text = std::fs::read_to_string(&page).with_context(|| format!("cannot read {}", page.display()))?;
    let text = page::with_results(&text, &stored)?;
    std::fs::write(&page, text).with_context(|| format!("cannot write {}", page.display()))
}

/// Writes results, one case a line.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)? + "\n";
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests;
