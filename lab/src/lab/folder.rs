//! The caller's folder, which guests see at the same path.

use std::path::{Component, Path};

use anyhow::{Context, Result, bail};

use super::cli::RunArgs;
use crate::vm::Folder;

/// Folders of the guest's own system. Nothing runs in a guest if another folder hides them.
const SYSTEM: [&str; 16] = [
    "bed", "bin", "boot", "dev", "etc", "image", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin", "sys",
    "usr", "var",
];

/// Returns the folder to share.
///
/// # Errors
/// The folder does not exist, or would hide folders that guests need.
pub(super) fn of(args: &RunArgs) -> Result<Folder> {
    let named = args.folder.as_deref().unwrap_or_else(|| Path::new("."));
    let path = named.canonicalize().with_context(|| format!("--folder {}", named.display()))?;
    if !path.is_dir() {
        bail!("--folder {}: this is no directory", path.display());
    }
    if hides_the_guest(&path) {
        bail!(
            "{} is one of the guest's own folders: go to a folder of yours, or name it with --folder",
            path.display()
        );
    }
    Ok(Folder { path, read_only: args.read_only })
}

/// Returns `true` if a folder of the host cannot be mounted at this path in a guest.
fn hides_the_guest(path: &Path) -> bool {
    let mut below_root = path.components().skip(1);
    let Some(Component::Normal(first)) = below_root.next() else { return true };
    let is_system = SYSTEM.iter().any(|name| first == *name);
    // Below these the kernel creates the folders itself.
    let is_kernels = ["dev", "proc", "sys"].iter().any(|name| first == *name);
    is_system && (is_kernels || below_root.next().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_that_guests_need() {
        for path in ["/", "/usr", "/etc", "/proc/self", "/dev/shm/x"] {
            assert!(hides_the_guest(Path::new(path)), "{path}");
        }
        for path in ["/home", "/work/tree", "/usr/src/tree", "/var/lib/runner", "/root"] {
            assert!(!hides_the_guest(Path::new(path)), "{path}");
        }
    }
}
