//! Resource limits of the process.

use std::fmt;

use log::warn;
use rustix::process::{Resource, Rlimit, geteuid, getrlimit, setrlimit};

use crate::config::{Config, Pin};

/// Less than the memory of a usual guest, in bytes.
const SMALL: u64 = 256 << 20;

/// Reason why guest memory certainly cannot be locked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Shortage {
    /// Name of the device.
    pub(crate) device: String,
    /// KiB that may be locked.
    kib: u64,
}

impl Shortage {
    /// Remedy.
    pub(crate) const REMEDY: &str = "raise RLIMIT_MEMLOCK (systemd: LimitMEMLOCK=) or use pin=registered";

    /// Describes the problem of the device.
    pub(crate) fn problem(&self) -> String {
        format!("pin=all keeps all guest memory resident, but this process may lock {} KiB", self.kib)
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {}: {}: {}", self.device, self.problem(), Self::REMEDY)
    }
}

/// Raises the limits of locked memory and descriptors as far as permitted, and warns if that does not suffice.
pub(crate) fn raise(config: &Config) {
    raise_one(Resource::Memlock, "locked memory");
    // Each device needs a socket and a few eventfds, and each region of a guest's memory needs a descriptor.
    raise_one(Resource::Nofile, "open files");
    if let Some(shortage) = shortage(config) {
        // Log: once, at the start.
        warn!("{shortage}");
    }
}

/// Returns the reason why guest memory certainly cannot be locked, if there is one.
pub(crate) fn shortage(config: &Config) -> Option<Shortage> {
    shortage_of(config, lockable())
}

/// Returns the bytes that this process may lock, or `None` if there is no limit, as for root.
pub(crate) fn lockable() -> Option<u64> {
    getrlimit(Resource::Memlock).maximum.filter(|_| !geteuid().is_root())
}

/// Returns the reason why guest memory cannot be locked with this limit in bytes, if there is one.
pub(crate) fn shortage_of(config: &Config, limit: Option<u64>) -> Option<Shortage> {
    let bytes = limit.filter(|&limit| limit < SMALL)?;
    let device = config.devices().map(|(_, device)| device).find(|device| device.pin == Pin::All)?;
    Some(Shortage { device: device.config.name.clone(), kib: bytes >> 10 })
}

fn raise_one(resource: Resource, what: &str) {
    // Workers inherit these limits, and have no capability to exceed them.
    if resource == Resource::Memlock && setrlimit(resource, Rlimit { current: None, maximum: None }).is_ok() {
        return;
    }
    let Rlimit { current, maximum } = getrlimit(resource);
    if current != maximum
        && let Err(errno) = setrlimit(resource, Rlimit { current: maximum, maximum })
    {
        // Log: once, at the start.
        warn!("cannot raise the limit of {what}: {errno}");
    }
}
