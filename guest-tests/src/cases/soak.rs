//! Long-running test of everything at once. Traffic of all kinds, with every byte compared, runs while other programs
//! are killed. After each round of traffic, a driver is reloaded, a guest reboots, or a machine is killed during
//! traffic.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::case::Case;
use super::exchange::{Programs, Ready, finish};
use super::lifecycle::{SLACK_KIB, WRITES_PORT, memory, open_things, reload, writes, written};
use super::{integrity, nvme};
use crate::endpoints::is_connected;
use crate::image::GuestImage;
use crate::pair::{Link, LinkKind, Pair, PairOptions};
use crate::vm::Vm;

/// Duration in seconds, unless the environment sets another one.
const LONG: u64 = 1800;
/// Amount that the comparing programs exchange in a round, and that is written to the disk.
const MEBIBYTES: u32 = 64;
const DISK_MEBIBYTES: u32 = 8;
/// Rounds after which the daemon's caches are full: each event has happened once.
const WARM: u64 = 3;
/// Run time of a writer that is killed earlier.
const ENDLESS: Duration = Duration::from_secs(1200);
/// Time limit of each step. Guests are emulated, and everything happens at once.
const PATIENCE: Duration = Duration::from_secs(300);

/// The one case.
pub(crate) fn cases() -> Vec<Case> {
    vec![Case::alone("slow/soak", soak).slow("takes half an hour, or SECONDS; runs when asked for: --only slow/soak")]
}

fn soak(image: &GuestImage) -> Result<String> {
    let seconds = number("SECONDS")?.unwrap_or(LONG);
    let started = Instant::now();
    let mut pair = Pair::boot(image, &PairOptions { rxe: false, ..PairOptions::default() })?;
    let mut done = Done::default();
    let mut base = Base::default();
    while done.rounds <= WARM || started.elapsed() < Duration::from_secs(seconds) {
        round(&mut pair, &mut done).with_context(|| format!("{done}\n{}", pair.diagnosis()))?;
        let kept = base.look(&pair, done.rounds >= WARM)?;
        log::info!("{done}; {kept}");
    }
    let (base, now) = (base.kept()?, Kept::now(&pair)?);
    Ok(format!("{} s: {done}; {base}, then {now}", started.elapsed().as_secs()))
}

/// Returns a number from the environment.
pub(super) fn number(name: &str) -> Result<Option<u64>> {
    let value = std::env::var(name).ok();
    value.map(|value| value.parse().with_context(|| format!("{name}={value} is no number"))).transpose()
}

/// Counts of all actions.
#[derive(Debug, Default)]
struct Done {
    rounds: u64,
    compared_mib: u64,
    programs_killed: u64,
    reloads: u64,
    reboots: u64,
    machines_killed: u64,
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rounds, compared_mib, programs_killed, reloads, reboots, machines_killed } = self;
        write!(
            f,
            "{rounds} rounds, {compared_mib} MiB compared, {programs_killed} programs killed, {reloads} reloads, \
             {reboots} reboots, {machines_killed} machines killed"
        )
    }
}

/// Resources that the daemon holds.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    kib: u64,
    descriptors: usize,
    mappings: usize,
}

impl Kept {
    /// Returns the current values.
    pub(super) fn now(pair: &Pair) -> Result<Self> {
        let (descriptors, mappings) = open_things(pair)?;
        Ok(Self { kib: memory(pair)?, descriptors, mappings })
    }

    fn is_more_than(&self, base: &Self) -> bool {
        self.kib > base.kib + SLACK_KIB || self.descriptors > base.descriptors || self.mappings > base.mappings
    }
}

/// Minimum of the daemon's resources, once each event has happened.
#[derive(Debug, Default)]
pub(super) struct Base(Option<Kept>);

impl Base {
    /// Returns the current resources; fails if they stay above the recorded ones. `warm`: the values are recorded.
    pub(super) fn look(&mut self, pair: &Pair, warm: bool) -> Result<Kept> {
        let mut kept = Kept::now(pair)?;
        let Some(base) = &mut self.0 else {
            self.0 = warm.then(|| kept.clone());
            return Ok(kept);
        };
        // Clean-up after a client is not part of any answer, so it may take a moment.
        let deadline = Instant::now() + Duration::from_secs(20);
        while kept.is_more_than(base) {
            if Instant::now() > deadline {
                bail!("the daemon had {base}, and has {kept}");
            }
            std::thread::sleep(Duration::from_millis(200));
            kept = Kept::now(pair)?;
        }
        // The status request may still have had a descriptor open, so the lower count is the right one.
        base.descriptors = base.descriptors.min(kept.descriptors);
        base.mappings = base.mappings.min(kept.mappings);
        Ok(kept)
    }

    /// Returns the recorded values; fails if there are none.
    pub(super) fn kept(self) -> Result<Kept> {
        self.0.context("no round was measured")
    }
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kib, descriptors, mappings } = self;
        write!(f, "{kib} KiB, {descriptors} descriptors, {mappings} mappings")
    }
}

/// Runs all traffic at once while other programs are killed, and then one action that interrupts everything.
fn round(pair: &mut Pair, done: &mut Done) -> Result<()> {
    traffic(pair, done)?;
    interrupt(pair, done)?;
    done.rounds += 1;
    Ok(())
}

/// Killed programs disturb no other: all data arrives intact.
fn traffic(pair: &Pair, done: &mut Done) -> Result<()> {
    let link = pair.link(LinkKind::Pvrdma)?;
    let both_ways = [0, 1].map(|server| {
        let seed = 2 * done.rounds + server as u64 + 1;
        integrity::programs(pair, &link, server, MEBIBYTES, seed).start()
    });
    let stream = tcp_stream(pair, &link).start()?;
    kill_a_program(pair, &link, done)?;
    nvme::between([pair.a(), pair.b()], link.ip[0], DISK_MEBIBYTES).context("NVMe")?;
    kill_a_program(pair, &link, done)?;
    for running in both_ways {
        let (server, client) = running?;
        finish(&server, &client, PATIENCE)?;
        done.compared_mib += u64::from(MEBIBYTES);
    }
    finish(&stream.0, &stream.1, PATIENCE)?;
    done.compared_mib += u64::from(DISK_MEBIBYTES);
    Ok(())
}

/// One TCP stream of 32 MiB over the vNICs.
pub(super) fn tcp_stream<'a>(pair: &'a Pair, link: &Link) -> Programs<'a> {
    Programs {
        server_vm: pair.b(),
        server: "iperf3 -s -1 -p 5201".to_owned(),
        ready: Ready::Tcp(5201),
        client_vm: pair.a(),
        client: format!("iperf3 -c {} -p 5201 -n 32M", link.ip[1]),
        timeout: PATIENCE,
    }
}

/// Kills a writing program during its run; the program at the other end notices.
fn kill_a_program(pair: &Pair, link: &Link, done: &mut Done) -> Result<()> {
    let start = written(pair)?;
    let programs = Programs { timeout: PATIENCE, ..writes(pair, link, 1, ENDLESS) };
    let (server, client) = programs.start()?;
    // Other programs write as well, so the byte counter is no criterion. A program without a connection would wait for
    // the killed one forever.
    programs.server_vm.wait_until(&is_connected(WRITES_PORT), PATIENCE)?;
    wait_written(pair, start + (done.programs_killed + 1) * 654_321)?;
    let [dies, notices] = if done.programs_killed.is_multiple_of(2) { [&client, &server] } else { [&server, &client] };
    dies.kill()?;
    if notices.wait(PATIENCE)?.code == 0 {
        bail!("{}: the other end was killed, and it succeeded", notices.title());
    }
    done.programs_killed += 1;
    Ok(())
}

/// Waits until RDMA writes of the guests have moved `bytes` bytes.
fn wait_written(pair: &Pair, bytes: u64) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while written(pair)? < bytes {
        if Instant::now() > deadline {
            bail!("{} bytes were written, and not {bytes}", written(pair)?);
        }
    }
    Ok(())
}

/// Ends a driver, a guest or a machine during traffic; the other guest notices.
fn interrupt(pair: &mut Pair, done: &mut Done) -> Result<()> {
    let victim = usize::from(!done.rounds.is_multiple_of(2));
    let link = pair.link(LinkKind::Pvrdma)?;
    let start = written(pair)?;
    let survivor = {
        // The writer learns from its own requests that the peer does not answer.
        let programs = Programs { timeout: PATIENCE, ..writes(pair, &link, victim, ENDLESS) };
        let (_server, client) = programs.start()?;
        // Waits for some bytes in any case: a program without a connection would wait for the killed one forever.
        wait_written(pair, start + (done.rounds % 16 + 1) * 543_210)?;
        let victim: &Vm = &pair.vms()[victim];
        match done.rounds % 3 {
            0 => victim.kill_jobs()?,
            1 => victim.reboot()?,
            _ => victim.kill(),
        }
        client
    };
    if survivor.wait(PATIENCE).context("the other guest did not notice")?.code == 0 {
        bail!("{}: its peer was gone, and it succeeded", survivor.title());
    }
    drop(survivor);
    match done.rounds % 3 {
        0 => {
            reload(pair, victim)?;
            done.reloads += 1;
        }
        1 => {
            pair.set_up(victim)?;
            done.reboots += 1;
        }
        _ => {
            pair.restart(victim)?;
            done.machines_killed += 1;
        }
    }
    Ok(())
}
