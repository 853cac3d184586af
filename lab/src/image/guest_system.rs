//! Other systems for guests: releases of Debian with their own kernels, for which DKMS builds the driver. Built when a
//! test needs one.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::guest_image::GuestImage;
use super::log_command::StepLog;
use super::programs::{self, CONTROL, INTEGRITY};
use super::roots::{APT_CONFIG, DPKG_CONFIG, executable, file_system, remove_tree, write};
use super::steps::Steps;
use super::{apt, initramfs, modules, root_disk, roots};

/// A system and its kernel.
#[derive(Debug)]
pub struct GuestSystem {
    /// Name in test names.
    pub name: &'static str,
    /// Name for reports.
    pub title: &'static str,
    /// Name of the release on the mirror.
    suite: &'static str,
    /// Additional suite from which the kernel is taken.
    more: Option<&'static str>,
    /// Prefix of the kernel's version; the newest match is taken.
    kernel: &'static str,
}

/// All tested systems.
pub static SYSTEMS: [GuestSystem; 8] = [
    system("debian-11-5.10", "Debian 11", "bullseye", None, "5.10."),
    system("debian-12-6.1", "Debian 12", "bookworm", None, "6.1."),
    system("debian-12-6.12", "Debian 12, backports", "bookworm", Some("bookworm-backports"), "6.12."),
    system("debian-13-6.12", "Debian 13", "trixie", None, "6.12."),
    system("debian-13-7.2", "Debian 13, backports", "trixie", Some("trixie-backports"), "7.2."),
    system("debian-13-7.3", "Debian 13, backports", "trixie", Some("trixie-backports"), "7.3."),
    system("debian-testing", "Debian testing", "forky", None, ""),
    system("debian-unstable", "Debian unstable", "sid", None, ""),
];

const fn system(
    name: &'static str,
    title: &'static str,
    suite: &'static str,
    more: Option<&'static str>,
    kernel: &'static str,
) -> GuestSystem {
    GuestSystem { name, title, suite, more, kernel }
}

/// Packages that a test needs.
const PACKAGES: &str = "rdma-core ibverbs-utils ibverbs-providers rdmacm-utils perftest iproute2 iputils-ping kmod \
                        pciutils procps gcc libc6-dev libibverbs-dev xz-utils";

impl GuestSystem {
    /// Builds the missing parts. The result boots as the image does, with the image's QEMU.
    pub fn build(&self, image: &GuestImage) -> Result<GuestImage> {
        let own = self.place(image);
        let libraries = own_libraries()?;
        let key = format!(
            "{self:?} {} {PACKAGES} {DPKG_CONFIG} {APT_CONFIG} {KERNEL} {DRIVER} {libraries:?} {DKMS} {} {} {CONTROL} {}",
            apt::mirror()?,
            root_disk::KEY,
            initramfs::KEY,
            INTEGRITY.1,
        );
        // The steps are separate from those of the image, so that users of the image alone do not wait for this system.
        let mut steps = Steps::open(&self.folder(image))?;
        steps.run(self.name, &key, |log| self.make(image, &own, &libraries, log))?;
        steps.finish();
        Ok(own)
    }

    /// Returns the location of the system, whether it is built or not.
    pub fn place(&self, image: &GuestImage) -> GuestImage {
        GuestImage::at(&self.folder(image).join("image"))
    }

    fn folder(&self, image: &GuestImage) -> PathBuf {
        image.directory().join("systems").join(self.name)
    }

    fn make(&self, image: &GuestImage, own: &GuestImage, libraries: &[PathBuf], log: &StepLog) -> Result<()> {
        remove_tree(own.directory())?;
        let root = own.guest_root();
        let suites: Vec<_> = [Some(self.suite), self.more].into_iter().flatten().collect();
        roots::debootstrap(&root, &suites, log)?;
        let target = self.more.map(|suite| format!("-t {suite}")).unwrap_or_default();
        let script = format!("beginning='{}'\ntarget='{target}'\npackages='{PACKAGES}'\n{KERNEL}", self.kernel);
        log.shell_in(&root, &script)?;
        let dkms = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pvrdmad/packaging/dkms/build");
        log.run(Command::new(dkms).arg(root.join("bed/packages")))?;
        log.shell_with_proc(&root, DRIVER)?;
        programs::compile(&INTEGRITY, &root, &root, log)?;

        let release = std::fs::read_to_string(root.join("bed/release")).context("no release of a kernel")?;
        let release = release.trim();
        write(&own.directory().join("kernel-release"), release)?;
        std::fs::copy(root.join("bed/vmlinuz"), own.kernel()).context("cannot copy the kernel")?;
        let all = root.join("lib/modules").join(release);
        for module in modules::boot_order(&all)? {
            if module.extension().is_some_and(|extension| extension == "xz") {
                log.run(Command::new("xz").arg("-d").arg(all.join(module)))?;
            }
        }
        log.shell_in(&root, &format!("depmod {release}"))?;
        initramfs::write_first_stage(&own.initramfs(), &root_disk::busybox(image), &all)?;

        // Directory for the agent's own libraries, which may be newer than the system's.
        std::fs::create_dir_all(root.join("bed/host")).context("cannot create a directory")?;
        for library in libraries {
            let name = library.file_name().context("a library without a name")?;
            std::fs::copy(library, root.join("bed/host").join(name)).context("cannot copy a library")?;
        }
        let loader = format!("/bed/host/{LOADER} --library-path /bed/host /run/guest-tests");
        executable(&root.join("bed/init"), &root_disk::KEY.replace("/run/guest-tests", &loader))?;
        std::fs::copy(root_disk::busybox(image), root.join("bed/busybox")).context("cannot copy busybox")?;
        write(&root.join("etc/hostname"), "guest\n")?;
        write(&root.join("etc/hosts"), "127.0.0.1 localhost\n")?;
        file_system(log, &root, &own.root_disk(), "3000M")?;
        // Programs for this machine are those of the image; the others are on the disk.
        std::os::unix::fs::symlink(image.builder_root(), own.builder_root()).context("cannot link QEMU")?;
        remove_tree(&root)
    }
}

/// The loader of this program.
const LOADER: &str = "ld-linux-x86-64.so.2";

/// Returns the libraries that this program needs to run in a system older than this machine's.
fn own_libraries() -> Result<Vec<PathBuf>> {
    let loader = Path::new("/lib64").join(LOADER);
    let own = std::env::current_exe().context("cannot find this program")?;
    let output = Command::new(&loader).arg("--list").arg(own).output().context("cannot ask the loader")?;
    let text = String::from_utf8_lossy(&output.stdout);
    // Lines have the form `libm.so.6 => /path (0x…)`; other lines name the loader or no file.
    let named = text.lines().filter_map(|line| Some(line.split_once("=> ")?.1.split_once(" (")?.0.into()));
    Ok(named.chain([loader]).collect())
}

/// Content of the driver's package.
const DKMS: &str = concat!(
    include_str!("../../../pvrdmad/packaging/dkms/build"),
    include_str!("../../../pvrdmad/packaging/dkms/control"),
    include_str!("../../../pvrdmad/packaging/dkms/dkms.conf"),
    include_str!("../../../pvrdmad/packaging/dkms/postinst"),
    include_str!("../../../pvrdmad/packaging/dkms/prerm"),
    include_str!("../../../pvrdmad/packaging/dkms/unpack"),
);

/// Installs programs and unpacks the newest kernel. The kernel is not installed, because that would build an unused
/// initramfs.
const KERNEL: &str = r#"
apt-get update -q
release=$(apt-cache search --names-only '^linux-image-[0-9][^ ]*-amd64$' | cut -d ' ' -f 1 | sed 's/^linux-image-//' |
    grep -v -e cloud -e -rt- | grep "^$beginning" | sort -V | tail -n 1)
series=$(echo "$release" | cut -d . -f 1,2)
apt-get install -y -q $target $packages "linux-headers-$release" "linux-source-$series"
mkdir -p /bed/packages
cd /bed
echo "$release" >release
# From 6.17 on it is in several packages.
for part in image binary modules; do
    if apt-cache show "linux-$part-$release" >part 2>&1; then apt-get download -q "linux-$part-$release"; fi
done
for package in linux-*.deb; do dpkg-deb -x "$package" image; done
kernel=image/boot/vmlinuz-$release
test -e "$kernel" || kernel=image/usr/lib/modules/$release/vmlinuz
cp "$kernel" vmlinuz
from=image/usr/lib/modules
test -d $from || from=image/lib/modules
cp -an "$from/$release/." "/lib/modules/$release/"
rm -r image part linux-*.deb
# What no guest here has.
cd "/lib/modules/$release/kernel"
rm -rf sound drivers/gpu drivers/media drivers/net/wireless drivers/staging drivers/iio drivers/usb
depmod "$release"
"#;

/// Builds the driver from the package, and then removes the sources, which are no longer needed.
const DRIVER: &str = r#"
apt-get install -y -q /bed/packages/*.deb
release=$(cat /bed/release)
dkms status -m vmw-pvrdma -k "$release" | grep installed || dkms autoinstall -k "$release"
dkms status -m vmw-pvrdma -k "$release" | grep installed
apt-get clean
rm -rf /bed/packages /usr/src/linux-source-* /var/lib/apt/lists/*
"#;
