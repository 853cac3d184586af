//! The guests' kernel and the unchanged upstream driver, which Debian's kernel configuration leaves out.

use anyhow::{Context, Result};

use super::guest_image::GuestImage;
use super::log_command::StepLog;
use super::roots::remove_tree;

/// Dependencies of the kernel step besides the steps before it.
pub(crate) const KEY: &str = FETCH_SCRIPT;
/// Dependencies of the driver step besides the steps before it.
pub(crate) const DRIVER_KEY: &str = DRIVER_SCRIPT;

/// Unpacks the kernel image package. It is not installed, because that would build an unused initramfs.
pub(crate) fn fetch(image: &GuestImage, log: &StepLog) -> Result<()> {
    let release = image.kernel_release()?;
    let root = image.builder_root();
    log.shell_in(&root, &format!("release={release}\n{FETCH_SCRIPT}"))?;
    let tree = image.kernel_tree();
    remove_tree(&tree)?;
    std::fs::rename(root.join("bed/image"), &tree).context("cannot move the unpacked kernel")?;
    std::fs::copy(tree.join(format!("boot/vmlinuz-{release}")), image.kernel()).context("cannot copy the kernel")?;
    Ok(())
}

/// Builds `vmw_pvrdma` from Debian's source package, without any change.
pub(crate) fn build_driver(image: &GuestImage, log: &StepLog) -> Result<()> {
    let release = image.kernel_release()?;
    let root = image.builder_root();
    log.shell_in(&root, &format!("release={release}\n{DRIVER_SCRIPT}"))?;
    std::fs::copy(root.join("bed/vmw_pvrdma.ko"), image.driver()).context("cannot copy the driver module")?;
    Ok(())
}

/// The control files go where a package manager has those of installed packages.
const FETCH_SCRIPT: &str = "\
rm -rf /bed && mkdir /bed && cd /bed
apt-get download -q linux-image-$release busybox-static
mkdir -p image/var/lib/dpkg
for package in *.deb; do
    dpkg-deb -x $package image
    dpkg-deb -f $package >>image/var/lib/dpkg/status
    echo >>image/var/lib/dpkg/status
done
rm *.deb
";

const DRIVER_SCRIPT: &str = "\
rm -rf /bed/driver && mkdir -p /bed/driver && cd /bed/driver
apt-get download -q linux-source-6.12
dpkg-deb --fsys-tarfile linux-source-6.12_*.deb | tar -x
rm ./*.deb
xz -T0 -dc usr/src/linux-source-6.12.tar.xz |
    tar -x --strip-components=1 --wildcards '*/drivers/infiniband/hw/vmw_pvrdma'
rm -r usr
make -j \"$(nproc)\" -C /usr/src/linux-headers-$release M=$PWD/drivers/infiniband/hw/vmw_pvrdma \\
    CONFIG_INFINIBAND_VMWARE_PVRDMA=m modules
strip -g -o /bed/vmw_pvrdma.ko drivers/infiniband/hw/vmw_pvrdma/vmw_pvrdma.ko
";
