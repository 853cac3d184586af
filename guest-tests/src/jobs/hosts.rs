//! Two guests with our device on hosts of their own: two daemons that reach each other over a wire.

use std::net::IpAddr;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use super::case::Case;
use super::programs::{self, CONNECTED, DATAGRAMS, MANAGED, Program};
use super::shared::{Machines, Shared};
use crate::bed::Bed;
use crate::ends::Ends;
use crate::host::{Host, IPV4, MAC, addresses, cable, datagrams};
use crate::namespaces::Namespaces;
use crate::pair::PVRDMA_DEVICE;
use crate::vm::Vm;

/// The encapsulation that the kernel's implementation does not have, without and with a tag. Both ends are the same, so one way
/// is enough.
pub(crate) fn cases() -> Vec<Case> {
    let programs: Vec<Program> = CONNECTED.into_iter().chain(DATAGRAMS).map(Program::one_way).collect();
    let few: Vec<Program> = MANAGED.into_iter().chain(DATAGRAMS).map(Program::one_way).collect();
    let untagged = Shared::new(|bed| Hosts::boot(bed, 1500, |directory, end| cabled(directory, end, "roce=v1")));
    let tagged = Shared::new(|bed| Hosts::boot(bed, 1500, |directory, end| cabled(directory, end, "roce=v1,vlan=42")));
    let group = |name: &str, programs: &[Program], hosts: &Rc<Shared<Hosts>>| {
        let mut cases = vec![hosts.case(format!("{name}/gids"), all_gids_are_v1)];
        cases.extend(programs::cases(name, programs, hosts, |hosts: &Hosts, program, server| {
            program.run(&hosts.ends(IPV4.map(Into::into), None)?, server)
        }));
        cases
    };
    let mut cases = group("roce-v1/untagged", &programs, &untagged);
    cases.extend(group("roce-v1/tagged", &few, &tagged));
    cases.push(tagged.case("roce-v1/tagged/nothing-without-a-tag", nothing_without_a_tag));
    cases
}

/// Neither end takes frames without a tag. So what they take from each other has one.
fn nothing_without_a_tag(hosts: &Hosts) -> Result<String> {
    let cable = cable(hosts.directory.path());
    for (host, uplink) in hosts.hosts.iter().zip(cable) {
        let dropped = || host.counter("passed_dropped_vlan");
        let before = dropped()?;
        // To everybody, of a protocol that nobody knows.
        let mut frame = [0_u8; 60];
        frame[..6].fill(0xff);
        frame[6..14].copy_from_slice(&[0x52, 0x54, 0, 0, 2, 9, 0x88, 0xb5]);
        let socket = UnixDatagram::unbound().context("cannot make a socket")?;
        socket.send_to(&frame, &uplink).with_context(|| format!("cannot send to {}", uplink.display()))?;
        let deadline = Instant::now() + Duration::from_secs(10);
        while dropped()? == before {
            if Instant::now() > deadline {
                bail!("{}: a frame without a tag is not dropped", host.vm().name());
            }
        }
    }
    Ok(String::new())
}

/// Otherwise the cases after it would say nothing.
fn all_gids_are_v1(hosts: &Hosts) -> Result<String> {
    // Waits for them.
    hosts.ends(IPV4.map(Into::into), None)?;
    for vm in hosts.vms() {
        // What is not in use cannot be read.
        let types =
            vm.run(&format!("cat /sys/class/infiniband/{PVRDMA_DEVICE}/ports/1/gid_attrs/types/* 2>&-; true"))?;
        if types.is_empty() || types.lines().any(|line| line != "IB/RoCE v1") {
            bail!("{}: {types}", vm.name());
        }
    }
    Ok(String::new())
}

/// Two hosts.
#[derive(Debug)]
pub(crate) struct Hosts {
    // Declared in the order in which they must be dropped.
    hosts: [Host; 2],
    _network: Option<Namespaces>,
    directory: TempDir,
}

impl Hosts {
    /// Boots both, on a network with this MTU. `options` are those of each end's device, its uplink among them; files go
    /// into the directory that it is given, which is the same for both.
    pub(crate) fn boot(bed: &Bed, mtu: u32, options: impl Fn(&Path, usize) -> String) -> Result<Self> {
        Self::boot_in(None, bed, mtu, options)
    }

    /// The same with the daemons in these network namespaces, if there are any.
    pub(crate) fn boot_in(
        network: Option<Namespaces>,
        bed: &Bed,
        mtu: u32,
        options: impl Fn(&Path, usize) -> String,
    ) -> Result<Self> {
        let directory =
            tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
        let host = |end: usize| {
            let name = NAMES[end];
            let namespace = network.as_ref().map(|network| network.name(end));
            let own = directory.path().join(name);
            Host::start_in(namespace, bed, &own, name, MAC[end], &options(directory.path(), end))
        };
        let hosts = [host(0)?, host(1)?];
        for (end, host) in hosts.iter().enumerate() {
            host.bring_up(&addresses(end), mtu)?;
        }
        Ok(Self { hosts, _network: network, directory })
    }

    /// A figure of both ends together.
    pub(crate) fn counter(&self, name: &str) -> Result<u64> {
        self.hosts.iter().map(|host| host.counter(name)).sum()
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
