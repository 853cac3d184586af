//! Drops capabilities, and denies other processes access to this one.

use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};

use super::report::SandboxReport;

/// Upper bound of the number of capabilities of a kernel.
const MOST_CAPABILITIES: u32 = 64;

/// Drops all privileges, and records those that remain according to the kernel. `locks`: the process locks guest
/// memory.
pub(super) fn drop_all(locks: bool, report: &mut SandboxReport) {
    match set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        Ok(()) => report.undumpable = true,
        Err(errno) => report.missing.push(format!("processes of the same user may trace it: {errno}")),
    }
    if let Err(errno) = drop_capabilities(locks) {
        report.missing.push(format!("capabilities cannot be dropped: {errno}"));
    }
    if let Ok(sets) = capabilities(None) {
        report.capabilities = sets.permitted.iter_names().map(|(name, _)| format!("CAP_{name}")).collect();
    }
    match set_no_new_privs(true) {
        Ok(()) => report.no_new_privs = true,
        Err(errno) => report.missing.push(format!("no_new_privs: {errno}")),
    }
}

fn drop_capabilities(locks: bool) -> Result<(), rustix::io::Errno> {
    let before = capabilities(None)?;
    let wanted = if locks { CapabilitySet::IPC_LOCK } else { CapabilitySet::empty() };
    let mut kept = before.permitted & wanted;
    // CAP_IPC_LOCK permits locking guest memory beyond the limit, up to the amount that the administrator has
    // configured. With an unlimited RLIMIT_MEMLOCK it is not needed.
    let unlimited = Rlimit { current: None, maximum: None };
    if !kept.is_empty() && setrlimit(Resource::Memlock, unlimited).is_ok() {
        kept = CapabilitySet::empty();
    }
    for capability in (0..MOST_CAPABILITIES).map(|bit| CapabilitySet::from_bits_retain(1 << bit)) {
        // This fails beyond the kernel's last capability. Without CAP_SETPCAP, nothing can be removed from the bounding
        // set, but then `no_new_privs` prevents the process from gaining any of it.
        if capability_is_in_bounding_set(capability) == Ok(true) && !kept.contains(capability) {
            let _ = remove_capability_from_bounding_set(capability);
        }
    }
    // Fails before Linux 4.3, which has no ambient capabilities.
    let _ = clear_ambient_capability_set();
    set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() })
}
