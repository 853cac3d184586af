//! The test cases that run in a pair of guests. Cases that link crates of the device belong to the feature `suite`, so
//! that the demo is built without them.

#[cfg(feature = "suite")]
mod action;
mod agent;
mod applications;
#[cfg(feature = "suite")]
mod browser;
mod case;
mod cloud_hypervisor;
mod connection;
#[cfg(feature = "suite")]
mod container;
#[cfg(feature = "suite")]
mod daemon;
#[cfg(feature = "suite")]
mod dissect;
mod doorbells;
#[cfg(feature = "suite")]
mod dumbbell;
mod errors;
#[cfg(feature = "suite")]
mod evpn;
mod exchange;
pub(crate) mod exits;
pub(crate) mod guests;
pub(crate) mod host_adapter;
mod host_adapter_cm;
mod integrity;
mod interop;
mod inventory;
#[cfg(feature = "suite")]
mod iwarp;
mod kernel_log;
mod kvm;
mod kvm_doorbells;
mod kvm_migrate;
mod kvm_qemu;
mod kvm_saved;
mod kvm_traffic;
#[cfg(feature = "suite")]
mod lab;
#[cfg(feature = "suite")]
mod lab_rootfs;
mod lanes;
mod libvirt;
mod lifecycle;
mod machines;
mod many;
#[cfg(feature = "suite")]
pub(crate) mod matrix;
mod nested;
mod network;
mod networks;
mod nic;
mod nvme;
#[cfg(feature = "suite")]
mod open_vswitch;
mod package;
#[cfg(feature = "suite")]
mod packets;
#[cfg(feature = "suite")]
mod paused_peer;
pub(crate) mod perftest;
pub(crate) mod pingpong;
mod programs;
mod qemu_migrate;
mod qemu_nic;
mod readme;
mod recipe;
mod roce_v1;
#[cfg(feature = "suite")]
mod rootfs_debian;
mod runner;
mod shared;
mod soak;
mod sockets;
#[cfg(feature = "suite")]
mod suites;
#[cfg(feature = "suite")]
mod torture;
mod two_daemons;
#[cfg(feature = "suite")]
mod workflow;

pub(crate) use case::Case;
#[cfg(feature = "suite")]
pub(crate) use lanes::run_in_lanes;
#[cfg(feature = "suite")]
pub(crate) use runner::{Tally, run_cases};
pub(crate) use runner::{causes, run_single};

use crate::kvm_bed::KvmBeds;
use crate::pair::LinkKind;

/// Returns all cases for a link in execution order: read-only cases first, cases that kill machines last.
pub(crate) fn all(kind: LinkKind) -> Vec<Case> {
    let mut cases = agent::cases();
    if kind == LinkKind::Pvrdma {
        cases.extend(inventory::cases());
    }
    cases.extend(pingpong::cases());
    cases.extend(perftest::cases());
    cases.extend(connection::cases());
    cases.extend(many::cases());
    cases.extend(integrity::cases());
    cases.extend(nvme::cases());
    if kind == LinkKind::Pvrdma {
        cases.extend(of_the_device());
    }
    cases
}

/// Returns the cases for the device that need more than two guests with a link, or that change it.
fn of_the_device() -> Vec<Case> {
    let mut cases = errors::cases();
    #[cfg(feature = "suite")]
    cases.extend(dissect::cases());
    cases.extend(network::cases());
    cases.extend(lifecycle::cases());
    #[cfg(feature = "suite")]
    cases.extend(daemon::cases());
    cases.extend(machines::cases());
    cases.extend(soak::cases());
    #[cfg(feature = "suite")]
    cases.extend(torture::cases());
    cases.extend(sockets::cases());
    cases.extend(readme::cases());
    #[cfg(feature = "suite")]
    cases.extend(lab::cases());
    #[cfg(feature = "suite")]
    cases.extend(lab_rootfs::cases());
    #[cfg(feature = "suite")]
    cases.extend(suites::cases());
    #[cfg(feature = "suite")]
    cases.extend(container::cases());
    #[cfg(feature = "suite")]
    cases.extend(workflow::cases());
    #[cfg(feature = "suite")]
    cases.extend(browser::cases());
    cases.extend(package::cases());
    cases.extend(libvirt::cases());
    cases.extend(applications::cases());
    cases.extend(guests::cases());
    cases.extend(interop::cases());
    #[cfg(feature = "suite")]
    cases.extend(paused_peer::cases());
    #[cfg(feature = "suite")]
    cases.extend(iwarp::cases());
    cases.extend(host_adapter::cases());
    cases.extend(host_adapter_cm::cases());
    cases.extend(roce_v1::cases());
    cases.extend(networks::cases());
    #[cfg(feature = "suite")]
    cases.extend(open_vswitch::cases());
    #[cfg(feature = "suite")]
    cases.extend(evpn::cases());
    cases.extend(nic::cases());
    cases.extend(qemu_nic::cases());
    cases.extend(qemu_migrate::cases());
    cases.extend(doorbells::cases());
    #[cfg(feature = "suite")]
    cases.extend(dumbbell::cases());
    let beds = KvmBeds::default();
    cases.extend(kvm::cases(&beds));
    cases.extend(kvm_qemu::cases(&beds));
    cases.extend(kvm_doorbells::cases(&beds));
    cases.extend(kvm_saved::cases(&beds));
    cases.extend(kvm_migrate::cases(&beds));
    cases.extend(cloud_hypervisor::cases(&beds));
    cases.extend(nested::cases());
    cases
}

/// The names of all cases, in their order.
pub(crate) fn names() -> Vec<String> {
    all(LinkKind::Pvrdma).into_iter().map(|case| case.name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kvm_cases_that_run_by_default_exist() {
        let ordinary = kvm::ORDINARY;
        let cases = all(LinkKind::Pvrdma);
        let unasked: Vec<_> =
            cases.iter().filter(|case| case.slow.is_none() && case.name.starts_with("kvm/")).collect();
        for name in &ordinary {
            assert!(unasked.iter().any(|case| case.name == *name), "there is no case {name}");
        }
        // The additional one needs an external binary.
        assert_eq!(unasked.len(), ordinary.len() + 1);
    }
}
