//! Resource limits of the process.

use log::warn;
use rustix::process::{Resource, Rlimit, geteuid, getrlimit, setrlimit};

use crate::config::{Config, Pin};

/// Less than a usual guest has, in bytes.
const SMALL: u64 = 256 << 20;

/// Takes all that we may of locked memory and descriptors, and says so when that will not do.
pub(crate) fn raise(config: &Config) {
    raise_one(Resource::Memlock, "locked memory");
    // A socket and a few eventfds for each device, and a descriptor for each region of a guest's memory.
    raise_one(Resource::Nofile, "open files");
    if let Some(shortage) = shortage(config) {
        // Log: once, at the start.
        warn!("{shortage}");
    }
}

/// Why guests' memory cannot be locked, if that is sure.
pub(crate) fn shortage(config: &Config) -> Option<String> {
    shortage_of(config, lockable())
}

/// Bytes that this process may lock at most; none is no limit, as for root.
pub(crate) fn lockable() -> Option<u64> {
    getrlimit(Resource::Memlock).maximum.filter(|_| !geteuid().is_root())
}

/// Why guests' memory cannot be locked where so many bytes may be.
pub(crate) fn shortage_of(config: &Config, limit: Option<u64>) -> Option<String> {
    let bytes = limit.filter(|&limit| limit < SMALL)?;
    let device = config.devices().map(|(_, device)| device).find(|device| device.pin == Pin::All)?;
    Some(format!(
        "device {}: pin=all keeps all guest memory resident, but this process may lock {} KiB: raise RLIMIT_MEMLOCK \
         (systemd: LimitMEMLOCK=) or use pin=registered",
        device.config.name,
        bytes >> 10
    ))
}

fn raise_one(resource: Resource, what: &str) {
    // Workers have these limits, too, and no capability that would lift them.
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
