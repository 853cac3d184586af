//! A guest with a PVRDMA device and its own daemon, as on a separate host.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::daemon::{Daemon, DaemonDevice, Setup};
use crate::endpoints::bring_up;
use crate::image::GuestImage;
use crate::vm::{Nic, NicModel, Vm, VmBuilder};

/// The guest and its daemon, which serves both functions of the guest's slot, on an uplink.
#[derive(Debug)]
pub(crate) struct GuestWithDaemon {
    // Declared in the order in which they must be dropped.
    vm: Vm,
    daemon: Daemon,
}

/// Properties of a host and its guest, apart from names and addresses.
#[derive(Debug)]
pub(crate) struct HostOptions {
    /// Keys of the network, separated by commas.
    pub(crate) network: String,
    /// Keys of the device, each with its comma: `,pin=off`.
    pub(crate) device: String,
    /// Network namespace of the daemon.
    pub(crate) namespace: Option<String>,
    /// Memory of the guest.
    pub(crate) memory_mib: u32,
    /// The vNIC is QEMU's, connected with the daemon (`nic=`).
    pub(crate) qemu_nic: bool,
    /// The guest comes by a migration through this socket.
    pub(crate) incoming: Option<PathBuf>,
}

impl HostOptions {
    /// Returns the options of a host whose network has these keys.
    pub(crate) const fn new(network: String) -> Self {
        Self {
            network,
            device: String::new(),
            namespace: None,
            memory_mib: MEMORY_MIB,
            qemu_nic: false,
            incoming: None,
        }
    }
}

impl GuestWithDaemon {
    /// Starts both without waiting for the guest. `directory` holds all their files and must not be shared.
    pub(crate) fn start(
        image: &GuestImage,
        directory: &Path,
        name: &str,
        mac: &str,
        options: &HostOptions,
    ) -> Result<Self> {
        std::fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
        let path = |name: &str| directory.join(name);
        let (socket, ours, guests) = (path("pvrdma"), path("nic"), path("nic-of-guest"));
        let device = DaemonDevice {
            name: name.to_owned(),
            socket: socket.clone(),
            mac: mac.to_owned(),
            options: match options.qemu_nic {
                true => format!(",nic={}{}", datagrams(&ours, &guests), options.device),
                false => format!(",nic-socket={}{}", ours.display(), options.device),
            },
        };
        let networks = [format!("name=default,{}", options.network)];
        let setup = Setup { namespace: options.namespace.as_deref(), networks: &networks, ..Setup::default() };
        let daemon = Daemon::launch(&setup, directory, &[device])?;
        let builder = VmBuilder::new(image, directory).name(name).memory_mib(options.memory_mib).pvrdma_socket(&socket);
        let builder = match options.qemu_nic {
            true => builder.nic(Nic { model: NicModel::Vmxnet3, mac: mac.to_owned(), local: guests, remote: ours }),
            false => builder.nic_socket(&ours),
        };
        let builder = match &options.incoming {
            Some(socket) => builder.incoming(socket),
            None => builder,
        };
        let vm = builder.start()?;
        Ok(Self { vm, daemon })
    }

    /// Waits for the guest, sets its addresses and loads the driver.
    pub(crate) fn bring_up(&self, addresses: &[IpAddr], mtu: u32) -> Result<()> {
        self.vm.wait_boot()?;
        self.bring_up_again(addresses, mtu)
    }

    /// Sets the addresses and loads the driver of a guest that has booted here or elsewhere.
    pub(crate) fn bring_up_again(&self, addresses: &[IpAddr], mtu: u32) -> Result<()> {
        bring_up(&self.vm, addresses, mtu)
    }

    /// The guest.
    pub(crate) fn vm(&self) -> &Vm {
        &self.vm
    }

    /// Returns the counters of the device's adapter.
    pub(crate) fn counters(&self) -> Result<serde_json::Value> {
        Ok(self.device()?["adapter"].take())
    }

    /// Returns the status of the device.
    pub(crate) fn device(&self) -> Result<serde_json::Value> {
        Ok(self.daemon.status()?["devices"][0].take())
    }

    /// Returns one counter of the adapter.
    pub(crate) fn counter(&self, name: &str) -> Result<u64> {
        self.counters()?[name].as_u64().with_context(|| format!("the daemon does not count {name}"))
    }

    /// Returns the daemon's side of a failure: its log, and all non-zero counters.
    pub(crate) fn diagnosis(&self) -> String {
        let counters = match self.counters() {
            Ok(counters) => {
                let counters = counters.as_object().cloned().unwrap_or_default();
                let counters = counters.iter().filter(|(_, value)| value.as_u64() != Some(0));
                counters.map(|(name, value)| format!("{name} {value}")).collect::<Vec<_>>().join(", ")
            }
            Err(error) => error.to_string(),
        };
        format!("--- pvrdmad of {}\n{}\n{counters}", self.vm.name(), self.daemon.log_tail())
    }
}

/// Memory in MiB: enough for the programs, and small for a fast boot.
pub(crate) const MEMORY_MIB: u32 = 768;

/// Ethernet addresses of the two ends of a wire. Wires are not connected with each other, so all use the same
/// addresses.
pub(crate) const MAC: [&str; 2] = ["52:54:00:00:02:01", "52:54:00:00:02:02"];
/// IPv4 addresses of the two ends.
pub(crate) const IPV4: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 168, 79, 1), Ipv4Addr::new(192, 168, 79, 2)];
/// IPv6 addresses of the two ends.
pub(crate) const IPV6: [Ipv6Addr; 2] =
    [Ipv6Addr::new(0xfd00, 0x79, 0, 0, 0, 0, 0, 1), Ipv6Addr::new(0xfd00, 0x79, 0, 0, 0, 0, 0, 2)];
/// Link-local addresses that the guests derive from their Ethernet addresses.
pub(crate) const LINK_LOCAL: [Ipv6Addr; 2] = [
    Ipv6Addr::new(0xfe80, 0, 0, 0, 0x5054, 0xff, 0xfe00, 0x201),
    Ipv6Addr::new(0xfe80, 0, 0, 0, 0x5054, 0xff, 0xfe00, 0x202),
];

/// Returns the addresses of a guest.
pub(crate) fn addresses(end: usize) -> [IpAddr; 2] {
    [IPV4[end].into(), IPV6[end].into()]
}

/// Returns a link of datagrams from one socket to another.
pub(crate) fn datagrams(local: &Path, remote: &Path) -> String {
    format!("unix-dgram:{}:{}", local.display(), remote.display())
}

/// Returns the sockets of the two ends of a cable: each end sends to the socket of the other.
pub(crate) fn cable(directory: &Path) -> [PathBuf; 2] {
    ["cable-a", "cable-b"].map(|name| directory.join(name))
}
