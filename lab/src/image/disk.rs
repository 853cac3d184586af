//! Packs files of this machine on a disk for a guest.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Space for the file system itself.
const SPARE_MIB: u64 = 32;

/// Content of a disk, collected in a directory.
#[derive(Debug)]
pub struct Disk {
    stage: PathBuf,
    image: PathBuf,
}

impl Disk {
    /// Creates an empty disk in `directory`.
    pub fn new(directory: &Path) -> Result<Self> {
        let stage = directory.join("disk");
        std::fs::create_dir_all(&stage).with_context(|| format!("cannot create {}", stage.display()))?;
        Ok(Self { stage, image: directory.join("disk.ext4") })
    }

    /// Adds a file, or a directory with everything in it, under a path on the disk.
    pub fn add(&self, from: &Path, to: impl AsRef<Path>) -> Result<()> {
        run(Command::new("cp").arg("-rL").arg("--reflink=auto").arg(from).arg(self.place(to.as_ref())?))
    }

    /// Adds a symbolic link.
    pub fn link(&self, target: &str, at: &str) -> Result<()> {
        symlink(target, self.place(at.as_ref())?).with_context(|| format!("cannot make a link {at}"))
    }

    /// Returns the path of an entry, after creating the directories above it.
    fn place(&self, path: &Path) -> Result<PathBuf> {
        let place = self.stage.join(path);
        let parent = place.parent().context("a path without a directory")?;
        std::fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
        Ok(place)
    }

    /// Creates the image (ext4) and returns its path.
    pub fn build(self) -> Result<PathBuf> {
        let bytes = size(&self.stage)?;
        let _ = std::fs::remove_file(&self.image);
        run(Command::new("mke2fs")
            .args(["-q", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-d"])
            .arg(&self.stage)
            .arg(&self.image)
            .arg(format!("{}M", (bytes >> 20) * 17 / 16 + SPARE_MIB)))?;
        std::fs::remove_dir_all(&self.stage).with_context(|| format!("cannot remove {}", self.stage.display()))?;
        Ok(self.image)
    }
}

/// Returns the total size of all files in a directory in bytes.
fn size(directory: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))? {
        let entry = entry?;
        bytes += if entry.file_type()?.is_dir() { size(&entry.path())? } else { entry.metadata()?.len() };
    }
    Ok(bytes)
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}
