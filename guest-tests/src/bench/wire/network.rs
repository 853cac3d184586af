//! Two network namespaces with a pair of interfaces between them.

use std::process::Command;

use anyhow::{Context, Result, bail};

/// The IP MTU of the interfaces.
pub(crate) const MTU: u32 = 9000;

/// Namespaces that end with this value.
#[derive(Debug)]
pub(crate) struct Network {
    names: [String; 2],
}

impl Network {
    /// Makes them, with interfaces that are up and have addresses of their own ([`Network::host_address`]).
    pub(crate) fn new() -> Result<Self> {
        let names = [0, 1].map(|side| format!("pvrdma-bench-{}-{side}", std::process::id()));
        let network = Self { names };
        for name in &network.names {
            ip(&format!("netns add {name}"))?;
        }
        let [a, b] = &network.names;
        ip(&format!("link add name wire netns {a} mtu {MTU} type veth peer name wire netns {b} mtu {MTU}"))?;
        for (side, name) in network.names.iter().enumerate() {
            ip(&format!("-n {name} address add {}/24 dev wire", Self::host_address(side)))?;
            ip(&format!("-n {name} link set lo up"))?;
            ip(&format!("-n {name} link set wire up"))?;
        }
        Ok(network)
    }

    /// Why there cannot be one here.
    pub(crate) fn obstacle() -> Option<&'static str> {
        if !rustix::process::geteuid().is_root() {
            return Some("network namespaces need root");
        }
        let found = Command::new("ip").arg("-V").output().is_ok_and(|output| output.status.success());
        (!found).then_some("there is no ip command (package iproute2)")
    }

    /// The address that the host's own network stack has on a side.
    pub(crate) fn host_address(side: usize) -> String {
        format!("10.78.0.{}", side + 1)
    }

    /// A command line that runs a program on one side, on a processor of its own.
    pub(crate) fn enter(&self, side: usize) -> Vec<String> {
        let cpu = side % std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        ["taskset", "--cpu-list", &cpu.to_string(), "ip", "netns", "exec", &self.names[side]].map(str::to_owned).into()
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in &self.names {
            if let Err(error) = ip(&format!("netns delete {name}")) {
                log::debug!("{error:#}");
            }
        }
    }
}

fn ip(arguments: &str) -> Result<()> {
    let output = Command::new("ip").args(arguments.split(' ')).output().context("cannot run ip (package iproute2)")?;
    if !output.status.success() {
        bail!("ip {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
