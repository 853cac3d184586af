//! Locations of the parts of a guest image, and commands that run its programs.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::disk::Disk;

/// Folder of libraries in a Debian system.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
/// Marker file in a folder that is a copy.
const PACKED: &str = "packed";

/// A complete guest image in its cache directory.
#[derive(Clone, Debug)]
pub struct GuestImage {
    pub(super) dir: PathBuf,
}

impl GuestImage {
    /// Returns the image in a directory, which may be one that [`Self::pack`] made.
    pub fn at(directory: &Path) -> Self {
        Self { dir: directory.to_owned() }
    }

    /// Adds to a disk all files that a machine of this image needs to boot machines itself, in the directory `to`.
    pub fn pack(&self, disk: &Disk, to: &str) -> Result<()> {
        for (from, at) in self.parts()? {
            disk.add(&from, Path::new(to).join(at))?;
        }
        disk.link("/dev/vda", &format!("{to}/guest.ext4"))
    }

    /// Copies all files that boot guests into a folder that does not exist yet, with a list of the packages that they
    /// are from. The copy can be used at any path.
    pub fn copy_to(&self, folder: &Path) -> Result<()> {
        ensure!(!folder.exists(), "{} is there already", folder.display());
        let mut parts = self.parts()?;
        parts.push((self.root_disk(), self.root_disk().strip_prefix(&self.dir)?.to_owned()));
        for (from, at) in parts {
            let to = folder.join(at);
            let parent = to.parent().context("a path without a directory")?;
            std::fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
            let copied = Command::new("cp").args(["-rL", "--sparse=always"]).arg(&from).arg(&to).status();
            ensure!(copied.is_ok_and(|status| status.success()), "cannot copy {} to {}", from.display(), to.display());
        }
        self.write_contents(folder)?;
        std::fs::write(folder.join(PACKED), "").context("cannot mark the copy")
    }

    /// Returns `true` if this is a copy of the files that boot guests, which is never rebuilt.
    pub(super) fn is_packed(&self) -> bool {
        self.dir.join(PACKED).exists()
    }

    /// Returns the files and folders that boot guests, except their disk, each with its place in an image directory.
    fn parts(&self) -> Result<Vec<(PathBuf, PathBuf)>> {
        let mut parts = Vec::new();
        for path in [self.kernel(), self.initramfs()] {
            let at = path.strip_prefix(&self.dir)?.to_owned();
            parts.push((path, at));
        }
        for path in self.builder_parts()? {
            parts.push((self.builder_root().join(&path), Path::new("builder").join(path)));
        }
        Ok(parts)
    }

    /// Returns the parts of QEMU as paths in the builder system.
    pub(super) fn builder_parts(&self) -> Result<Vec<PathBuf>> {
        let mut parts =
            ["usr/bin/qemu-system-x86_64", "usr/share/qemu", "usr/share/seabios"].map(PathBuf::from).to_vec();
        parts.extend(self.library_paths("usr/bin/qemu-system-x86_64")?);
        Ok(parts)
    }

    /// Returns the loader and the libraries of a program, as paths in the builder system.
    pub(super) fn library_paths(&self, program: &str) -> Result<Vec<PathBuf>> {
        let libraries = self.libraries(program)?;
        let named = libraries.iter().filter_map(|library| library.file_name());
        Ok(named.map(|name| Path::new(LIBRARIES).join(name)).collect())
    }

    /// Returns the loader and the libraries of a program of the builder system.
    fn libraries(&self, program: &str) -> Result<Vec<PathBuf>> {
        let mut words = host_command(&self.builder_root(), program);
        words.insert(1, "--list".to_owned());
        let output = Command::new(&words[0]).args(&words[1..]).output().context("cannot ask the loader")?;
        let text = String::from_utf8_lossy(&output.stdout);
        let mut paths = vec![PathBuf::from(&words[0])];
        // Lines have the form `libz.so.1 => /path (0x…)`; other lines name the loader or no file.
        paths.extend(text.lines().filter_map(|line| Some(line.split_once("=> ")?.1.split_once(" (")?.0.into())));
        Ok(paths)
    }

    /// Path of the guests' kernel.
    pub fn kernel(&self) -> PathBuf {
        self.dir.join("vmlinuz")
    }

    /// Path of the first stage, to which a guest's own files are appended.
    pub fn initramfs(&self) -> PathBuf {
        self.dir.join("initramfs.cpio")
    }

    /// Path of the read-only root file system.
    pub fn root_disk(&self) -> PathBuf {
        self.dir.join("guest.ext4")
    }

    /// Returns QEMU from the builder system, run with that system's own loader and libraries. There is no chroot, so
    /// paths on the command line are this machine's, and root is not needed. Returns the program and its first
    /// arguments.
    pub fn qemu(&self) -> (String, Vec<String>) {
        let (loader, mut arguments) = self.host_program("usr/bin/qemu-system-x86_64");
        for directory in self.qemu_firmware() {
            arguments.extend(["-L".to_owned(), directory.to_string_lossy().into_owned()]);
        }
        (loader, arguments)
    }

    /// Folders with the firmware of QEMU's machines.
    pub fn qemu_firmware(&self) -> [PathBuf; 2] {
        ["usr/share/qemu", "usr/share/seabios"].map(|directory| self.builder_root().join(directory))
    }

    /// Returns Wireshark's command-line dissector in the same form.
    pub fn tshark(&self) -> (String, Vec<String>) {
        self.host_program("usr/bin/tshark")
    }

    /// Returns a program of the builder system, run by that system's own loader.
    fn host_program(&self, program: &str) -> (String, Vec<String>) {
        let mut words = host_command(&self.builder_root(), program);
        (words.remove(0), words)
    }

    /// Returns the command line of a program of the builder system, if the image is built.
    pub fn built_program(program: &str) -> Option<Vec<String>> {
        let root = cache_directory().ok()?.join("builder");
        root.join(program).exists().then(|| host_command(&root, program))
    }

    /// Directory of QEMU's loadable modules.
    pub fn qemu_module_directory(&self) -> PathBuf {
        self.builder_root().join("usr/lib/x86_64-linux-gnu/qemu")
    }

    /// Returns the version of QEMU, for reports.
    pub fn qemu_version(&self) -> Result<String> {
        let (program, arguments) = self.qemu();
        let output =
            Command::new(program).args(arguments).arg("-version").output().context("cannot run the image's QEMU")?;
        let text = String::from_utf8_lossy(&output.stdout);
        Ok(text.lines().next().unwrap_or_default().to_owned())
    }

    /// The image's directory.
    pub fn directory(&self) -> &Path {
        &self.dir
    }

    pub(super) fn base_root(&self) -> PathBuf {
        self.dir.join("base")
    }

    pub(super) fn builder_root(&self) -> PathBuf {
        self.dir.join("builder")
    }

    pub(super) fn guest_root(&self) -> PathBuf {
        self.dir.join("guest")
    }

    /// Path of the unpacked kernel image package.
    pub(super) fn kernel_tree(&self) -> PathBuf {
        self.dir.join("kernel")
    }

    /// Returns the release of the kernel, as `uname -r` prints it.
    pub(super) fn kernel_release(&self) -> Result<String> {
        let path = self.dir.join("kernel-release");
        Ok(std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?.trim().to_owned())
    }

    pub(super) fn driver(&self) -> PathBuf {
        self.dir.join("vmw_pvrdma.ko")
    }
}

/// Returns the directory of the image: the one in `PVRDMA_BED_DIR`, a copy that was unpacked together with this
/// program, or the user's own.
pub(super) fn cache_directory() -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os("PVRDMA_BED_DIR") {
        return std::path::absolute(dir).context("PVRDMA_BED_DIR is not a usable path");
    }
    let own = std::env::current_exe().context("cannot find this program")?;
    if let Some(unpacked) = own.ancestors().nth(2).map(|folder| folder.join("bed"))
        && unpacked.join(PACKED).exists()
    {
        return Ok(unpacked);
    }
    let cache = match std::env::var_os("XDG_CACHE_HOME") {
        Some(dir) if !dir.is_empty() => PathBuf::from(dir),
        _ => {
            let home = std::env::var_os("HOME").context("neither PVRDMA_BED_DIR, XDG_CACHE_HOME nor HOME is set")?;
            PathBuf::from(home).join(".cache")
        }
    };
    Ok(cache.join("pvrdma-guest-bed"))
}

/// Returns the command line of a program in another Debian root, run with that system's own loader and libraries.
pub(super) fn host_command(root: &Path, program: &str) -> Vec<String> {
    let libraries = root.join(LIBRARIES);
    let (loader, program) = (libraries.join("ld-linux-x86-64.so.2"), root.join(program));
    [&loader, Path::new("--library-path"), &libraries, &program]
        .map(|word| word.to_string_lossy().into_owned())
        .to_vec()
}
