//! The guests' system with packages that a caller names: a separate disk for each choice.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Result, bail, ensure};

use super::guest_image::GuestImage;
use super::log_command::StepLog;
use super::roots::{base_key, copy_tree, file_system, remove_tree};
use super::steps::Steps;

/// Name of a Debian package, with its version if one is named: `gcc`, `gcc=4:14.2.0-1`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Package(String);

impl FromStr for Package {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, version) = text.split_once('=').unwrap_or((text, "0"));
        let starts = |text: &str| text.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit());
        let plain = |text: &str, more: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || more.contains(c));
        let is_name = starts(name) && plain(name, "+-.") && !name.contains(|c: char| c.is_ascii_uppercase());
        if is_name && starts(version) && plain(version, "+-.:~") {
            return Ok(Self(text.to_owned()));
        }
        Err(format!("'{text}' is no name of a Debian package"))
    }
}

impl fmt::Display for Package {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Builds the disk with these packages if it is missing, and returns its path.
///
/// # Errors
/// The image is a copy, from which no disk can be built, or a package cannot be installed.
pub fn packages_disk(image: &GuestImage, packages: &[Package]) -> Result<PathBuf> {
    if image.is_packed() {
        bail!("--package needs the guest image where it was built; {} is a copy", image.directory().display());
    }
    let mut names: Vec<_> = packages.iter().map(ToString::to_string).collect();
    names.sort();
    names.dedup();
    let names = names.join(" ");
    let mut hasher = DefaultHasher::new();
    names.hash(&mut hasher);
    let folder = image.directory().join("packages").join(format!("{:016x}", hasher.finish()));
    let disk = folder.join("guest.ext4");
    let key = format!("{} {names} {}", base_key()?, super::root_disk::KEY);
    let mut steps = Steps::open(&folder)?;
    steps.run("packages", &key, |log| make(image, &names, &folder.join("root"), &disk, log))?;
    steps.finish();
    ensure!(disk.exists(), "{} is missing", disk.display());
    Ok(disk)
}

fn make(image: &GuestImage, names: &str, root: &std::path::Path, disk: &std::path::Path, log: &StepLog) -> Result<()> {
    copy_tree(log, &image.guest_root(), root)?;
    log.shell_in(root, &format!("apt-get update -q; apt-get install -y -q {names}; apt-get clean"))?;
    remove_tree(&root.join("var/lib/apt/lists"))?;
    file_system(log, root, disk, "8000M")?;
    remove_tree(root)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_packages() {
        for text in ["gcc", "libstdc++6", "ucx-utils=1.18.1+ds-2", "linux-image-6.12.1"] {
            assert_eq!(text.parse::<Package>().unwrap().to_string(), text);
        }
        for text in ["", "-o", "--reinstall", "a b", "a;b", "$(x)", "Gcc", "a=", "a=-1", "a=1;b", "../x.deb", "a/b"] {
            assert!(text.parse::<Package>().is_err(), "{text}");
        }
    }
}
