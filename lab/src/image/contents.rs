//! The Debian packages from which a copied image has files, with their licences and the place of their sources.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;

use super::deb822::{Paragraph, paragraphs};
use super::guest_image::GuestImage;

/// File of a copied image that lists the packages.
const LIST: &str = "contents.json";
/// Folder of a copied image with the copyright file of each source package.
const LICENCES: &str = "licences";

/// Tools of the builder system that the container image of the lab has beside the copy.
const TOOLS: [&str; 3] = ["usr/bin/setpriv", "usr/sbin/mke2fs", "usr/sbin/debugfs"];

/// A binary package.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Package {
    name: String,
    version: String,
    /// Name of the source package.
    source: String,
    source_version: String,
    /// Archive with the sources of all versions of Debian's packages.
    source_url: String,
    /// Short names of the licences, if the copyright file is machine-readable.
    licences: BTreeSet<String>,
    /// The copyright file in the copied image, if the package or another one of its source has it.
    licence_file: Option<PathBuf>,
    /// Files of the image that have content of the package.
    parts: BTreeSet<&'static str>,
}

impl Package {
    /// Returns the package of a paragraph in the list of installed packages.
    fn of(paragraph: Paragraph<'_>) -> Option<Self> {
        let (name, version) = (paragraph.line("Package")?, paragraph.line("Version")?);
        // The field is absent if the source has the package's name, and has a version if that is another one.
        let (source, source_version) = match paragraph.line("Source") {
            None => (name, version),
            Some(source) => match source.split_once(" (") {
                None => (source, version),
                Some((source, of_source)) => (source, of_source.trim_end_matches(')')),
            },
        };
        let escaped = source_version.replace('+', "%2B").replace(':', "%3A");
        Some(Self {
            name: name.to_owned(),
            version: version.to_owned(),
            source: source.to_owned(),
            source_version: source_version.to_owned(),
            source_url: format!("https://snapshot.debian.org/package/{source}/{escaped}/"),
            licences: BTreeSet::new(),
            licence_file: None,
            parts: BTreeSet::new(),
        })
    }
}

/// Returns the short names of the licences in a machine-readable copyright file, and none for another file.
fn licences(copyright: &str) -> BTreeSet<String> {
    let mut paragraphs = paragraphs(copyright).peekable();
    let is_readable = paragraphs.peek().is_some_and(|header| header.line("Format").is_some());
    paragraphs
        .filter(|_| is_readable)
        .filter_map(|paragraph| paragraph.line("License"))
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect()
}

/// A root directory with packages.
struct Root {
    path: PathBuf,
    packages: BTreeMap<String, Package>,
}

impl Root {
    fn read(path: PathBuf) -> Result<Self> {
        let status = path.join("var/lib/dpkg/status");
        let text = std::fs::read_to_string(&status).with_context(|| format!("cannot read {}", status.display()))?;
        let packages = paragraphs(&text).filter_map(Package::of).map(|package| (package.name.clone(), package));
        Ok(Self { packages: packages.collect(), path })
    }

    /// Returns the names of the packages that own these files and folders, given by their paths from the root
    /// directory.
    fn owners(&self, paths: &[PathBuf]) -> Result<BTreeSet<String>> {
        let mut files = BTreeSet::new();
        for path in paths {
            add_files(&self.path, path, &mut files)?;
        }
        let folder = self.path.join("var/lib/dpkg/info");
        let entries = std::fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
        let mut owners = BTreeSet::new();
        for entry in entries {
            let path = entry?.path();
            // The name of a package that several architectures can have installed ends in `:ARCHITECTURE`.
            let Some(name) = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".list")) else { continue };
            let list = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            if list.lines().any(|line| files.contains(&without_merged_directory(Path::new(line)))) {
                owners.insert(name.split(':').next().unwrap_or(name).to_owned());
            }
        }
        Ok(owners)
    }

    fn copyright(&self, package: &str) -> Option<String> {
        let path = self.path.join("usr/share/doc").join(package).join("copyright");
        std::fs::read(path).ok().map(|text| String::from_utf8_lossy(&text).into_owned())
    }
}

/// Adds a file, or all files of a folder, to a set of paths from the root directory.
fn add_files(root: &Path, path: &Path, files: &mut BTreeSet<PathBuf>) -> Result<()> {
    let full = root.join(path);
    if !full.is_dir() {
        files.insert(without_merged_directory(path));
        return Ok(());
    }
    for entry in std::fs::read_dir(&full).with_context(|| format!("cannot read {}", full.display()))? {
        add_files(root, &path.join(entry?.file_name()), files)?;
    }
    Ok(())
}

/// Returns a path as it was before Debian moved `/bin`, `/lib` and so on below `/usr`. Lists of packages have both
/// forms.
fn without_merged_directory(path: &Path) -> PathBuf {
    let path = path.strip_prefix("/").unwrap_or(path);
    path.strip_prefix("usr").unwrap_or(path).to_owned()
}

impl GuestImage {
    /// Writes the list of the packages, and their copyright files, into a copy of this image.
    pub(super) fn write_contents(&self, copy: &Path) -> Result<()> {
        let builder = Root::read(self.builder_root())?;
        let mut of_builder = self.builder_parts()?;
        for tool in TOOLS {
            of_builder.push(tool.into());
            of_builder.extend(self.library_paths(tool)?);
        }
        let roots = [
            (builder.owners(&of_builder)?, builder, "builder"),
            with_all(Root::read(self.guest_root())?, "guest.ext4"),
            with_all(Root::read(self.kernel_tree())?, "vmlinuz, initramfs.cpio, guest.ext4"),
        ];
        let folder = copy.join(LICENCES);
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let mut packages: BTreeMap<(String, String), Package> = BTreeMap::new();
        for (names, root, part) in &roots {
            for package in names.iter().filter_map(|name| root.packages.get(name)) {
                if let Some(text) = root.copyright(&package.name) {
                    let path = folder.join(&package.source);
                    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
                }
                let key = (package.name.clone(), package.version.clone());
                packages.entry(key).or_insert_with(|| package.clone()).parts.insert(part);
            }
        }
        for package in packages.values_mut() {
            // A package without the file has a link to one of the same source.
            if let Ok(text) = std::fs::read_to_string(folder.join(&package.source)) {
                package.licences = licences(&text);
                package.licence_file = Some(Path::new(LICENCES).join(&package.source));
            }
        }
        let list: Vec<_> = packages.into_values().collect();
        let json = serde_json::to_string_pretty(&list).context("cannot list the packages")?;
        std::fs::write(copy.join(LIST), json + "\n").context("cannot write the list of packages")
    }
}

fn with_all(root: Root, part: &'static str) -> (BTreeSet<String>, Root, &'static str) {
    (root.packages.keys().cloned().collect(), root, part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(text: &str) -> Package {
        Package::of(paragraphs(text).next().unwrap()).unwrap()
    }

    #[test]
    fn the_source_of_a_package() {
        let of = |text: &str| {
            let package = package(text);
            (package.source, package.source_version, package.source_url)
        };
        let url = "https://snapshot.debian.org/package/";
        let own = of("Package: fio\nVersion: 3.39-1\n");
        assert_eq!(own, ("fio".into(), "3.39-1".into(), format!("{url}fio/3.39-1/")));
        let other = of("Package: libibverbs1\nSource: rdma-core\nVersion: 56.1-1+b1\n");
        assert_eq!(other, ("rdma-core".into(), "56.1-1+b1".into(), format!("{url}rdma-core/56.1-1%2Bb1/")));
        let versioned = of("Package: gcc\nVersion: 4:14.2\nSource: gcc-defaults (1.220)\n");
        assert_eq!(versioned, ("gcc-defaults".into(), "1.220".into(), format!("{url}gcc-defaults/1.220/")));
        assert!(Package::of(paragraphs("Package: a\n").next().unwrap()).is_none());
    }

    #[test]
    fn licences_of_a_machine_readable_file() {
        let text = "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\nLicense: MIT\n\n\
                    Files: *\nLicense: GPL-2 or BSD\n text\n\nFiles: b\nLicense: MIT\n";
        assert_eq!(licences(text), BTreeSet::from(["GPL-2 or BSD".to_owned(), "MIT".to_owned()]));
        assert!(licences("This is free.\n\nLicense: none of a machine\n").is_empty());
        assert!(licences("").is_empty());
    }

    #[test]
    fn owners_of_files() {
        let folder = tempfile::tempdir().unwrap();
        let info = folder.path().join("var/lib/dpkg/info");
        std::fs::create_dir_all(&info).unwrap();
        let status = "Package: libc6\nVersion: 1\n\nPackage: qemu\nVersion: 2\n\nPackage: other\nVersion: 3\n";
        std::fs::write(info.join("../status"), status).unwrap();
        std::fs::write(info.join("libc6:amd64.list"), "/.\n/lib/x/libc.so.6\n").unwrap();
        std::fs::write(info.join("qemu.list"), "/usr/bin/qemu\n").unwrap();
        std::fs::write(info.join("other.list"), "/usr/bin/other\n").unwrap();
        std::fs::write(info.join("other.md5sums"), "/usr/bin/qemu\n").unwrap();
        std::fs::write(info.join("firmware.list"), "/usr/share/firmware/a\n").unwrap();
        std::fs::create_dir_all(folder.path().join("usr/share/firmware")).unwrap();
        std::fs::write(folder.path().join("usr/share/firmware/a"), "").unwrap();
        let root = Root::read(folder.path().to_owned()).unwrap();
        let paths = ["usr/lib/x/libc.so.6", "usr/bin/qemu", "usr/share/firmware"].map(PathBuf::from);
        assert_eq!(root.owners(&paths).unwrap(), BTreeSet::from(["firmware", "libc6", "qemu"].map(str::to_owned)));
    }
}
