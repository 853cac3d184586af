//! Host programs that belong neither to the image nor to this machine: a root directory for each purpose, built when a
//! test needs it.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::apt;
use super::guest_image::{GuestImage, host_command};
use super::log_command::StepLog;
use super::roots::{base_key, copy_tree, debootstrap, executable, remove_tree};
use super::steps::Steps;

/// A Debian with some packages, whose programs are run by its own loader.
#[derive(Debug)]
pub struct HostRoot {
    root: PathBuf,
}

impl HostRoot {
    /// Builds the root directory `name` if it is missing.
    pub fn build(image: &GuestImage, name: &str, packages: &[&str]) -> Result<Self> {
        Self::build_with(image, name, packages, "")
    }

    /// Same as [`Self::build`], with a shell script that runs inside it. `MIRROR` is the address of the Debian mirror.
    pub fn build_with(image: &GuestImage, name: &str, packages: &[&str], script: &str) -> Result<Self> {
        let copy = |root: &Path, log: &StepLog| copy_tree(log, &image.base_root(), root);
        Self::make(image, name, &packages.join(" "), script, &base_key()?, copy)
    }

    /// Same as [`Self::build`], for another release of Debian than that of the image.
    pub fn build_release(image: &GuestImage, name: &str, release: &str, packages: &[&str]) -> Result<Self> {
        let bootstrap = |root: &Path, log: &StepLog| {
            remove_tree(root)?;
            debootstrap(root, &[release], log)
        };
        let key = format!("{release} {}", base_key()?);
        Self::make(image, name, &packages.join(" "), "", &key, bootstrap)
    }

    /// Builds the root directory `name` if it is missing: a minimal system by `base`, which depends on `base_key`, then
    /// the packages and the script.
    fn make(
        image: &GuestImage,
        name: &str,
        packages: &str,
        script: &str,
        base_key: &str,
        base: impl FnOnce(&Path, &StepLog) -> Result<()>,
    ) -> Result<Self> {
        let built = Self { root: image.directory().join(name) };
        let mut steps = Steps::open(image.directory())?;
        let key = format!("{base_key} {packages} {script}");
        steps.run(name, &key, |log| {
            base(&built.root, log)?;
            log.shell_in(&built.root, &format!("apt-get update -q; apt-get install -y -q {packages}; apt-get clean"))?;
            log.shell_in(&built.root, &format!("export MIRROR='{}'\n{script}", apt::mirror()?))
        })?;
        steps.finish();
        Ok(built)
    }

    /// Returns the path of a file in it.
    pub fn path(&self, file: &str) -> PathBuf {
        self.root.join(file)
    }

    /// Creates a script in `folder` that runs a program of it, by the program's name.
    pub fn name_in(&self, folder: &Path, program: &str) -> Result<()> {
        let words: Vec<_> = host_command(&self.root, program).iter().map(|word| format!("'{word}'")).collect();
        let path = folder.join(Path::new(program).file_name().unwrap_or_default());
        script(&path, &format!("exec {} \"$@\"", words.join(" ")))
    }

    /// Same as [`Self::name_in`], for a program that must see the root directory as its own, and its working directory.
    pub fn enter_in(&self, folder: &Path, program: &str) -> Result<()> {
        let path = folder.join(Path::new(program).file_name().unwrap_or_default());
        let inside = format!("cd \"$0\" && exec /{program} \"$@\"");
        script(&path, &format!("exec chroot '{}' sh -c '{inside}' \"$PWD\" \"$@\"", self.root.display()))
    }
}

fn script(path: &Path, line: &str) -> Result<()> {
    executable(path, &format!("#!/bin/sh\n{line}\n"))
}
