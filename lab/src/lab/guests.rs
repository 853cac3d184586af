//! The guests of a run and the daemon between them.

use std::net::Ipv4Addr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::cli::RunArgs;
use super::enter::{self, enter};
use super::script::{Surroundings, quoted, script};
use super::system::System;
use crate::daemon::{Daemon, DaemonDevice};
use crate::endpoints::{LOAD_DRIVER, PVRDMA_DEVICE, gid_index, network_script};
use crate::rootfs::Rootfs;
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
    /// Variables of the caller's tree, if the guests have one.
    tree: Option<Vec<(String, String)>>,
}

impl Guests {
    /// Starts the daemon and the machines without waiting for the guests. Their files are in `directory`.
    pub(super) fn start(
        system: &System,
        tree: Option<Rootfs>,
        args: &RunArgs,
        folder: Folder,
        directory: &Path,
    ) -> Result<Self> {
        let path = |number: u8, kind: &str| directory.join(format!("vm{number}.{kind}"));
        let devices: Vec<_> = (0..args.vms)
            .map(|number| DaemonDevice {
                name: format!("vm{number}"),
                socket: path(number, "pvrdma"),
                mac: format!("52:54:00:00:00:{:02x}", number + 1),
                // No real hardware accesses the memory, and the usual limit of locked memory is small.
                options: format!(",nic-socket={},pin=off", path(number, "nic").display()),
            })
            .collect();
        let daemon = Daemon::start(directory, &devices)?;
        if let Some(file) = &args.faults {
            // Counts begin with the connections of the command: nothing in a guest has connected a queue pair before.
            daemon.set_faults(file).with_context(|| format!("--faults {}", file.display()))?;
        }
        let machine = |number| {
            let mut machine = VmBuilder::new(&system.image, directory)
                .name(&format!("vm{number}"))
                .memory_mib(args.memory)
                .cpus(args.cpus)
                .nic_socket(&path(number, "nic"))
                .pvrdma_socket(&path(number, "pvrdma"))
                .folder(folder.clone());
            if let Some(disk) = &system.root_disk {
                machine = machine.root_disk(disk);
            }
            if let Some(tree) = &tree {
                machine = machine.disk(&tree.disk);
            }
            machine.start()
        };
        let vms = (0..args.vms).map(machine).collect::<Result<Vec<_>>>()?;
        let addresses = (1..=args.vms).map(|last| Ipv4Addr::new(192, 168, 77, last)).collect();
        let qemu = system.image.qemu_version()?;
        let tree = tree.map(|tree| tree.environment);
        Ok(Self { vms, daemon, folder, addresses, gid_indices: Vec::new(), qemu, tree })
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
        let (mount, folder) = match self.tree {
            Some(_) => (enter::MOUNT, enter::FOLDER.to_owned()),
            None => ("", quoted(&self.folder.path.to_string_lossy())),
        };
        let option = if self.folder.read_only { "ro" } else { "rw" };
        // Without a cache, each guest immediately sees the writes of the others. `mmap` is the weakest mode that allows
        // mappings.
        let options = format!("trans=virtio,version=9p2000.L,msize=512000,cache=mmap,{option}");
        format!(
            "{}
             {LOAD_DRIVER} || exit
             printf '127.0.0.1 localhost\\n{}\\n' > /etc/hosts
             modprobe 9p && modprobe 9pnet_virtio || exit
             {mount}
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

    /// Returns the information for a command in a guest.
    fn surroundings(&self, number: usize) -> Surroundings<'_> {
        let gid_index = self.gid_indices.get(number).copied().unwrap_or_default();
        Surroundings { number, addresses: &self.addresses, device: PVRDMA_DEVICE, gid_index }
    }

    /// Returns a script for a guest that executes a command.
    pub(super) fn script(&self, number: usize, variables: &[(String, String)], command: &[String]) -> String {
        let of_tree = self.tree.as_deref().unwrap_or_default();
        let all: Vec<_> = of_tree.iter().chain(variables).cloned().collect();
        let script = script(&self.surroundings(number), &all, &self.folder.path, command);
        if self.tree.is_some() { enter(&script, &self.folder.path) } else { script }
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
}
