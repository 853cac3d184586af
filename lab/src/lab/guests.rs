//! The guests of a run and the daemon between them.

use std::net::Ipv4Addr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::cli::RunArgs;
use super::script::{Surroundings, quoted};
use crate::daemon::{Daemon, DaemonDevice};
use crate::endpoints::{LOAD_DRIVER, PVRDMA_DEVICE, gid_index, network_script};
use crate::image::GuestImage;
use crate::vm::{FOLDER_TAG, Folder, Job, Vm, VmBuilder, has_kvm};

/// MTU of a network without an uplink: large enough for every path MTU.
const MTU: u32 = 9000;

/// Time limit for the setup of a guest. It is generous, for emulated processors on a busy machine.
const SET_UP: Duration = Duration::from_secs(120);

/// Running guests.
#[derive(Debug)]
pub(super) struct Guests {
    // Fields are dropped in this order: machines first.
    vms: Vec<Vm>,
    daemon: Daemon,
    folder: Folder,
    addresses: Vec<Ipv4Addr>,
    gid_indices: Vec<u32>,
    qemu: String,
    directory: TempDir,
}

impl Guests {
    /// Starts the daemon and the machines without waiting for the guests.
    pub(super) fn start(image: &GuestImage, args: &RunArgs, folder: Folder) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("pvrdma-lab-").tempdir();
        let directory = directory.context("cannot create a directory for the machines' sockets")?;
        let path = |number: u8, kind: &str| directory.path().join(format!("vm{number}.{kind}"));
        let devices: Vec<_> = (0..args.vms)
            .map(|number| DaemonDevice {
                name: format!("vm{number}"),
                socket: path(number, "pvrdma"),
                mac: format!("52:54:00:00:00:{:02x}", number + 1),
                // No real hardware accesses the memory, and the usual limit of locked memory is small.
                options: format!(",nic-socket={},pin=off", path(number, "nic").display()),
            })
            .collect();
        let daemon = Daemon::start(directory.path(), &devices)?;
        let machine = |number| {
            VmBuilder::new(image, directory.path())
                .name(&format!("vm{number}"))
                .memory_mib(args.memory)
                .cpus(args.cpus)
                .nic_socket(&path(number, "nic"))
                .pvrdma_socket(&path(number, "pvrdma"))
                .folder(folder.clone())
                .start()
        };
        let vms = (0..args.vms).map(machine).collect::<Result<Vec<_>>>()?;
        let addresses = (1..=args.vms).map(|last| Ipv4Addr::new(192, 168, 77, last)).collect();
        let qemu = image.qemu_version()?;
        Ok(Self { vms, daemon, folder, addresses, gid_indices: Vec::new(), qemu, directory })
    }

    /// Waits for the guests, sets their addresses, loads the driver and mounts the folder.
    ///
    /// # Errors
    /// A guest does not come up, or not in time.
    pub(super) fn bring_up(&mut self, deadline: Instant) -> Result<()> {
        for vm in &self.vms {
            vm.wait_boot_until(deadline)?;
        }
        let left = || SET_UP.min(deadline.saturating_duration_since(Instant::now()));
        let jobs = self.vms.iter().zip(&self.addresses).map(|(vm, address)| vm.spawn(&self.set_up(*address)));
        let jobs = jobs.collect::<Result<Vec<Job>>>()?;
        for (job, vm) in jobs.iter().zip(&self.vms) {
            job.wait_success(left()).with_context(|| vm.diagnosis())?;
        }
        let indices = self
            .vms
            .iter()
            .zip(&self.addresses)
            .map(|(vm, address)| gid_index(vm, PVRDMA_DEVICE, (*address).into()).with_context(|| vm.diagnosis()));
        self.gid_indices = indices.collect::<Result<_>>()?;
        Ok(())
    }

    /// Returns the setup script of a guest.
    fn set_up(&self, address: Ipv4Addr) -> String {
        let hosts: Vec<_> = self.names().map(|(name, address)| format!("{address} {name}")).collect();
        let folder = quoted(&self.folder.path.to_string_lossy());
        let option = if self.folder.read_only { "ro" } else { "rw" };
        // Without a cache, each guest immediately sees the writes of the others. `mmap` is the weakest mode that allows
        // mappings.
        let options = format!("trans=virtio,version=9p2000.L,msize=512000,cache=mmap,{option}");
        format!(
            "{}
             {LOAD_DRIVER} || exit
             printf '127.0.0.1 localhost\\n{}\\n' > /etc/hosts
             modprobe 9p && modprobe 9pnet_virtio || exit
             mkdir -p {folder} && mount -t 9p -o {options} {FOLDER_TAG} {folder}",
            network_script("vmxnet3", &[address.into()], MTU),
            hosts.join("\\n"),
        )
    }

    /// Iterates over the names of the guests with their addresses.
    fn names(&self) -> impl Iterator<Item = (&str, Ipv4Addr)> {
        self.vms.iter().map(Vm::name).zip(self.addresses.iter().copied())
    }

    pub(super) fn vms(&self) -> &[Vm] {
        &self.vms
    }

    /// Returns the path of the folder.
    pub(super) fn folder(&self) -> &Path {
        &self.folder.path
    }

    /// Returns the information for a command in a guest.
    pub(super) fn surroundings(&self, number: usize) -> Surroundings<'_> {
        let gid_index = self.gid_indices.get(number).copied().unwrap_or_default();
        Surroundings { number, addresses: &self.addresses, device: PVRDMA_DEVICE, gid_index }
    }

    /// Describes the guests for the caller.
    pub(super) fn describe(&self) -> String {
        let count = self.vms.len();
        let processor = if has_kvm() { "KVM" } else { "emulated processors" };
        format!("{count} {} ({}, {processor})", if count == 1 { "guest" } else { "guests" }, self.qemu)
    }

    /// Returns the output of `pvrdmad status`.
    pub(super) fn status(&self) -> Result<serde_json::Value> {
        self.daemon.status()
    }

    /// The daemon's log.
    pub(super) fn daemon_log(&self) -> &Path {
        self.daemon.log()
    }

    /// Stops the guests and the daemon.
    pub(super) fn stop(self) {
        drop(self.vms);
        drop(self.daemon);
        drop(self.directory);
    }
}
