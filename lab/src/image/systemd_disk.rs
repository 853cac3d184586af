//! A Debian that boots systemd, with tools that check packages: a separate disk for the guests, built when a test needs
//! it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::guest_image::GuestImage;
use super::log_command::StepLog;
use super::root_disk;
use super::roots::{base_key, copy_tree, executable, file_system, remove_tree, write};
use super::steps::Steps;

/// Packages in addition to a minimal Debian.
const PACKAGES: [&str; 7] = ["systemd", "systemd-sysv", "dbus", "adduser", "procps", "kmod", "lintian"];

/// Units that wait for devices which are never announced without udev.
const MASKED: [&str; 2] = ["serial-getty@ttyS0", "getty@tty1"];

/// A root file system whose first process is systemd.
#[derive(Debug)]
pub struct SystemdDisk {
    root: PathBuf,
    disk: PathBuf,
}

impl SystemdDisk {
    /// Builds the missing parts.
    pub fn build(image: &GuestImage) -> Result<Self> {
        let built = Self { root: image.directory().join("systemd"), disk: image.directory().join("systemd.ext4") };
        let mut steps = Steps::open(image.directory())?;
        let key = format!("{} {} {} {INIT} {AGENT}", base_key()?, PACKAGES.join(" "), MASKED.join(" "));
        steps.run("systemd disk", &key, |log| built.make(image, log))?;
        steps.finish();
        Ok(built)
    }

    /// Path of the file system.
    pub fn disk(&self) -> &Path {
        &self.disk
    }

    /// Path of the folder that it is built from, for programs that can run on this machine.
    pub fn root(&self) -> &Path {
        &self.root
    }

    fn make(&self, image: &GuestImage, log: &StepLog) -> Result<()> {
        copy_tree(log, &image.base_root(), &self.root)?;
        log.shell_in(&self.root, &format!("apt-get install -y -q {}; apt-get clean", PACKAGES.join(" ")))?;
        remove_tree(&self.root.join("var/lib/apt/lists"))?;
        let modules = image.guest_root().join("usr/lib/modules");
        log.run(Command::new("cp").arg("-a").arg(&modules).arg(self.root.join("usr/lib")))?;
        let init = self.root.join("bed/init");
        executable(&init, INIT)?;
        std::fs::copy(root_disk::busybox(image), self.root.join("bed/busybox")).context("cannot copy busybox")?;
        write(&self.root.join("etc/systemd/system/agent.service"), AGENT)?;
        log.shell_in(&self.root, &format!("systemctl enable -q agent; systemctl mask -q {}", MASKED.join(" ")))?;
        file_system(log, &self.root, &self.disk, "1500M")
    }
}

/// Program that the first stage starts. The first stage leaves the agent in `/run`, which is world-writable until this
/// point.
const INIT: &str = "\
#!/bin/sh
chmod 755 /run
exec /lib/systemd/systemd
";

/// Unit of the agent, which starts when the system is up.
const AGENT: &str = "\
[Unit]
Description=The host's commands
After=multi-user.target

[Service]
ExecStart=/run/guest-tests agent
Environment=HOME=/root LC_ALL=C PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
Restart=always

[Install]
WantedBy=default.target
";
