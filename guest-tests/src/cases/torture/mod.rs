//! Torture test. Two guests exchange data, with every byte compared, beside attackers of all kinds: a process in one of
//! the guests, clients of two further devices that the same worker serves, and a peer on the wire. A seed decides their
//! actions; the machine decides their timing.

mod attackers;
mod victims;
mod wire;

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pvrdmad::testing::NO_LOAD;

use super::case::Case;
use super::exchange::finish;
use super::soak::{Base, Kept, number, tcp_stream};
use super::{doorbells, integrity, kernel_log};
use crate::image::GuestImage;
use crate::pair::{LinkKind, Pair, PairOptions};
use crate::vm::{Job, Vm};
use attackers::{Attackers, Deeds, PATIENCE};
use victims::Victim;
use wire::Wire;

/// Duration in seconds, unless the environment sets another one.
const LONG: u64 = 600;
/// Amount that the comparing programs exchange in a round, in each direction.
const MEBIBYTES: u32 = 192;
/// Rounds after which the daemon's caches are full: each guest has had the hostile process.
const WARM: u64 = 4;
/// File that tells the hostile process to end.
const CALM: &str = "/run/hostile/calm";

/// The one case.
pub(crate) fn cases() -> Vec<Case> {
    let what_to_do = "takes ten minutes, or SECONDS, from SEED on; runs when asked for: --only slow/torture";
    vec![Case::alone("slow/torture", torture).slow(what_to_do)]
}

fn torture(image: &GuestImage) -> Result<String> {
    let (first, seconds) = (number("SEED")?.unwrap_or(1), number("SECONDS")?.unwrap_or(LONG));
    let started = Instant::now();
    let wire = Wire::new()?;
    let options = PairOptions {
        rxe: false,
        doorbells: ["mapped", "trapped"],
        networks: vec![wire.network()],
        device_options: wire::DEVICE_OPTIONS.to_owned(),
        ..PairOptions::default()
    };
    let pair = doorbells::boot_with(image, &options)?;
    let attackers = Attackers::come(&pair, wire)?;
    let workers = workers(&pair)?;
    let (mut done, mut base) = (Done::default(), Base::default());
    for seed in first.. {
        if done.rounds > WARM && started.elapsed() >= Duration::from_secs(seconds) {
            break;
        }
        let mut turn = || {
            done.add(&round(&pair, &attackers, seed, done.rounds)?);
            ensure!(self::workers(&pair)? == workers, "a worker ended");
            Attackers::wait_gone(&pair)?;
            let kept = base.look(&pair, done.rounds >= WARM)?;
            log::info!("SEED={seed}; {done}; {kept}");
            anyhow::Ok(())
        };
        let outcome = turn();
        outcome.with_context(|| format!("SEED={seed}; {done}\n{}", pair.diagnosis()))?;
    }
    let (base, now) = (base.kept()?, Kept::now(&pair)?);
    Ok(format!("{} s from SEED={first} on: {done}; {base}, then {now}", started.elapsed().as_secs()))
}

/// Counts of all actions.
#[derive(Debug, Default)]
struct Done {
    rounds: u64,
    compared_mib: u64,
    /// Lives of the process in a guest.
    processes: u64,
    /// Lives of the process behind a socket.
    drivers: u64,
    /// Clients of either function.
    clients: u64,
    /// Frames of the peer.
    frames: u64,
}

impl Done {
    fn add(&mut self, more: &Self) {
        self.rounds += more.rounds;
        self.compared_mib += more.compared_mib;
        self.processes += more.processes;
        self.drivers += more.drivers;
        self.clients += more.clients;
        self.frames += more.frames;
    }
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rounds, compared_mib, processes, drivers, clients, frames } = self;
        write!(
            f,
            "{rounds} rounds, {compared_mib} MiB compared beside {processes} processes, {drivers} drivers, \
             {clients} clients and {frames} frames"
        )
    }
}

/// Runs traffic of all kinds from beginning to end, beside all attackers.
fn round(pair: &Pair, attackers: &Attackers, seed: u64, number: u64) -> Result<Done> {
    let link = pair.link(LinkKind::Pvrdma)?;
    let inside = usize::from(!number.is_multiple_of(2));
    let quiet = 1 - inside;
    let before = misdeeds(pair, quiet)?;
    let both_ways =
        [0, 1].map(|server| integrity::programs(pair, &link, server, MEBIBYTES, 2 * seed + server as u64 + 1).start());
    let both_ways = both_ways.into_iter().collect::<Result<Vec<_>>>()?;
    let victims = victims::find(pair, &link).with_context(|| {
        let said = both_ways.iter().flat_map(|(server, client)| [server.output(), client.output()]);
        format!("the programs said: {:?}", said.collect::<Vec<_>>())
    })?;
    let stream = tcp_stream(pair, &link).start()?;
    let process = start_process(&pair.vms()[inside], link.device, link.gid_index[inside], seed, &victims)?;
    let Deeds { clients, drivers, frames } = attackers.beside(seed, &victims, || -> Result<()> {
        for (server, client) in &both_ways {
            finish(server, client, PATIENCE)?;
        }
        finish(&stream.0, &stream.1, PATIENCE).map(drop)
    })?;
    let processes = end_process(&pair.vms()[inside], &process)?;
    kernel_log::check(&pair.vms()[quiet])?;
    let warnings = kernel_log::take_warnings(&pair.vms()[inside])?;
    let bad: Vec<_> = warnings.into_iter().filter(|line| !is_refusal(line)).collect();
    ensure!(bad.is_empty(), "kernel warnings beside the process:\n{}", bad.join("\n"));
    let after = misdeeds(pair, quiet)?;
    ensure!(before == after, "the guest that does nothing wrong had {before:?}, and has {after:?}");
    Ok(Done { rounds: 1, compared_mib: 2 * u64::from(MEBIBYTES), processes, drivers, clients, frames })
}

/// Returns `true` for warnings of the driver and the verbs about requests of a process, and for the kernel's message
/// about a process that died of an access to its own memory.
fn is_refusal(line: &str) -> bool {
    line.contains("hostile[") || (line.contains(":warn") && !kernel_log::is_fault(line))
}

/// Starts the process as an unprivileged user.
fn start_process(vm: &Vm, device: &str, gid_index: u32, seed: u64, victims: &[Victim]) -> Result<Job> {
    let victims: Vec<String> = victims.iter().map(Victim::to_string).collect();
    vm.run(&format!("mkdir -p /run/hostile && rm -f {CALM}"))?;
    vm.spawn(&format!(
        "exec setpriv --reuid=65534 --regid=65534 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all \
         hostile {device} {gid_index} {seed} {}",
        victims.join(" ")
    ))
}

/// Tells the process to end, and returns the number of its lives.
fn end_process(vm: &Vm, process: &Job) -> Result<u64> {
    vm.run(&format!("touch {CALM}"))?;
    let said = process.wait_success(PATIENCE)?;
    let lives = said.lines().find_map(|line| line.strip_prefix("lived ")?.split(' ').next()?.parse().ok());
    match lives {
        Some(lives @ 1..) => Ok(lives),
        _ => bail!("the process did nothing:\n{said}"),
    }
}

/// Returns the current processes of the daemon's networks.
fn workers(pair: &Pair) -> Result<Vec<(serde_json::Value, serde_json::Value)>> {
    let status = pair.daemon().context("no daemon")?.status()?;
    let networks = status["networks"].as_array().context("no networks")?;
    Ok(networks.iter().map(|network| (network["pid"].clone(), network["restarts"].clone())).collect())
}

/// Returns counters of a guest's device that show more than load.
fn misdeeds(pair: &Pair, guest: usize) -> Result<Vec<(&'static str, u64)>> {
    let status = pair.daemon().context("no daemon")?.status()?;
    let device = &status["devices"][guest];
    let count = |name: &'static str| {
        let value = device["counters"][name].as_u64().or_else(|| device["adapter"][name].as_u64());
        value.map(|value| (name, value)).with_context(|| format!("no counter {name}: {device}"))
    };
    NO_LOAD.into_iter().map(count).collect()
}
