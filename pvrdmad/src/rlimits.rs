//! Resource limits of the process.

use log::warn;
use pvrdma_guest_memory::{PinError, PinRefusal};
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

/// What is wrong with memory that could not be locked, and what would help.
pub(crate) fn advice(error: &PinError) -> String {
    // Whoever we run as: the threads of a worker may not ask that.
    advice_of(error, getrlimit(Resource::Memlock).maximum)
}

fn advice_of(error: &PinError, limit: Option<u64>) -> String {
    match error.reason {
        PinRefusal::Kernel(_) if limit.is_some() => {
            format!("{error}: raise it (systemd: LimitMEMLOCK=) or use pin=registered")
        }
        PinRefusal::Kernel(_) | PinRefusal::Device(_) => error.to_string(),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_cannot_be_locked() {
        let error = |reason| PinError { needed: 64 << 20, locked: 0, limit: "8 KiB".to_owned(), reason };
        let kernel = error(PinRefusal::Kernel("Cannot allocate memory (os error 12)".to_owned()));
        let said = "cannot keep 67108864 bytes of guest memory resident: Cannot allocate memory (os error 12); 0 bytes \
                    are locked already, RLIMIT_MEMLOCK is 8 KiB";
        let cure = ": raise it (systemd: LimitMEMLOCK=) or use pin=registered";
        assert_eq!(advice_of(&kernel, Some(8192)), format!("{said}{cure}"));
        assert_eq!(advice_of(&kernel, None), said);
        let own = error(PinRefusal::Device("the device's limit of locked memory is 4096 bytes".to_owned()));
        assert_eq!(advice_of(&own, Some(8192)), own.to_string());
    }
}
