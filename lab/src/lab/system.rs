//! The system that guests boot: the lab's own, one with more packages, one of another kernel, or the caller's tree.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::cli::RunArgs;
use crate::image::{GuestImage, SYSTEMS, packages_disk};
use crate::rootfs::Rootfs;

/// A system that is ready to boot.
#[derive(Debug)]
pub(super) struct System {
    /// Kernel, first stage, and root disk.
    pub image: GuestImage,
    /// Root disk that replaces the image's.
    pub root_disk: Option<PathBuf>,
}

impl System {
    /// Builds the parts that are missing.
    ///
    /// # Errors
    /// A part cannot be built.
    pub(super) fn build(args: &RunArgs) -> Result<Self> {
        let image = GuestImage::build()?;
        if let Some(name) = &args.kernel {
            let system =
                SYSTEMS.iter().find(|system| system.name == *name).with_context(|| format!("--kernel {name}"))?;
            return Ok(Self { image: system.build(&image)?, root_disk: None });
        }
        let root_disk = (!args.package.is_empty()).then(|| packages_disk(&image, &args.package)).transpose()?;
        Ok(Self { image, root_disk })
    }
}

/// Builds the disk of the caller's tree, if the caller names one.
///
/// # Errors
/// The tree is refused.
pub(super) fn callers_tree(args: &RunArgs, directory: &Path) -> Result<Option<Rootfs>> {
    args.rootfs.as_deref().map(|source| Rootfs::build(source, directory)).transpose()
}
