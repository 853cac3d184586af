//! Two guests whose only network interfaces are vmxnet3 devices of the daemon, shared by all cases of the group.

use std::net::Ipv4Addr;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::super::exchange::{Programs, Ready};
use super::super::shared::{Machines, Shared};
use crate::image::GuestImage;
use crate::pair::{LinkKind, PVRDMA_DEVICE, Pair, PairOptions};
use crate::vm::{Job, Vm};

/// Number of processors of each guest, which is also the number of queues of its vNIC.
pub(super) const QUEUES: [u32; 2] = [4, 2];
/// The guests' only network interface.
pub(super) const CARD: &str = "eth0";
/// Default MTU of Ethernet.
pub(super) const MTU: u32 = 1500;
/// Port of [`crate::net_peer`].
pub(super) const PORT: u16 = 7000;
/// Command of the traffic program in a guest.
pub(super) const PEER: &str = "/run/guest-tests net-peer";
/// Time limit of a program.
pub(super) const PATIENCE: Duration = Duration::from_secs(180);

/// Machines that all cases of the group share.
pub(super) type Both = Rc<Shared<Cards>>;

/// Two guests with vNICs of the daemon.
pub(super) struct Cards(pub(super) Pair);

impl Machines for Cards {
    fn vms(&self) -> [&Vm; 2] {
        [self.0.a(), self.0.b()]
    }

    fn diagnosis(&self) -> String {
        let counters: Vec<_> = [0, 1].map(|end| self.counters(end).unwrap_or_default().to_string()).into();
        format!("{}\n{}", counters.join("\n"), self.0.diagnosis())
    }
}

impl Cards {
    pub(super) fn boot(image: &GuestImage) -> Result<Self> {
        let options = PairOptions {
            rxe: false,
            cpus: QUEUES,
            networks: vec!["name=lan,vlan=trunk".to_owned()],
            // Permits other source addresses behind the guests; frames to such addresses are flooded.
            device_options: ",network=lan,forged-transmits=mac".to_owned(),
            ..PairOptions::default()
        };
        let cards = Self(Pair::boot(image, &options)?);
        for vm in cards.vms() {
            // Without this the guests do not answer multicast pings.
            vm.run("echo 0 > /proc/sys/net/ipv4/icmp_echo_ignore_broadcasts && ip link show eth0")?;
        }
        Ok(cards)
    }

    pub(super) fn vm(&self, end: usize) -> &Vm {
        self.vms()[end]
    }

    /// Returns the addresses of the guests.
    pub(super) fn addresses(&self) -> Result<[Ipv4Addr; 2]> {
        Ok(self.0.link(LinkKind::Pvrdma)?.ip)
    }

    /// Returns the daemon's status of a guest's device.
    pub(super) fn device(&self, end: usize) -> Result<serde_json::Value> {
        Ok(self.0.daemon().context("there is no daemon")?.status()?["devices"][end].take())
    }

    /// Returns the counters of a vNIC.
    pub(super) fn counters(&self, end: usize) -> Result<serde_json::Value> {
        Ok(self.device(end)?["nic"]["counters"].take())
    }

    /// Returns one counter.
    pub(super) fn counter(&self, end: usize, name: &str) -> Result<u64> {
        self.counters(end)?[name].as_u64().with_context(|| format!("the vNIC does not count {name}"))
    }

    /// Starts the other side of checked traffic in a guest.
    pub(super) fn serve(&self, end: usize) -> Result<Job> {
        let programs = Programs {
            server_vm: self.vm(end),
            server: format!("{PEER} serve --port {PORT}"),
            ready: Ready::Tcp(PORT),
            client_vm: self.vm(1 - end),
            client: String::new(),
            timeout: PATIENCE,
        };
        programs.start_server()
    }

    /// Sends streams to an address of a guest, which compares each byte.
    pub(super) fn stream(&self, to: usize, address: &str, bytes: u64, connections: usize) -> Result<()> {
        let _server = self.serve(to)?;
        let command = format!("{PEER} stream {address}:{PORT} --bytes {bytes} --connections {connections}");
        self.vm(1 - to).spawn(&command)?.wait_success(PATIENCE).map(drop)
    }

    /// Sends streams in both directions.
    pub(super) fn both_ways(&self, bytes: u64, connections: usize) -> Result<()> {
        for (end, address) in self.addresses()?.into_iter().enumerate() {
            self.stream(end, &address.to_string(), bytes, connections)
                .with_context(|| format!("to guest {}", self.vm(end).name()))?;
        }
        Ok(())
    }

    /// Returns a statistic that the driver reads from the vNIC (`ethtool -S`), summed over all queues.
    pub(super) fn statistic(&self, end: usize, name: &str) -> Result<u64> {
        let text = self.vm(end).run(&format!("ethtool -S {CARD}"))?;
        let values = text.lines().filter_map(|line| line.trim().split_once(':')).filter(|(key, _)| *key == name);
        let values: Vec<u64> = values.filter_map(|(_, value)| value.trim().parse().ok()).collect();
        ensure!(!values.is_empty(), "the driver has no '{name}':\n{text}");
        Ok(values.iter().sum())
    }

    /// Sets the MTU of both interfaces.
    pub(super) fn set_mtu(&self, mtu: u32) -> Result<()> {
        self.vms().into_iter().try_for_each(|vm| vm.run(&format!("ip link set {CARD} mtu {mtu}")).map(drop))
    }

    /// Waits for the RDMA port of a guest.
    pub(super) fn wait_port(&self, end: usize, state: &str) -> Result<()> {
        let port = format!("/sys/class/infiniband/{PVRDMA_DEVICE}/ports/1/state");
        self.vm(end).wait_until(&format!("grep -qs {state} {port}"), PATIENCE)
    }
}
