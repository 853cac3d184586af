//! Network namespaces that act as hosts, with a cable of each to a bridge between them.

use anyhow::{Context, Result};

use crate::namespaces::{INTERFACE, ip};

/// Address of a host, of at most 254.
pub(crate) fn address(host: usize) -> String {
    format!("192.0.2.{}", host + 1)
}

/// The namespaces, removed on drop.
#[derive(Debug)]
pub(crate) struct Fabric {
    switch: String,
    hosts: Vec<String>,
}

impl Fabric {
    /// Creates the bridge and the hosts, each with one interface ([`INTERFACE`]).
    pub(crate) fn new(purpose: &str, hosts: usize) -> Result<Self> {
        let name = |end: &str| format!("guest-tests-{purpose}-{}-{end}", std::process::id());
        let hosts = (0..hosts).map(|host| name(&host.to_string())).collect();
        let fabric = Self { switch: name("switch"), hosts };
        ip(&format!("netns add {}", fabric.switch)).context("network namespaces need root")?;
        ip(&format!("-n {} link add bridge up type bridge", fabric.switch))?;
        (0..fabric.hosts.len()).try_for_each(|host| fabric.add(host))?;
        Ok(fabric)
    }

    /// Name of the namespace of a host.
    pub(crate) fn host(&self, host: usize) -> &str {
        &self.hosts[host]
    }

    /// Pulls the cable of a host, so that nothing that it sends at its end reaches the others.
    pub(crate) fn cut(&self, host: usize) -> Result<()> {
        ip(&format!("-n {} link delete port{host}", self.switch))
    }

    /// Replaces the namespace of a host, in which all processes have ended, by a new one.
    pub(crate) fn renew(&self, host: usize) -> Result<()> {
        ip(&format!("netns delete {}", self.hosts[host]))?;
        self.add(host)
    }

    fn add(&self, host: usize) -> Result<()> {
        let (switch, name) = (&self.switch, &self.hosts[host]);
        ip(&format!("netns add {name}"))?;
        ip(&format!("-n {name} link add {INTERFACE} type veth peer name port{host} netns {switch}"))?;
        ip(&format!("-n {switch} link set dev port{host} master bridge up"))?;
        ip(&format!("-n {name} address add dev {INTERFACE} {}/24", address(host)))?;
        ip(&format!("-n {name} link set {INTERFACE} up"))?;
        ip(&format!("-n {name} link set lo up"))
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        for name in self.hosts.iter().chain([&self.switch]) {
            if let Err(error) = ip(&format!("netns delete {name}")) {
                log::warn!("{error:#}");
            }
        }
    }
}
