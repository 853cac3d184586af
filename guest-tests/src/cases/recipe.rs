//! Commands of documents that tests run verbatim.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

/// Returns the block of a document after the marker `<!-- NAME -->`.
pub(super) fn recipe(document: &str, name: &str) -> Result<String> {
    let text = read(document)?;
    let marker = format!("<!-- {name} -->\n```bash\n");
    let (_, from) = text.split_once(&marker).with_context(|| format!("{document} has no {marker}"))?;
    let (lines, _) = from.split_once("```").with_context(|| format!("a block of {document} does not end"))?;
    Ok(lines.to_owned())
}

/// Returns the workflow of the document about CI.
#[cfg(feature = "suite")]
pub(super) fn workflow() -> Result<String> {
    let text = read("docs/ci.md")?;
    let (_, from) = text.split_once("```yaml\n").context("the document has no workflow")?;
    let (workflow, _) = from.split_once("```").context("the workflow does not end")?;
    Ok(workflow.to_owned())
}

/// Returns the action that the workflow uses.
#[cfg(feature = "suite")]
pub(super) fn action() -> Result<String> {
    read("action.yml")
}

fn read(document: &str) -> Result<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(document);
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::super::{container, evpn, libvirt, open_vswitch, qemu_migrate};
    use super::*;

    #[test]
    fn recipes_are_short() {
        for ((document, name), most) in [
            (container::RECIPE, 12),
            (libvirt::RECIPE, 12),
            (open_vswitch::RECIPE, 12),
            (evpn::host::RECIPE, 15),
            (qemu_migrate::BEFORE, 8),
            (qemu_migrate::AFTER, 8),
        ] {
            let lines = recipe(document, name).unwrap();
            assert!((1..=most).contains(&lines.lines().count()), "{lines}");
        }
    }
}
