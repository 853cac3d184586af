//! Two guests with RDMA devices that reach each other over any network.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use pvrdma_verbs_types::Gid;

use crate::vm::{Job, Vm};

/// Names of the devices in two guests, and the addresses by which programs reach each other.
#[derive(Clone, Debug)]
pub struct Endpoints<'a> {
    /// The guests.
    pub vms: [&'a Vm; 2],
    /// Names of the RDMA devices.
    pub device: [&'static str; 2],
    /// Index of the GID in use, for each guest.
    pub gid_index: [u32; 2],
    /// Addresses of these GIDs.
    pub ip: [IpAddr; 2],
    /// Network interfaces with these addresses.
    pub interface: [&'static str; 2],
    /// Addresses over which programs exchange their parameters.
    pub tcp: [Ipv4Addr; 2],
    /// Requested path MTU for programs with such an option; otherwise each uses its own default.
    pub path_mtu: Option<u32>,
    /// Maximum run time of a program.
    pub patience: Duration,
}

impl<'a> Endpoints<'a> {
    /// Creates endpoints with the default names of devices and interfaces, before the GIDs are known.
    pub fn new(vms: [&'a Vm; 2], device: &'static str, tcp: [Ipv4Addr; 2], patience: Duration) -> Self {
        Self {
            vms,
            device: [device; 2],
            gid_index: [0; 2],
            ip: tcp.map(IpAddr::V4),
            interface: ["eth0"; 2],
            tcp,
            path_mtu: None,
            patience,
        }
    }

    /// Returns the same guests with other GIDs, after a wait for them to appear.
    pub fn with_gids(mut self, ip: [IpAddr; 2]) -> Result<Self> {
        let search = |end: usize| GidSearch::start(self.vms[end], self.device[end], ip[end]);
        let searches = [search(0)?, search(1)?];
        self.gid_index = [searches[0].finish()?, searches[1].finish()?];
        self.ip = ip;
        Ok(self)
    }

    /// Returns the address of one end, as a program at the other end writes it for the connection manager.
    pub fn address_of(&self, end: usize, writer: usize) -> String {
        match self.ip[end] {
            // A link-local address is not unique without its interface.
            IpAddr::V6(ip) if ip.is_unicast_link_local() => format!("{ip}%{}", self.interface[writer]),
            ip => ip.to_string(),
        }
    }
}

/// Name that the driver gives to its first device.
pub const PVRDMA_DEVICE: &str = "vmw_pvrdma0";

/// Script that loads the RDMA driver and the modules for programs and the connection manager.
pub const LOAD_DRIVER: &str = "modprobe ib_uverbs && modprobe rdma_ucm && modprobe vmw_pvrdma";

/// Loads both drivers in a booted guest, and sets its addresses.
pub fn bring_up(vm: &Vm, addresses: &[IpAddr], mtu: u32) -> Result<()> {
    vm.run(&network_script("vmxnet3", addresses, mtu))?;
    vm.run(LOAD_DRIVER).map(drop)
}

/// Returns a script that loads a network driver, finds its interface (there is no udev, so names follow the order of
/// loading) and brings it up with these addresses.
pub fn network_script(driver: &str, addresses: &[IpAddr], mtu: u32) -> String {
    let mut script = format!(
        "modprobe {driver} || exit
         for path in /sys/class/net/*; do
             case $(readlink $path/device/driver) in
                 */{driver}) basename $path > /run/nic-{driver} ;;
             esac
         done
         nic=$(cat /run/nic-{driver}) || exit
         echo 0 > /proc/sys/net/ipv6/conf/$nic/accept_dad || exit
         ip link set $nic mtu {mtu} up"
    );
    // These networks have no other hosts, so duplicate address detection is switched off for IPv6. While it probes the
    // link-local address, the kernel sends no neighbour solicitation, and a program that connects meanwhile fails.
    for address in addresses {
        script.push_str(&match address {
            IpAddr::V4(address) => format!(" && ip addr replace {address}/24 dev $nic"),
            IpAddr::V6(address) => format!(" && ip addr replace {address}/64 dev $nic nodad"),
        });
    }
    script
}

/// A shell condition: a program listens on a TCP port.
pub fn listens(port: u16) -> String {
    // State 0A is LISTEN.
    format!("grep -qs ':{port:04X} [0-9A-F]*:0000 0A ' /proc/net/tcp /proc/net/tcp6")
}

/// A shell condition: a TCP port of this guest has an established connection.
pub fn is_connected(port: u16) -> String {
    format!("grep -qs ':{port:04X} [0-9A-F]*:[0-9A-F]* 01 ' /proc/net/tcp /proc/net/tcp6")
}

/// Formats the GID of an address as the kernel prints it.
fn gid_text(ip: IpAddr) -> String {
    Ipv6Addr::from(Gid::from(ip).0).segments().map(|segment| format!("{segment:04x}")).join(":")
}

/// Returns the index of an address's GID, once the device's port is active and has it.
pub fn gid_index(vm: &Vm, device: &str, ip: IpAddr) -> Result<u32> {
    GidSearch::start(vm, device, ip)?.finish()
}

/// Search for a GID in a guest.
struct GidSearch {
    job: Job,
    what: String,
}

impl GidSearch {
    fn start(vm: &Vm, device: &str, ip: IpAddr) -> Result<Self> {
        let gid = gid_text(ip);
        let job = vm.spawn(&format!(
            "port=/sys/class/infiniband/{device}/ports/1
             until grep -qs ACTIVE $port/state && grep -qs {gid} $port/gids/*; do sleep 0.05; done
             for path in $(grep -ls {gid} $port/gids/*); do
                 index=${{path##*/}}
                 echo $index $(cat $port/gid_attrs/types/$index)
             done"
        ))?;
        Ok(Self { job, what: format!("the GID of {ip} on an active port of {device} in {}", vm.name()) })
    }

    fn finish(&self) -> Result<u32> {
        let output = self.job.wait_success(Duration::from_secs(30)).with_context(|| format!("no {}", self.what))?;
        // An address has two GIDs if both RoCE versions are enabled; all programs use version 2.
        let indices = |wanted: &str| {
            output.lines().find_map(|line| {
                let (index, kind) = line.split_once(' ')?;
                (kind == wanted).then(|| index.parse::<u32>().ok())?
            })
        };
        match indices("RoCE v2").or_else(|| indices("IB/RoCE v1")) {
            Some(index) => Ok(index),
            None => bail!("no {}:\n{output}", self.what),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_are_written_in_full() {
        assert_eq!(gid_text("192.168.77.1".parse().unwrap()), "0000:0000:0000:0000:0000:ffff:c0a8:4d01");
        assert_eq!(gid_text("fd00:79::1".parse().unwrap()), "fd00:0079:0000:0000:0000:0000:0000:0001");
    }
}
