//! Measurements under KVM: two VMs of one `pvrdma-vmm`, with the device in the same process, beside two QEMUs that
//! reach their devices by vfio-user. All four run on one host, in alternating rounds, so that a noisy machine disturbs
//! both alike.

use anyhow::{Context, Result};

use super::figure::Figure;
use crate::cases::exits::{Costs, write_latency};
use crate::image::GuestImage;
use crate::kvm_bed::KvmBeds;
use crate::kvm_qemu::KvmQemuPair;
use crate::pair::PVRDMA_DEVICE;
use crate::vmm_pair::VmmPair;

const OTHER: &str = "QEMU, vfio-user";

/// Measures everything `runs` times.
pub(super) fn measure(runs: usize) -> Result<Vec<Figure>> {
    let image = GuestImage::build()?;
    let beds = KvmBeds::default();
    let ours = VmmPair::boot_alone(&image, &beds)?;
    let theirs = KvmQemuPair::boot(&image, &beds)?;
    eprintln!("{}", ours.description());
    // A guest that waits in a loop must not take the processor away from the other one.
    ours.spread()?;
    theirs.spread()?;
    let ends = [ours.endpoints()?, theirs.endpoints()?];
    let mut latencies = Vec::new();
    for run in 0..runs {
        let [ours, theirs] = [write_latency(&ends[0])?, write_latency(&ends[1])?];
        eprintln!("write of 8 bytes, run {}: {ours:.0} us, QEMU {theirs:.0} us", run + 1);
        latencies.push([ours, theirs]);
    }
    let title = |what: &str| format!("under KVM: {what}");
    let mut figures =
        vec![Figure::of_rounds("kvm/write_latency", title("write of 8 bytes"), "us", true, &latencies, OTHER)];
    let costs = [
        Costs::measure(ends[0].vms[0], PVRDMA_DEVICE, &|| ours.exits()).with_context(|| ours.diagnosis())?,
        Costs::measure(ends[1].vms[0], PVRDMA_DEVICE, &|| theirs.exits(0)).with_context(|| theirs.diagnosis())?,
    ];
    for ((what, ours), (_, theirs)) in costs[0].each().zip(costs[1].each()) {
        let name = format!("kvm/exits_{}", what.replace(' ', "_"));
        let title = title(&format!("exits of one {what}"));
        figures.push(Figure::of_rounds(name, title, "exits", true, &[[ours, theirs]], OTHER));
    }
    Ok(figures)
}
