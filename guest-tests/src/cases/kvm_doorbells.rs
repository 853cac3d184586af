//! Doorbells that stop no processor: two VMs of one `pvrdma-vmm`, of which one has its doorbell pages in memory while a
//! program polls, and the other traps. What a message costs each is counted by KVM.

use anyhow::{Result, ensure};

use super::case::Case;
use super::pingpong::pingpong;
use super::programs::{self, Program};
use super::shared::Shared;
use crate::kvm_bed::KvmBeds;
use crate::vmm_pair::VmmPair;

/// Messages of the ping-pong that is counted, half of them each way.
const MESSAGES: u64 = 10_000;
/// Of which VM.
const TRAPPED: usize = 0;
const MAPPED: usize = 1;

const WHEN: &str = "takes minutes; runs when asked for: --only kvm/doorbells";

/// Cases `kvm/doorbells/...`.
pub(crate) fn cases(beds: &KvmBeds) -> Vec<Case> {
    let beds = beds.clone();
    let shared = Shared::new(move |image| VmmPair::boot_with_doorbells(image, &beds));
    let mut cases = vec![shared.case("kvm/doorbells/exits", exits)];
    // Programs that poll, that sleep and that do both, one after the other on the same pages.
    let run = |pair: &VmmPair, program: &Program, server: usize| program.run(&pair.endpoints()?, server);
    cases.extend(programs::cases("kvm/doorbells", &programs::POLL_AND_SLEEP, &shared, run));
    cases.into_iter().map(|case| case.slow(WHEN)).collect()
}

/// Exits of a ping-pong that polls, on either side.
fn exits(pair: &VmmPair) -> Result<String> {
    let endpoints = pair.endpoints()?;
    // The library is loaded then.
    pingpong(&endpoints, 1, "ibv_rc_pingpong", "-n 10")?;
    let before = pair.exits_of_each()?;
    let speed = pingpong(&endpoints, 1, "ibv_rc_pingpong", &format!("-n {}", MESSAGES / 2))?;
    let after = pair.exits_of_each()?;
    let [trapped, mapped] = [TRAPPED, MAPPED].map(|vm| after[vm].mmio - before[vm].mmio);
    let all = [TRAPPED, MAPPED].map(|vm| after[vm].all - before[vm].all);
    let note = format!(
        "{MESSAGES} messages, half of them posted by each: {trapped} exits for doorbells where they trap ({} in all), \
         {mapped} where they are memory ({} in all), {speed}",
        all[TRAPPED], all[MAPPED]
    );
    // Each posts its half, and as many receives.
    ensure!(trapped >= MESSAGES, "doorbells that trap stop the processor: {note}");
    // A page traps again when nothing comes for a tenth of a second, which happens where virtualisation is emulated.
    ensure!(mapped <= MESSAGES / 5, "doorbells in memory do not: {note}");
    Ok(note)
}
