//! Three hosts with FRR as the control plane of their tunnels: network namespaces that run the commands of the
//! document. The guests are clients of the daemons that drive their devices themselves.

pub(super) mod host;

use std::path::Path;

use anyhow::{Context, Result, ensure};
use pvrdma_dev::testing::{SendWr, status};

use super::case::{Case, skip};
use super::open_vswitch::transfer;
use crate::device_pair::{Side, connect_across};
use crate::fabric::Fabric;
use crate::image::{GuestImage, HostRoot};
use crate::namespaces::Namespaces;
use host::Host;

/// Bytes that are written and read back.
const BYTES: usize = 1 << 20;
/// ACK timeout of connections that shall continue: two seconds, seven times.
const PATIENT: u8 = 19;
/// ACK timeout of connections whose peer is lost or moves: 0.27 s, seven times.
const BRIEF: u8 = 16;
/// Number of the guest that moves, which is the second one at first, and its Ethernet address.
const MOVING: (u8, &str) = (2, "52:54:00:00:00:02");

/// The only test.
pub(crate) fn cases() -> Vec<Case> {
    let why = "three hosts with FRR; takes a minute, and builds their root file system the first time";
    vec![Case::alone("slow/evpn", three_hosts).slow(why)]
}

fn three_hosts(image: &GuestImage) -> Result<String> {
    if let Some(obstacle) = Namespaces::obstacle() {
        return Err(skip(obstacle));
    }
    if !Path::new("/dev/net/tun").exists() {
        return Err(skip("the bridges need taps, /dev/net/tun"));
    }
    let root = HostRoot::build(image, "frr", &["frr", "iproute2"])
        .map_err(|error| skip(format!("there is no FRR: {error:#}")))?;
    let fabric = Fabric::new("evpn", 3)?;
    let boot = |number| Host::boot(&root, &fabric, number);
    let mut site = Site { hosts: [boot(0)?, boot(1)?, boot(2)?], root: &root, fabric: &fabric };
    let moved = site.check();
    moved.with_context(|| site.hosts.iter().map(Host::diagnosis).collect::<String>())
}

/// The hosts and all that they need to boot again.
struct Site<'a> {
    hosts: [Host; 3],
    root: &'a HostRoot,
    fabric: &'a Fabric,
}

impl Site<'_> {
    fn check(&mut self) -> Result<String> {
        self.start().context("start")?;
        let mut red = [self.guest("red", 0, 1)?, self.guest("red", 1, 2)?];
        self.tenants(&mut red).context("two tenants")?;
        let [local, remote] = &mut red;
        self.lose_host(local, remote).context("a lost host")?;
        self.stop_frr(local, remote).context("FRR stops")?;
        let [mut local, remote] = red;
        self.move_address(&mut local, remote).context("a moving address")?;
        self.tear_down().context("teardown")?;
        Ok(format!("{} KiB of each tenant; a host, FRR and an address lost and back", BYTES >> 10))
    }

    /// Runs the commands on all hosts. On the last one, the configuration of FRR has an error at first.
    fn start(&mut self) -> Result<()> {
        let [a, b, c] = &mut self.hosts;
        a.run_recipe("")?;
        b.run_recipe("")?;
        c.start_frr_with_an_error()?;
        a.wait_for_peers(&[1])?;
        ensure!(!c.run("vtysh -c 'show running-config'")?.contains("router bgp"), "FRR has read a wrong line");
        self.start_last()?;
        // The daemon's own check accepts the settings.
        let checked = self.hosts[0]
            .run("pvrdmad check --network name=default,uplink=tap:vm7,mtu=1450 --device name=red,socket=/run/x.sock,mac=52:54:00:00:00:01");
        let checked = checked?;
        ensure!(checked.contains("bridge br7; its VXLAN tunnels: vx7"), "check does not know the bridge: {checked}");
        Ok(())
    }

    /// Runs the commands on the last host, whose daemon also has the device of the guest that will move there.
    fn start_last(&mut self) -> Result<()> {
        let (_, mac) = MOVING;
        let last = &mut self.hosts[2];
        last.run_recipe(&format!(" --device name=moved,network=red,socket=/run/pvrdmad/moved.sock,mac={mac}"))?;
        self.wait_for_all()
    }

    fn wait_for_all(&mut self) -> Result<()> {
        let [a, b, c] = &mut self.hosts;
        a.wait_for_peers(&[1, 2])?;
        b.wait_for_peers(&[0, 2])?;
        c.wait_for_peers(&[0, 1])
    }

    /// Connects to a device as the guest with this number.
    fn guest(&self, device: &str, host: usize, number: u8) -> Result<Side> {
        let side = Side::in_network(&self.hosts[host].socket(device), number, BYTES);
        side.with_context(|| format!("guest {number} of {device} on host {host}"))
    }

    /// Guests of two tenants with the same addresses exchange data at the same time.
    fn tenants(&self, red: &mut [Side; 2]) -> Result<()> {
        let mut blue = [self.guest("blue", 0, 1)?, self.guest("blue", 1, 2)?];
        blue[0].buffer.fill_pattern(3);
        for [a, b] in [&mut *red, &mut blue] {
            connect_across(a, b, PATIENT)?;
        }
        transfer(&mut blue).context("blue")?;
        transfer(red).context("red")?;
        let arrived = |sides: &[Side; 2]| sides[1].buffer.read(0, BYTES);
        ensure!(arrived(&blue) != arrived(red), "both tenants have sent the same");
        ensure!(arrived(&blue) == blue[0].buffer.read(0, BYTES), "red has written into the memory of blue");
        Ok(())
    }

    /// A host loses power. Connections to it end, others continue; it is reached again once it is back.
    fn lose_host(&mut self, local: &mut Side, remote: &mut Side) -> Result<()> {
        let mut lost = self.guest("red", 2, 3)?;
        local.qp.to_reset()?;
        connect_across(local, &mut lost, BRIEF)?;
        write(local, &lost, status::SUCCESS)?;
        self.fabric.cut(2)?;
        write(local, &lost, status::RETRY_EXC)?;
        connect_again(local, remote, PATIENT)?;
        drop(lost);
        for host in [0, 1] {
            self.hosts[host].wait_for_peers(&[1 - host])?;
        }
        write(local, remote, status::SUCCESS).context("hosts that are left")?;
        self.hosts[2].power_off();
        self.fabric.renew(2)?;
        self.hosts[2] = Host::boot(self.root, self.fabric, 2)?;
        self.start_last()?;
        let mut back = self.guest("red", 2, 3)?;
        local.qp.to_reset()?;
        connect_across(local, &mut back, PATIENT)?;
        write(local, &back, status::SUCCESS).context("the host that is back")
    }

    /// FRR stops on a host and starts again.
    fn stop_frr(&mut self, local: &mut Side, remote: &mut Side) -> Result<()> {
        connect_again(local, remote, BRIEF)?;
        write(local, remote, status::SUCCESS)?;
        self.hosts[1].run("systemctl stop frr")?;
        self.hosts[0].wait_for_peers(&[2])?;
        write(local, remote, status::RETRY_EXC)?;
        self.hosts[1].run("systemctl start frr")?;
        self.wait_for_all()?;
        connect_again(local, remote, PATIENT)?;
        write(local, remote, status::SUCCESS).context("after the restart of FRR")
    }

    /// A guest continues on another host with its addresses. A request to it is transmitted eight times at most, so its
    /// success shows that one of eight packets has followed.
    fn move_address(&mut self, local: &mut Side, remote: Side) -> Result<()> {
        let (number, mac) = MOVING;
        self.hosts[0].wait_for_place("vx7", mac, 1)?;
        drop(remote);
        let mut moved = self.guest("moved", 2, number)?;
        connect_again(local, &mut moved, BRIEF)?;
        write(local, &moved, status::SUCCESS)?;
        self.hosts[0].wait_for_place("vx7", mac, 2)
    }

    /// The commands that undo the set-up leave nothing behind, neither on the host nor at its peers.
    fn tear_down(&mut self) -> Result<()> {
        self.hosts[2].tear_down()?;
        let left = self.hosts[2].run("ip -o link show type bridge; ip -o link show type vxlan; ip tuntap show")?;
        ensure!(left.is_empty(), "interfaces are left: {left}");
        self.hosts[0].wait_for_peers(&[1])
    }
}

/// Connects two sides again, whatever has become of their connection.
fn connect_again(a: &mut Side, b: &mut Side, timeout: u8) -> Result<()> {
    a.qp.to_reset()?;
    b.qp.to_reset()?;
    connect_across(a, b, timeout)
}

/// Writes one packet, which has to end with this status.
fn write(from: &mut Side, to: &Side, expected: u32) -> Result<()> {
    let local = from.buffer.sge(&from.mr, 0, 64);
    from.qp.post_send(&[SendWr::write(1, &[local], to.buffer.va(), to.mr.rkey)])?;
    let done = from.cq.wait();
    ensure!(done.status == expected, "a write ended with status {}, not {expected}", done.status);
    Ok(())
}
