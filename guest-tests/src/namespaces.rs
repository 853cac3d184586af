//! Network namespaces that act as hosts connected by a cable.

use std::net::IpAddr;
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Interface at each end of the cable.
pub(crate) const INTERFACE: &str = "wire";

/// Two network namespaces with a cable between them, removed on drop.
#[derive(Debug)]
pub(crate) struct Namespaces {
    names: [String; 2],
    /// A third namespace between the two, if there is one.
    switch: Option<String>,
}

impl Namespaces {
    /// Creates both and connects them; their interfaces have this MTU and one address each.
    pub(crate) fn new(purpose: &str, mtu: u32, addresses: [IpAddr; 2]) -> Result<Self> {
        let names = ["a", "b"].map(|end| format!("guest-tests-{purpose}-{}-{end}", std::process::id()));
        let pair = Self { names, switch: None };
        pair.add()?;
        let [a, b] = &pair.names;
        ip(&format!("-n {a} link add {INTERFACE} mtu {mtu} type veth peer name {INTERFACE} mtu {mtu} netns {b}"))?;
        pair.set_up(addresses)?;
        Ok(pair)
    }

    /// Same as [`new`](Self::new), with a bridge in between. The bridge's port to each end has a token bucket filter
    /// with these `tc` parameters.
    pub(crate) fn behind_filter(purpose: &str, mtu: u32, addresses: [IpAddr; 2], filter: &str) -> Result<Self> {
        let name = |end| format!("guest-tests-{purpose}-{}-{end}", std::process::id());
        let pair = Self { names: ["a", "b"].map(name), switch: Some(name("switch")) };
        pair.add()?;
        let Some(switch) = &pair.switch else { return Ok(pair) };
        ip(&format!("-n {switch} link add bridge mtu {mtu} type bridge"))?;
        ip(&format!("-n {switch} link set bridge up"))?;
        for (port, name) in ["port-a", "port-b"].into_iter().zip(&pair.names) {
            ip(&format!(
                "-n {name} link add {INTERFACE} mtu {mtu} type veth peer name {port} mtu {mtu} netns {switch}"
            ))?;
            ip(&format!("-n {switch} link set dev {port} master bridge up"))?;
            run("tc", &format!("-n {switch} qdisc add dev {port} root tbf {filter}"))?;
        }
        pair.set_up(addresses)?;
        Ok(pair)
    }

    fn all(&self) -> impl Iterator<Item = &String> {
        self.names.iter().chain(&self.switch)
    }

    fn add(&self) -> Result<()> {
        self.all().try_for_each(|name| ip(&format!("netns add {name}")).context("network namespaces need root"))
    }

    /// Gives both ends an address.
    fn set_up(&self, addresses: [IpAddr; 2]) -> Result<()> {
        for (name, address) in self.names.iter().zip(addresses) {
            // There are no other hosts, so duplicate address detection is not needed for an IPv6 address.
            let address = match address {
                IpAddr::V4(address) => format!("{address}/24"),
                IpAddr::V6(address) => format!("{address}/64 nodad"),
            };
            ip(&format!("-n {name} address add dev {INTERFACE} {address}"))?;
            ip(&format!("-n {name} link set {INTERFACE} up"))?;
            // A host reaches its own addresses over the loopback interface.
            ip(&format!("-n {name} link set lo up"))?;
        }
        Ok(())
    }

    /// Returns the reason why namespaces cannot be created here, if there is one.
    pub(crate) fn obstacle() -> Option<&'static str> {
        if !rustix::process::geteuid().is_root() {
            return Some("network namespaces need root");
        }
        let found = Command::new("ip").arg("-V").output().is_ok_and(|output| output.status.success());
        (!found).then_some("there is no ip command (package iproute2)")
    }

    /// Limits super-frames of both interfaces to this number of bytes and segments; larger ones are segmented before.
    pub(crate) fn limit_super_frames(&self, bytes: u32, segments: u32) -> Result<()> {
        let limits = format!("gso_max_size {bytes} gso_max_segs {segments}");
        self.names.iter().try_for_each(|name| ip(&format!("-n {name} link set {INTERFACE} {limits}")))
    }

    /// Returns the name of one namespace, for `ip netns exec`.
    pub(crate) fn name(&self, end: usize) -> &str {
        &self.names[end]
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in self.all() {
            if let Err(error) = ip(&format!("netns delete {name}")) {
                log::warn!("{error:#}");
            }
        }
    }
}

/// Runs `ip` with these arguments.
pub(crate) fn ip(arguments: &str) -> Result<()> {
    run("ip", arguments)
}

fn run(program: &str, arguments: &str) -> Result<()> {
    let output = Command::new(program).args(arguments.split_whitespace()).output();
    let output = output.with_context(|| format!("cannot run {program}"))?;
    if !output.status.success() {
        bail!("{program} {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
