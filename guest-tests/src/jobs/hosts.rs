//! Two guests with our device on hosts of their own: two daemons that reach each other over a wire.

use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::case::Case;
use super::programs::{self, CONNECTED, DATAGRAMS, Program};
use super::shared::{Machines, Shared};
use crate::bed::Bed;
use crate::ends::Ends;
use crate::host::{Host, IPV4, MAC, addresses, cable, datagrams};
use crate::pair::PVRDMA_DEVICE;
use crate::vm::Vm;

/// The encapsulation that the kernel's implementation does not have. Both ends are the same, so one way is enough.
pub(crate) fn cases() -> Vec<Case> {
    let hosts = Shared::new(|bed| Hosts::boot(bed, 1500, |directory, end| cabled(directory, end, "roce=v1")));
    let programs: Vec<Program> = CONNECTED.into_iter().chain(DATAGRAMS).map(Program::one_way).collect();
    programs::cases("roce-v1/untagged", &programs, &hosts, |hosts: &Hosts| hosts.ends(IPV4.map(Into::into), None))
}

/// Two hosts.
#[derive(Debug)]
pub(crate) struct Hosts {
    // Declared in the order in which they must be dropped.
    hosts: [Host; 2],
    _directory: TempDir,
}

impl Hosts {
    /// Boots both, on a network with this MTU. `options` are those of each end's device, its uplink among them; files go
    /// into the directory that it is given, which is the same for both.
    pub(crate) fn boot(bed: &Bed, mtu: u32, options: impl Fn(&Path, usize) -> String) -> Result<Self> {
        let directory =
            tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
        let host = |end: usize| {
            let name = NAMES[end];
            Host::start(bed, &directory.path().join(name), name, MAC[end], &options(directory.path(), end))
        };
        let hosts = [host(0)?, host(1)?];
        for (end, host) in hosts.iter().enumerate() {
            host.bring_up(&addresses(end), mtu)?;
        }
        Ok(Self { hosts, _directory: directory })
    }

    /// How programs reach each other between GIDs with these addresses.
    pub(crate) fn ends(&self, ip: [IpAddr; 2], path_mtu: Option<u32>) -> Result<Ends<'_>> {
        let ends = Ends {
            vms: self.vms(),
            device: [PVRDMA_DEVICE; 2],
            gid_index: [0; 2],
            ip,
            interface: ["eth0"; 2],
            tcp: IPV4,
            path_mtu,
            patience: Duration::from_secs(60),
        };
        ends.with_gids(ip)
    }
}

impl Machines for Hosts {
    fn vms(&self) -> [&Vm; 2] {
        [self.hosts[0].vm(), self.hosts[1].vm()]
    }

    fn diagnosis(&self) -> String {
        self.hosts.iter().map(Host::diagnosis).collect::<Vec<_>>().join("\n")
    }
}

const NAMES: [&str; 2] = ["a", "b"];

/// Options of a device whose uplink is one end of a cable.
fn cabled(directory: &Path, end: usize, more: &str) -> String {
    let ends = cable(directory);
    format!("uplink={},{more}", datagrams(&ends[end], &ends[1 - end]))
}
