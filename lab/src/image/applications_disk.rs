//! The guests' system with RDMA applications: a separate disk, built when a test needs it.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::guest_image::GuestImage;
use super::log_command::StepLog;
use super::modules;
use super::roots::{base_key, copy_tree, file_system, remove_tree, write};
use super::steps::Steps;

/// Packages in addition to the guests' packages.
const PACKAGES: [&str; 16] = [
    "ucx-utils",
    "libucx0",
    "libfabric-bin",
    "mpich",
    "libmpich-dev",
    "openmpi-bin",
    "libopenmpi-dev",
    "gcc",
    "libc6-dev",
    "openssh-server",
    "openssh-client",
    "qperf",
    "netcat-openbsd",
    "nfs-kernel-server",
    "nfs-common",
    "open-iscsi",
];

/// Kernel consumers of RDMA.
const MODULES: [&str; 14] = [
    "nfsd",
    "nfsv4",
    "rpcrdma",
    "target_core_mod",
    "target_core_file",
    "iscsi_target_mod",
    "ib_isert",
    "ib_iser",
    "sd_mod",
    "ib_srpt",
    "ib_srp",
    "rds_rdma",
    "smc",
    "smc_diag",
];

/// Compares every byte in each kind of MPI exchange.
const MPI_EXCHANGE: &str = include_str!("../../guest/mpi_exchange.c");

/// Kernel sockets over RDMA.
const KERNEL_SOCKETS: &str = include_str!("../../guest/kernel_sockets.c");

/// A root file system with these programs.
#[derive(Debug)]
pub struct ApplicationsDisk {
    root: PathBuf,
    disk: PathBuf,
}

impl ApplicationsDisk {
    /// Builds the missing parts.
    pub fn build(image: &GuestImage) -> Result<Self> {
        let directory = image.directory();
        let built = Self { root: directory.join("applications"), disk: directory.join("applications.ext4") };
        let mut steps = Steps::open(directory)?;
        let key = format!(
            "{} {} {} {LOG_IN} {MPI_EXCHANGE} {KERNEL_SOCKETS}",
            base_key()?,
            PACKAGES.join(" "),
            MODULES.join(" ")
        );
        steps.run("applications disk", &key, |log| built.make(image, log))?;
        steps.finish();
        Ok(built)
    }

    /// Path of the file system.
    pub fn disk(&self) -> &Path {
        &self.disk
    }

    fn make(&self, image: &GuestImage, log: &StepLog) -> Result<()> {
        copy_tree(log, &image.guest_root(), &self.root)?;
        let packages = PACKAGES.join(" ");
        log.shell_in(&self.root, &format!("apt-get update -q; apt-get install -y -q {packages}; apt-get clean"))?;
        remove_tree(&self.root.join("var/lib/apt/lists"))?;
        modules::copy(image, log, &self.root, MODULES)?;
        log.shell_in(&self.root, LOG_IN)?;
        write(&self.root.join("bed/mpi_exchange.c"), MPI_EXCHANGE)?;
        write(&self.root.join("bed/kernel_sockets.c"), KERNEL_SOCKETS)?;
        for (compiler, source, program) in [
            ("mpicc.openmpi", "mpi_exchange", "mpi_exchange.openmpi"),
            ("mpicc.mpich", "mpi_exchange", "mpi_exchange.mpich"),
            ("gcc", "kernel_sockets", "kernel_sockets"),
        ] {
            let options = "-O2 -Wall -Wextra -Werror";
            log.shell_in(&self.root, &format!("{compiler} {options} -o /usr/local/bin/{program} /bed/{source}.c"))?;
        }
        file_system(log, &self.root, &self.disk, "3000M")
    }
}

/// Allows root of each guest to log in to the other one by SSH, which starts the ranks of an MPI program.
const LOG_IN: &str = "\
ssh-keygen -A
mkdir -p /root/.ssh
rm -f /root/.ssh/id_ed25519
ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519
cp /root/.ssh/id_ed25519.pub /root/.ssh/authorized_keys
printf 'Host *\n StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n LogLevel ERROR\n' > /root/.ssh/config
chmod -R go= /root/.ssh";
