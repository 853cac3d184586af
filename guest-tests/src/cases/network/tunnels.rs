//! Tunnels that guests create over their vNICs.

use anyhow::{Result, ensure};

use super::super::case::Case;
use super::steps::{and_then_restore, checked_traffic};
use crate::pair::{Link, Pair};

/// Addresses of the guests in a tunnel.
const INNER: [&str; 2] = ["10.2.0.1", "10.2.0.2"];

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("network/vxlan", |pair, link| {
            // Without an outer checksum the receiver relies on the inner one; otherwise both are checked.
            for checksum in ["noudpcsum", "udpcsum"] {
                let add = |end: usize| {
                    let [local, remote] = [link.ip[end], link.ip[1 - end]];
                    format!(
                        "ip link add tun0 type vxlan id 7 local {local} remote {remote} dstport 4789 {checksum} dev eth0"
                    )
                };
                through(pair, add)?;
            }
            Ok(String::new())
        }),
        Case::new("network/geneve", |pair, link| {
            through(pair, |end| format!("ip link add tun0 type geneve id 7 remote {} udpcsum", link.ip[1 - end]))
        }),
        Case::new("network/wireguard", wireguard),
    ]
}

/// Creates a tunnel and sends checked traffic through it in both directions. The kernel counts no wrong checksum.
fn through(pair: &Pair, add: impl Fn(usize) -> String) -> Result<String> {
    let work = || {
        for (end, vm) in pair.vms().iter().enumerate() {
            vm.run(&format!("{} && ip addr add {}/24 dev tun0 && ip link set tun0 up", add(end), INNER[end]))?;
        }
        for (end, address) in INNER.into_iter().enumerate() {
            checked_traffic(pair, end, address, "")?;
        }
        for vm in pair.vms() {
            let log = vm.run("dmesg")?;
            ensure!(!log.contains("csum failure"), "{}: a checksum was wrong:\n{log}", vm.name());
        }
        Ok(String::new())
    };
    and_then_restore(work, || pair.vms().iter().try_for_each(|vm| vm.run("ip link del tun0").map(drop)))
}

fn wireguard(pair: &mut Pair, link: &Link) -> Result<String> {
    let keys = pair.vms().iter().map(|vm| vm.run("umask 077; wg genkey | tee /tmp/key | wg pubkey"));
    let keys = keys.collect::<Result<Vec<_>>>()?;
    through(pair, |end| {
        let (key, endpoint) = (keys[1 - end].trim(), link.ip[1 - end]);
        format!(
            "ip link add tun0 type wireguard &&
             wg set tun0 listen-port 51820 private-key /tmp/key peer {key} allowed-ips 10.2.0.0/24 endpoint {endpoint}:51820"
        )
    })
}
