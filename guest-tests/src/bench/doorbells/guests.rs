//! Compares guests with trapped doorbells and guests with doorbells in mapped memory: two guests without a spare
//! processor, and one guest that talks to itself with a spare processor.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::sides::{Place, TRAPPED};
use crate::bench::figure::Figure;
use crate::cases::pingpong::pingpong;
use crate::daemon::Daemon;
use crate::doorbells::Writes;
use crate::image::GuestImage;
use crate::pair::{LinkKind, PVRDMA_DEVICE, Pair, PairOptions};

/// Iterations of a ping-pong between two guests, of two messages each.
const ITERATIONS: u32 = 1_000;
/// Number of writes of a guest to itself.
const WRITES: u32 = 2_000;
/// Seconds for which a guest polls an empty queue. The daemon is observed during the second number of them.
const POLLS: u32 = 8;
const WATCH: Duration = Duration::from_secs(5);
/// Clock ticks per second in the kernel's interface to programs.
const TICKS: f64 = 100.0;
/// Maximum share of a processor for polling, in percent.
const POLL_COST: f64 = 3.0;

/// Measures everything `runs` times.
pub(super) fn measure(runs: usize) -> Result<Vec<Figure>> {
    let image = GuestImage::build()?;
    let [mapped, trapped] = [Guests::boot(&image, "mapped")?, Guests::boot(&image, "trapped")?];
    let both = [&mapped, &trapped];
    let mut figures = Vec::new();
    let pairs = rounds(runs, both, |guests| guests.pingpong())?;
    figures.extend(Cost::figures("pair", "ping-pong of two guests on two processors", &pairs));
    for guests in both {
        guests.spare_a_processor(true)?;
    }
    let alone = rounds(runs, both, Guests::writes)?;
    figures.extend(Cost::figures("one", "8-byte writes of a guest to itself, with a processor to spare", &alone));
    let latency: Vec<_> = alone.iter().map(|round| round.each_ref().map(|cost| cost.latency)).collect();
    let title = "8-byte write of a guest to itself, post to completion, with a processor to spare (median)";
    figures.push(Figure::of_rounds("doorbells/one-write", title.to_owned(), "µs", true, &latency, TRAPPED));
    let polls = (0..runs).map(|_| mapped.polls()).collect::<Result<Vec<_>>>()?;
    let title = "daemon, while a guest polls in vain, mapped doorbells".to_owned();
    figures.push(Figure::against_target("doorbells/empty-polls", title, "% of a core", true, polls, POLL_COST));
    Ok(figures)
}

fn rounds(runs: usize, both: [&Guests; 2], measure: impl Fn(&Guests) -> Result<Cost>) -> Result<Vec<[Cost; 2]>> {
    let round = |run| -> Result<_> {
        let [mapped, trapped] = both.map(&measure);
        let round = [mapped?, trapped?];
        eprintln!("doorbells, run {}: mapped {:?}, trapped {:?}", run + 1, round[0], round[1]);
        Ok(round)
    };
    (0..runs).map(round).collect()
}

/// Cost of messages.
#[derive(Clone, Copy, Debug)]
struct Cost {
    /// Messages per second.
    rate: f64,
    /// Doorbells that arrived as messages of the VMM, and faults on revoked pages, per message of the guests. Each is a
    /// VM exit where the guest's processor is not emulated.
    exits: f64,
    /// Microseconds from post to completion; with two guests, those of an iteration.
    latency: f64,
}

impl Cost {
    fn figures(name: &str, title: &str, rounds: &[[Self; 2]]) -> [Figure; 2] {
        let of =
            |value: fn(&Self) -> f64| -> Vec<_> { rounds.iter().map(|round| round.each_ref().map(value)).collect() };
        [
            Figure::of_rounds(
                format!("doorbells/{name}-messages"),
                format!("{title}: messages"),
                "a second",
                false,
                &of(|cost| cost.rate),
                TRAPPED,
            ),
            Figure::of_rounds(
                format!("doorbells/{name}-exits"),
                format!("{title}: exits"),
                "a message",
                true,
                &of(|cost| cost.exits),
                TRAPPED,
            ),
        ]
    }
}

struct Guests(Pair);

impl Guests {
    fn boot(image: &GuestImage, doorbells: &'static str) -> Result<Self> {
        let options = PairOptions { rxe: false, memory_mib: 512, doorbells: [doorbells; 2], ..PairOptions::default() };
        Pair::boot(image, &options).map(Self)
    }

    fn daemon(&self) -> Result<&Daemon> {
        self.0.daemon().context("there is no daemon")
    }

    /// Places the first guest on one processor and the daemon on another, or everything on all processors.
    fn spare_a_processor(&self, spare: bool) -> Result<()> {
        let [guest, device] = if spare { [Place::Guest, Place::Spare] } else { [Place::Anywhere; 2] };
        for vm in self.0.vms() {
            guest.of_process(vm.process_id())?;
        }
        self.daemon()?.processes().try_for_each(|process| device.of_process(process))
    }

    /// Returns the number of doorbells of processes that caused an exit, or would have caused one without emulation.
    #[expect(clippy::cast_precision_loss, reason = "figures have three digits")]
    fn exits(&self) -> Result<f64> {
        let status = self.daemon()?.status()?;
        let devices = status["devices"].as_array().context("no devices")?;
        let count = |name: &str| -> u64 { devices.iter().filter_map(|device| device["counters"][name].as_u64()).sum() };
        Ok((count("doorbells_of_processes") + count("doorbell_faults")) as f64)
    }

    fn pingpong(&self) -> Result<Cost> {
        let endpoints = self.0.endpoints(&self.0.link(LinkKind::Pvrdma)?);
        let before = self.exits()?;
        let said = pingpong(&endpoints, 1, "ibv_rc_pingpong", &format!("-n {ITERATIONS}"))?;
        let latency: f64 = said.split_whitespace().next().and_then(|word| word.parse().ok()).context(said)?;
        let exits = (self.exits()? - before) / f64::from(2 * ITERATIONS);
        Ok(Cost { rate: 2e6 / latency, exits, latency })
    }

    fn writes(&self) -> Result<Cost> {
        let before = self.exits()?;
        let program = format!("/run/guest-tests doorbells --device {PVRDMA_DEVICE} --writes {WRITES}");
        let said = self.0.a().run(&program)?;
        let writes: Writes = serde_json::from_str(said.trim()).with_context(|| said.clone())?;
        let exits = (self.exits()? - before) / f64::from(WRITES);
        Ok(Cost { rate: f64::from(WRITES) / writes.seconds, exits, latency: writes.median * 1e6 })
    }

    /// Returns the processor usage of the daemon in percent while a guest polls an empty completion queue without a
    /// pause.
    #[expect(clippy::cast_precision_loss, reason = "figures have three digits")]
    fn polls(&self) -> Result<f64> {
        let daemon = self.daemon()?;
        let program = format!("/run/guest-tests doorbells --device {PVRDMA_DEVICE} --poll-for {POLLS}");
        let poller = self.0.a().spawn(&program)?;
        poller.wait_for_output("polls", Duration::from_secs(60))?;
        let (start, before) = (Instant::now(), daemon.processor_ticks()?);
        std::thread::sleep(WATCH);
        let (ticks, passed) = (daemon.processor_ticks()? - before, start.elapsed());
        anyhow::ensure!(poller.is_running(), "it polled too shortly");
        poller.wait_success(Duration::from_secs(60))?;
        Ok(ticks as f64 * 100.0 / TICKS / passed.as_secs_f64())
    }
}
