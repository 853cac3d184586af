//! The guest's root file system as a read-only ext4 image, shared by all guests.

use anyhow::{Context, Result};

use super::guest_image::GuestImage;
use super::log_command::StepLog;
use super::roots::{executable, file_system, write};

/// Dependencies of the image besides the steps before it.
pub(crate) const KEY: &str = INIT;

/// Builds the image.
pub(crate) fn build(image: &GuestImage, log: &StepLog) -> Result<()> {
    let root = image.guest_root();
    let init = root.join("bed/init");
    executable(&init, INIT)?;
    std::fs::copy(busybox(image), root.join("bed/busybox")).context("cannot copy busybox")?;
    write(&root.join("etc/hostname"), "guest\n")?;
    write(&root.join("etc/hosts"), "127.0.0.1 localhost\n192.168.77.1 a\n192.168.77.2 b\n")?;
    file_system(log, &root, &image.root_disk(), "1500M")
}

/// Path of the static busybox: the shell of the first stage, and `reboot` in the guest.
pub(crate) fn busybox(image: &GuestImage) -> std::path::PathBuf {
    image.kernel_tree().join("usr/bin/busybox")
}

/// The guest's first process. It starts the agent, which does all the work, and restarts it if it ends.
const INIT: &str = "\
#!/bin/sh
export PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /tmp
mount -t debugfs debugfs /sys/kernel/debug
modprobe configfs 2>/dev/null
mount -t configfs configfs /sys/kernel/config
ulimit -l unlimited
ulimit -n 65536
/bed/busybox ip link set lo up
echo 1 > /proc/sys/kernel/printk_ratelimit_burst
while :; do
    /run/guest-tests agent
    /bed/busybox sleep 0.2
done
";
