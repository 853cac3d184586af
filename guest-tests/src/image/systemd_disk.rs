//! A Debian that boots systemd, with what checks packages: another disk for the guests, made when a test asks for it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::guest_image::GuestImage;
use super::log_command::StepLog;
use super::root_disk;
use super::roots::{base_key, copy_tree, executable, file_system, remove_tree, write};
use super::steps::Steps;

/// What the system has beside a minimal Debian.
const PACKAGES: [&str; 7] = ["systemd", "systemd-sysv", "dbus", "adduser", "procps", "kmod", "lintian"];

/// Units that wait for devices which nobody announces without udev.
const MASKED: [&str; 2] = ["serial-getty@ttyS0", "getty@tty1"];

/// A root file system whose first process is systemd.
#[derive(Debug)]
pub(crate) struct SystemdDisk {
    root: PathBuf,
    disk: PathBuf,
}

impl SystemdDisk {
    /// Builds what is missing of it.
    pub(crate) fn build(image: &GuestImage) -> Result<Self> {
        let built = Self { root: image.directory().join("systemd"), disk: image.directory().join("systemd.ext4") };
        let mut steps = Steps::open(image.directory())?;
        let key = format!("{} {} {} {INIT} {AGENT}", base_key()?, PACKAGES.join(" "), MASKED.join(" "));
        steps.run("systemd disk", &key, |log| built.make(image, log))?;
        steps.finish();
        Ok(built)
    }

    /// The file system.
    pub(crate) fn disk(&self) -> &Path {
        &self.disk
    }

    /// The folder that it was made of, for programs that can run here.
    pub(crate) fn root(&self) -> &Path {
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

/// What the first stage starts: it left the agent in `/run`, which everybody could write to until now.
const INIT: &str = "\
#!/bin/sh
chmod 755 /run
exec /lib/systemd/systemd
";

/// The agent, up when the system is.
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
