//! VM exits caused by programs that use the device, counted by KVM.

use anyhow::{Context, Result, ensure};

use super::perftest;
use crate::endpoints::Endpoints;
use crate::kvm_host::Exits;
use crate::vm::Vm;

/// Number of repetitions of each operation.
const COUNT: u32 = 500;
/// Maximum number of other exits while an idle program runs: the vNIC is idle.
const NOISE: u64 = COUNT as u64 / 10;

/// MMIO exits of one post, one poll of an empty completion queue, and one arm.
pub(crate) struct Costs(Vec<(&'static str, f64)>);

impl Costs {
    /// Measures them in a guest, whose exits `exits` reads.
    pub(crate) fn measure(vm: &Vm, device: &str, exits: &dyn Fn() -> Result<Exits>) -> Result<Self> {
        let ring = |what: &str| -> Result<u64> {
            let before = exits()?;
            vm.run(&format!("/run/guest-tests doorbells --device {device} {what}"))?;
            Ok(exits()?.mmio - before.mmio)
        };
        // This run loads the library, so that all following runs behave alike.
        ring("")?;
        let nothing = ring("")?;
        let mut costs = Vec::new();
        for (name, option) in [("post", "--posts"), ("empty poll", "--polls"), ("arm", "--arms")] {
            let more = ring(&format!("{option} {COUNT}"))?.saturating_sub(nothing);
            let whole = (more + u64::from(COUNT) / 2) / u64::from(COUNT) * u64::from(COUNT);
            ensure!(more.abs_diff(whole) <= NOISE, "{more} exits for {COUNT} times {name}: no whole number of each");
            costs.push((name, more as f64 / f64::from(COUNT)));
        }
        Ok(Self(costs))
    }

    /// Iterates over the operations with the exits of each: post, empty poll, arm.
    pub(crate) fn each(&self) -> impl Iterator<Item = (&'static str, f64)> {
        self.0.iter().copied()
    }
}

impl std::fmt::Display for Costs {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let words: Vec<_> = self.0.iter().map(|(name, each)| format!("{each:.2} per {name}")).collect();
        write!(formatter, "exits {}", words.join(", "))
    }
}

/// Formats the exits of the guest for a report.
pub(crate) fn report(endpoints: &Endpoints<'_>, exits: &dyn Fn() -> Result<Exits>) -> Result<String> {
    let costs = Costs::measure(endpoints.vms[0], endpoints.device[0], exits)?;
    ensure!(costs.each().all(|(_, each)| each < 1.5), "a doorbell stops the processor once: {costs}");
    Ok(costs.to_string())
}

/// Returns the latency of a write of eight bytes from one guest to the other, in microseconds.
pub(crate) fn write_latency(endpoints: &Endpoints<'_>) -> Result<f64> {
    let rows = perftest::run(endpoints, 1, "ib_write_lat", "-n 200 -s 8")?;
    rows.last().and_then(perftest::Row::typical_microseconds).context("ib_write_lat reports no latency")
}
