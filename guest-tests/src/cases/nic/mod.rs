//! The network function that the daemon serves, with the kernel's own driver: two guests whose only network cards are
//! ours. All cases share the two.

mod life;
mod settings;
mod stations;
mod traffic;

use std::net::Ipv4Addr;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::case::Case;
use super::exchange::{Programs, Ready};
use super::shared::{Machines, Shared};
use crate::image::GuestImage;
use crate::pair::{LinkKind, PVRDMA_DEVICE, Pair, PairOptions};
use crate::vm::{Job, Vm};

/// Processors of the guests, and so the number of queues of their cards.
const QUEUES: [u32; 2] = [4, 2];
/// The guests' only network interface.
const CARD: &str = "eth0";
/// What Ethernet carries without being told.
const MTU: u32 = 1500;
/// Where [`crate::net_peer`] listens.
const PORT: u16 = 7000;
/// Our program in a guest.
const PEER: &str = "/run/guest-tests net-peer";
/// How long a program may take.
const PATIENCE: Duration = Duration::from_secs(180);

/// Everything that is done with the cards.
pub(crate) fn cases() -> Vec<Case> {
    let cards = Shared::new(Cards::boot);
    let mut cases = traffic::cases(&cards);
    cases.extend(settings::cases(&cards));
    cases.extend(stations::cases(&cards));
    cases.extend(life::cases(&cards));
    cases.push(cards.case("nic/nothing-refused", nothing_refused));
    cases
}

/// Machines that all cases of the group share.
type Both = Rc<Shared<Cards>>;

/// Two guests with cards of ours.
struct Cards(Pair);

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
    fn boot(image: &GuestImage) -> Result<Self> {
        let options = PairOptions {
            rxe: false,
            nic_sockets: true,
            cpus: QUEUES,
            networks: vec!["name=lan,vlan=trunk".to_owned()],
            // Stations behind the guests, whose frames are flooded to them.
            device_options: ",network=lan,forged-transmits=mac".to_owned(),
            ..PairOptions::default()
        };
        let cards = Self(Pair::boot(image, &options)?);
        for vm in cards.vms() {
            // Without these multicast questions are not answered.
            vm.run("echo 0 > /proc/sys/net/ipv4/icmp_echo_ignore_broadcasts && ip link show eth0")?;
        }
        Ok(cards)
    }

    fn vm(&self, end: usize) -> &Vm {
        self.vms()[end]
    }

    /// The guests' addresses.
    fn addresses(&self) -> Result<[Ipv4Addr; 2]> {
        Ok(self.0.link(LinkKind::Pvrdma)?.ip)
    }

    /// What the daemon says of a guest's device.
    fn device(&self, end: usize) -> Result<serde_json::Value> {
        Ok(self.0.daemon().context("there is no daemon")?.status()?["devices"][end].take())
    }

    /// What a card counts.
    fn counters(&self, end: usize) -> Result<serde_json::Value> {
        Ok(self.device(end)?["nic"]["counters"].take())
    }

    /// One of them.
    fn counter(&self, end: usize, name: &str) -> Result<u64> {
        self.counters(end)?[name].as_u64().with_context(|| format!("the card does not count {name}"))
    }

    /// Starts the other side of checked traffic in a guest.
    fn serve(&self, end: usize) -> Result<Job> {
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

    /// Sends streams to a guest, which looks at each byte, over this address of it.
    fn stream(&self, to: usize, address: &str, bytes: u64, connections: usize) -> Result<()> {
        let _server = self.serve(to)?;
        let command = format!("{PEER} stream {address}:{PORT} --bytes {bytes} --connections {connections}");
        self.vm(1 - to).spawn(&command)?.wait_success(PATIENCE).map(drop)
    }

    /// Sends streams both ways.
    fn both_ways(&self, bytes: u64, connections: usize) -> Result<()> {
        for (end, address) in self.addresses()?.into_iter().enumerate() {
            self.stream(end, &address.to_string(), bytes, connections)
                .with_context(|| format!("to guest {}", self.vm(end).name()))?;
        }
        Ok(())
    }

    /// What the driver reads of the card (`ethtool -S`), added up over all queues.
    fn statistic(&self, end: usize, name: &str) -> Result<u64> {
        let text = self.vm(end).run(&format!("ethtool -S {CARD}"))?;
        let values = text.lines().filter_map(|line| line.trim().split_once(':')).filter(|(key, _)| *key == name);
        let values: Vec<u64> = values.filter_map(|(_, value)| value.trim().parse().ok()).collect();
        ensure!(!values.is_empty(), "the driver has no '{name}':\n{text}");
        Ok(values.iter().sum())
    }

    /// Sets the MTU of both interfaces.
    fn set_mtu(&self, mtu: u32) -> Result<()> {
        self.vms().into_iter().try_for_each(|vm| vm.run(&format!("ip link set {CARD} mtu {mtu}")).map(drop))
    }

    /// Waits for the RDMA port of a guest.
    fn wait_port(&self, end: usize, state: &str) -> Result<()> {
        let port = format!("/sys/class/infiniband/{PVRDMA_DEVICE}/ports/1/state");
        self.vm(end).wait_until(&format!("grep -qs {state} {port}"), PATIENCE)
    }
}

/// What a card counts of frames that make no sense, and of rings and commands that do not.
const REFUSED: [&str; 3] = ["vmxnet3_send_errors", "vmxnet3_queue_errors", "vmxnet3_command_errors"];
/// What the network counts of frames that it does not let through. Many streams may well fill a queue.
const REFUSED_BY_NETWORK: [&str; 4] =
    ["passed_dropped_roce", "passed_dropped_address", "passed_dropped_vlan", "switch_dropped_too_long"];

/// What all of the above left in the counters of what was wrong.
fn nothing_refused(cards: &Cards) -> Result<String> {
    let mut frames = 0;
    for end in [0, 1] {
        let device = cards.device(end)?;
        let (card, network) = (&device["nic"]["counters"], &device["network"]["counters"]);
        for (names, counters) in [(&REFUSED[..], card), (&REFUSED_BY_NETWORK, network)] {
            for name in names {
                match counters[name].as_u64() {
                    Some(0) => {}
                    other => bail!("{}: {name} is {other:?}: {counters}", cards.vm(end).name()),
                }
            }
        }
        frames += card["vmxnet3_received_frames"].as_u64().unwrap_or(0);
    }
    ensure!(frames > 100_000, "only {frames} frames were received");
    Ok(format!("{frames} frames received"))
}
