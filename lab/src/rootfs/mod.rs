//! A caller's own container as the guests' system: a folder, or an archive of an image.
//!
//! An archive is not trusted. [`tar`] and [`header`] read it within a [`budget`]; [`path`] has the types of names that
//! stay in the tree; [`layer`] applies the layers to a [`tree`] in memory, and [`store`] keeps contents under numbers.
//! Only the complete tree is written to this machine, below a new folder, and [`file_system`] makes a disk of it.

mod archive;
mod budget;
mod file_system;
mod header;
mod layer;
mod oci;
mod path;
mod refusal;
mod store;
mod tar;
#[cfg(test)]
mod tests;
mod tree;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use self::archive::Archive;
use self::budget::{Budget, LIMITS, Limits};
use self::oci::Image;
use self::store::Store;
use self::tree::Tree;

/// A caller's system as a disk.
#[derive(Debug)]
pub(crate) struct Rootfs {
    /// The file system, which guests mount read-only.
    pub disk: PathBuf,
    /// Variables that the image sets for its programs.
    pub environment: Vec<(String, String)>,
}

impl Rootfs {
    /// Builds the disk from a folder or an archive. Everything is created in `directory`.
    ///
    /// # Errors
    /// The archive is refused, or this machine cannot store it.
    pub(crate) fn build(source: &Path, directory: &Path) -> Result<Self> {
        Self::build_within(LIMITS, source, directory).with_context(|| format!("--rootfs {}", source.display()))
    }

    fn build_within(limits: Limits, source: &Path, directory: &Path) -> Result<Self> {
        let disk = directory.join("rootfs.ext4");
        if source.is_dir() {
            file_system::create(source, &disk, limits)?;
            return Ok(Self { disk, environment: Vec::new() });
        }
        let root = directory.join("rootfs");
        let (tree, environment) = unpack(limits, source, directory, &root)?;
        file_system::create(&root, &disk, limits)?;
        file_system::set_owners(&tree, &disk, &directory.join("rootfs.owners"))?;
        std::fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))?;
        Ok(Self { disk, environment })
    }
}

/// Unpacks the image of an archive into a new folder; returns its tree and its variables.
fn unpack(limits: Limits, source: &Path, directory: &Path, root: &Path) -> Result<(Tree, Vec<(String, String)>)> {
    let archive = Archive::open(source, directory, limits)?;
    let image = Image::of(&archive)?;
    let (mut tree, mut budget) = (Tree::new(limits), Budget::new(limits));
    let mut store = Store::new(directory.join("contents"))?;
    for name in &image.layers {
        layer::apply(archive.get(name)?, &mut tree, &mut store, &mut budget)
            .with_context(|| format!("layer '{name}'"))?;
    }
    store.build(&tree, root)?;
    Ok((tree, image.environment))
}
