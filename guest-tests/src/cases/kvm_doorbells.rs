//! Doorbells without VM exits, for two VMs of one `pvrdma-vmm`, or of QEMU on one daemon. One VM has its doorbell pages
//! mapped as memory while a program polls; the other VM's doorbells trap. KVM counts the exits of each VM per message.

use anyhow::{Context, Result, ensure};

use super::case::Case;
use super::pingpong::pingpong;
use super::programs::{self, Program};
use super::shared::Shared;
use crate::endpoints::Endpoints;
use crate::kvm_bed::KvmBeds;
use crate::kvm_host::Exits;
use crate::kvm_qemu::KvmQemuPair;
use crate::vmm_pair::VmmPair;

/// Messages of the measured ping-pong, half of them in each direction.
const MESSAGES: u64 = 10_000;
/// Index of the VM whose doorbells trap.
const TRAPPED: usize = 0;
const MAPPED: usize = 1;

const WHEN: &str = "takes minutes; runs when asked for: --only kvm/doorbells";

/// Returns the cases `kvm/doorbells/...`.
pub(crate) fn cases(beds: &KvmBeds) -> Vec<Case> {
    let (beds, of_qemu) = (beds.clone(), beds.clone());
    let shared = Shared::new(move |image| VmmPair::boot_with_doorbells(image, &beds));
    let mut cases = vec![shared.case("kvm/doorbells/exits", exits)];
    // Programs that poll, that sleep, and that do both run one after the other on the same pages.
    let run = |pair: &VmmPair, program: &Program, server: usize| program.run(&pair.endpoints()?, server);
    cases.extend(programs::cases("kvm/doorbells", &programs::POLL_AND_SLEEP, &shared, run));
    let beds = of_qemu;
    let of_qemu = Shared::new(move |image| KvmQemuPair::boot_with_doorbells(image, &beds, ["trapped", "mapped"]));
    cases.push(of_qemu.case("kvm/doorbells/qemu-exits", qemu_exits));
    cases.into_iter().map(|case| case.slow(WHEN)).collect()
}

/// Counts the exits of a polling ping-pong on both sides.
fn exits(pair: &VmmPair) -> Result<String> {
    let counted = Counted::of(&pair.endpoints()?, || pair.exits_of_each())?;
    // A page traps again when no doorbell arrives for a tenth of a second, which happens under emulated virtualisation.
    ensure!(counted.mapped.mmio <= MESSAGES / 5, "doorbells in memory do not: {counted}");
    Ok(counted.to_string())
}

/// Same as [`exits`], for two QEMU guests whose pages belong to a file of the daemon.
fn qemu_exits(pair: &KvmQemuPair) -> Result<String> {
    let counts = |name: &str| -> Result<u64> {
        let place = format!("/devices/{MAPPED}/counters/{name}");
        // A device that is slow to answer is left out of a status report.
        let count = (0..10).find_map(|_| pair.status().ok()?.pointer(&place)?.as_u64());
        count.with_context(|| format!("no {name} in ten reports"))
    };
    let faults = counts("doorbell_faults")?;
    let counted = Counted::of(&pair.endpoints()?, || Ok([pair.exits(TRAPPED)?, pair.exits(MAPPED)?]))?;
    let faults = counts("doorbell_faults")? - faults;
    let note = format!("{counted}; pages of the latter were touched {faults} times while they were away");
    ensure!(counts("doorbells_of_processes")? == 0, "doorbells in memory are no messages: {note}");
    // The remaining exits are accesses of the vNIC and of the guest's kernel.
    ensure!(counted.mapped.mmio <= MESSAGES / 5, "doorbells in memory do not: {note}");
    Ok(note)
}

/// Exits of a ping-pong.
struct Counted {
    trapped: Exits,
    mapped: Exits,
    speed: String,
}

impl Counted {
    fn of(endpoints: &Endpoints<'_>, exits: impl Fn() -> Result<[Exits; 2]>) -> Result<Self> {
        // This run loads the library.
        pingpong(endpoints, 1, "ibv_rc_pingpong", "-n 10")?;
        let before = exits()?;
        let speed = pingpong(endpoints, 1, "ibv_rc_pingpong", &format!("-n {}", MESSAGES / 2))?;
        let after = exits()?;
        let [trapped, mapped] = [TRAPPED, MAPPED]
            .map(|vm| Exits { all: after[vm].all - before[vm].all, mmio: after[vm].mmio - before[vm].mmio });
        let counted = Self { trapped, mapped, speed };
        // Each side posts its half of the sends, and as many receives.
        ensure!(trapped.mmio >= MESSAGES, "doorbells that trap stop the processor: {counted}");
        Ok(counted)
    }
}

impl std::fmt::Display for Counted {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { trapped, mapped, speed } = self;
        write!(
            formatter,
            "{MESSAGES} messages, half of them posted by each: {} exits for doorbells where they trap ({} in all), {} \
             where they are memory ({} in all), {speed}",
            trapped.mmio, trapped.all, mapped.mmio, mapped.all
        )
    }
}
