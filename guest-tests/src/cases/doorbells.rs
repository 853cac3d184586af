//! Two guests with mapped doorbell pages (`doorbells=mapped`): the unmodified driver and library post, poll and arm
//! without a message to the daemon, as its counters show exactly.

use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::applications::libraries::RSOCKETS;
use super::case::{Case, skip};
use super::shared::{Machines, Shared};
use super::{connection, lifecycle, nvme, perftest, pingpong};
use crate::daemon::Daemon;
use crate::endpoints::Endpoints;
use crate::image::GuestImage;
use crate::pair::{LinkKind, PVRDMA_DEVICE, Pair, PairOptions};
use crate::vm::{Job, Vm};

/// The guests with mapped doorbell pages.
struct MappedPair(Pair);

impl Machines for MappedPair {
    fn vms(&self) -> [&Vm; 2] {
        self.0.vms().each_ref()
    }

    fn diagnosis(&self) -> String {
        self.0.diagnosis()
    }
}

/// Cases that run by default.
const ORDINARY: [&str; 2] = ["doorbells/rc_pingpong", "doorbells/rc_pingpong-events"];
const WHEN: &str = "takes a minute with the others; runs when asked for: --only doorbells/";

/// Returns the cases. The first of them boots the guests.
pub(crate) fn cases() -> Vec<Case> {
    let shared = Shared::new(boot);
    let mut cases = Vec::new();
    for (name, program, options) in [
        ("rc_pingpong", "ibv_rc_pingpong", "-c -n 500"),
        ("rc_pingpong-events", "ibv_rc_pingpong", "-c -e -n 500"),
        ("ud_pingpong", "ibv_ud_pingpong", "-s 1024 -n 500"),
        ("ud_pingpong-events", "ibv_ud_pingpong", "-e -s 1024 -n 500"),
        ("srq_pingpong", "ibv_srq_pingpong", "-n 100 -q 4"),
        ("srq_pingpong-events", "ibv_srq_pingpong", "-e -n 100 -q 4"),
    ] {
        cases.push(case(&shared, name, move |endpoints| pingpong::pingpong(endpoints, 1, program, options)));
    }
    for (name, program, options) in [
        ("write_bw", "ib_write_bw", "-n 200 -s 65536"),
        ("send_bw", "ib_send_bw", "-n 200 -s 65536"),
        ("send_bw-events", "ib_send_bw", "-e -n 200 -s 4096"),
        ("read_bw", "ib_read_bw", "-n 200 -s 65536"),
        ("atomic_bw", "ib_atomic_bw", "-n 200"),
        ("write_lat", "ib_write_lat", "-C -n 200 -s 8"),
        ("send_lat-events", "ib_send_lat", "-C -e -n 200 -s 8"),
        ("write_bw-200-qps", "ib_write_bw", "-q 200 -n 5 -s 64"),
    ] {
        cases.push(case(&shared, name, move |endpoints| perftest::table(endpoints, 1, program, options, 1)));
    }
    cases.push(case(&shared, "rping", |endpoints| connection::rping(endpoints, 1)));
    cases.push(case(&shared, "ucmatose", |endpoints| connection::address_pair(endpoints, 1, "ucmatose")));
    cases.push(case(&shared, "rstream", |endpoints| rstream(endpoints, "rstream")));
    cases.push(case(&shared, "librspreload", |endpoints| {
        rstream(endpoints, &format!("env {RSOCKETS} rstream -T s -T v"))
    }));
    cases.push(shared.case("doorbells/two-processes", two_processes));
    cases.push(shared.case("doorbells/polls-in-vain", polls_in_vain));
    cases.push(shared.case("doorbells/kernel", kernel));
    cases.push(shared.case("doorbells/idle", idle));
    cases.push(shared.last_case("doorbells/upgrade-20-times", upgrade));
    cases.into_iter().map(|case| case.slow_unless(&ORDINARY, WHEN)).collect()
}

/// Both devices export their pages, without knowledge of the guests.
fn boot(image: &GuestImage) -> Result<MappedPair> {
    let options = PairOptions { rxe: false, doorbells: ["mapped"; 2], ..PairOptions::default() };
    boot_with(image, &options).map(MappedPair)
}

/// Boots two guests, if such doorbells are possible.
pub(super) fn boot_with(image: &GuestImage, options: &PairOptions) -> Result<Pair> {
    match Pair::boot(image, options) {
        Err(error) if format!("{error:#}").contains("doorbells=mapped:") => Err(skip(format!("{error:#}"))),
        pair => pair,
    }
}

/// The network is handed over twenty times, and then the whole daemon, while programs post, poll and sleep without a
/// message.
fn upgrade(MappedPair(pair): &mut MappedPair) -> Result<String> {
    let link = pair.link(LinkKind::Pvrdma)?;
    let before = [Counts::of(pair, 0)?, Counts::of(pair, 1)?];
    let note = lifecycle::upgrade(pair, &link)?;
    for (guest, before) in before.iter().enumerate() {
        let now = Counts::of(pair, guest)?;
        let messages = now.messages.saturating_sub(before.messages);
        ensure!(messages == 0, "guest {guest}: {messages} doorbells were messages");
        ensure!(now.found > before.found, "guest {guest}: no ring was polled");
    }
    Ok(note)
}

/// Returns a case with a program that causes no doorbell message in either guest.
fn case(shared: &Rc<Shared<MappedPair>>, name: &str, run: impl Fn(&Endpoints<'_>) -> Result<String> + 'static) -> Case {
    shared.case(format!("doorbells/{name}"), move |MappedPair(pair)| {
        let link = pair.link(LinkKind::Pvrdma)?;
        let before = [Counts::of(pair, 0)?, Counts::of(pair, 1)?];
        let note = run(&pair.endpoints(&link))?;
        let mut notes = Vec::new();
        for (guest, before) in before.iter().enumerate() {
            let now = Counts::of(pair, guest)?;
            // Guest b is the server, and posts nothing in writes and reads.
            now.check_since(before, guest == 0).with_context(|| format!("guest {guest}"))?;
            notes.push(format!("{} faults, {} arms", now.faults - before.faults, now.arms - before.arms));
        }
        Ok(format!("{note}; {}", notes.join("; ")))
    })
}

/// Counters of a device.
#[derive(Debug)]
struct Counts {
    /// Doorbells of processes that arrived as messages.
    messages: u64,
    /// Processes whose pages are memory.
    contexts: u64,
    faults: u64,
    arms: u64,
    found: u64,
    failed: u64,
    naps: u64,
    sleeps: u64,
}

impl Counts {
    fn of(pair: &Pair, guest: usize) -> Result<Self> {
        let status = pair.daemon().context("no daemon")?.status()?;
        let count = |name: &str| {
            let value = status.pointer(&format!("/devices/{guest}/counters/{name}"));
            value.and_then(serde_json::Value::as_u64).with_context(|| format!("no {name} in {status}"))
        };
        Ok(Self {
            messages: count("doorbells_of_processes")?,
            contexts: count("doorbells_mapped")?,
            faults: count("doorbell_faults")?,
            arms: count("doorbell_arms")?,
            found: count("doorbells_found")?,
            failed: count("doorbell_arms_failed")?,
            naps: count("doorbell_naps")?,
            sleeps: count("doorbell_sleeps")?,
        })
    }

    /// Checks that since `before` no doorbell arrived as a message, and that there were no more faults than revoked
    /// pages and new processes.
    fn check_since(&self, before: &Self, posts: bool) -> Result<()> {
        ensure!(self.messages == 0, "doorbells came as messages: {self:?}, before {before:?}");
        if posts {
            ensure!(self.contexts > before.contexts, "no process has mapped its page: {self:?}, before {before:?}");
            ensure!(self.found > before.found, "nothing was found in rings: {self:?}, before {before:?}");
        }
        ensure!(self.faults <= self.arms + self.contexts, "more faults than there can be: {self:?}");
        ensure!(self.failed == 0, "pages could not be taken away: {self:?}");
        Ok(())
    }
}

/// Runs sockets over RDMA, which poll for a while and then sleep.
fn rstream(endpoints: &Endpoints<'_>, program: &str) -> Result<String> {
    let [a, b] = endpoints.vms;
    let server = b.spawn(&format!("{program} -b {} -S 4096 -C 200 -I 10", endpoints.ip[1]))?;
    b.wait_until(
        "ss -xtl >/dev/null 2>&1; rdma resource show cm_id 2>/dev/null | grep -q LISTEN",
        Duration::from_secs(60),
    )?;
    a.run(&format!("{program} -s {} -S 4096 -C 200 -I 10", endpoints.ip[1]))?;
    server.wait_success(endpoints.patience)?;
    Ok(String::new())
}

/// Kernel users of the device ring on the first page, which traps.
fn kernel(MappedPair(pair): &MappedPair) -> Result<String> {
    let link = pair.link(LinkKind::Pvrdma)?;
    let before = Counts::of(pair, 0)?;
    let note = nvme::between(pair.vms().each_ref(), link.ip[0], 16)?;
    let now = Counts::of(pair, 0)?;
    ensure!((now.messages, now.contexts) == (0, before.contexts), "{now:?}, before {before:?}");
    Ok(note)
}

/// Returns the state of the thread that polls the rings of a guest.
fn watcher(daemon: &Daemon, guest: usize) -> Result<String> {
    let status = daemon.status()?;
    let word = status.pointer(&format!("/devices/{guest}/doorbells/watcher")).and_then(serde_json::Value::as_str);
    word.map(str::to_owned).with_context(|| format!("no watcher in {status}"))
}

/// Starts a process of guest a that polls an empty queue, and waits until it does.
fn poller(pair: &Pair) -> Result<Job> {
    let job = pair.a().spawn(&format!("/run/guest-tests doorbells --device {PVRDMA_DEVICE} --poll-for 600"))?;
    job.wait_for_output("polls", Duration::from_secs(60))?;
    Ok(job)
}

/// The driver reuses the page of a process that has ended, here by a signal, for the next process.
fn two_processes(MappedPair(pair): &MappedPair) -> Result<String> {
    let daemon = pair.daemon().context("no daemon")?;
    let contexts = || -> Result<Vec<serde_json::Value>> {
        let shown = daemon.show("vm0", "context")?;
        shown.as_array().cloned().with_context(|| format!("no list: {shown}"))
    };
    let before = Counts::of(pair, 0)?;
    let mut pages = Vec::new();
    for _ in 0..2 {
        let process = poller(pair)?;
        // The process opens the device twice, and polls on one of the two pages.
        let shown = contexts()?;
        let mapped = shown.iter().find(|context| context["doorbells"] == "mapped");
        pages.push(mapped.with_context(|| format!("no process has a mapped page: {shown:?}"))?["uar_page"].clone());
        drop(process);
        while !contexts()?.is_empty() {}
    }
    ensure!(pages[0].is_u64() && pages[0] == pages[1], "each has a page of its own: {pages:?}");
    let now = Counts::of(pair, 0)?;
    ensure!((now.messages, now.contexts) == (0, before.contexts + 2), "{now:?}, before {before:?}");
    Ok(format!("page {}", pages[0]))
}

/// While a process only polls and posts nothing, the polling thread rests for 2 ms at a time, unless a page is touched
/// after it was revoked.
fn polls_in_vain(MappedPair(pair): &MappedPair) -> Result<String> {
    let daemon = pair.daemon().context("no daemon")?;
    let process = poller(pair)?;
    // From here on, the time that it uses must not increase.
    pair.a().run("sleep 1")?;
    while watcher(daemon, 0)? != "polled" {}
    let (start, before, ticks) = (Instant::now(), Counts::of(pair, 0)?, daemon.processor_ticks()?);
    // A fixed wait: the absence of an event cannot be awaited.
    pair.b().run("sleep 5")?;
    let (now, ticks) = (Counts::of(pair, 0)?, daemon.processor_ticks()? - ticks);
    let time = start.elapsed();
    ensure!(process.is_running(), "it ended");
    ensure!((now.messages, now.found) == (0, before.found), "{now:?}, before {before:?}");
    let (naps, arms) = (now.naps - before.naps, now.arms - before.arms);
    let most = u64::try_from(time.as_millis())? / 2 + 2 * (arms + now.faults - before.faults) + 10;
    ensure!(naps <= most, "{naps} rests in {time:?}, {arms} arms: more than {most}");
    Ok(format!("{naps} rests, {arms} arms and {} ms of a processor in {:.1} s", 10 * ticks, time.as_secs_f64()))
}

/// A process that has armed an event and waits costs nothing: the polling thread sleeps and is not woken.
fn idle(MappedPair(pair): &MappedPair) -> Result<String> {
    let link = pair.link(LinkKind::Pvrdma)?;
    let endpoints = pair.endpoints(&link);
    let _server = endpoints.vms[1].spawn(&format!("ibv_rc_pingpong -e -d {} -g 1", endpoints.device[1]))?;
    endpoints.vms[1].wait_until(&crate::endpoints::listens(18515), endpoints.patience)?;
    let daemon = pair.daemon().context("no daemon")?;
    while watcher(daemon, 1)? != "cold" {}
    let before = Counts::of(pair, 1)?;
    // A fixed wait: the absence of an event cannot be awaited.
    endpoints.vms[1].run("sleep 10")?;
    let now = Counts::of(pair, 1)?;
    ensure!((now.sleeps, now.faults) == (before.sleeps, before.faults), "{now:?}, before {before:?}");
    Ok(format!("{} sleeps in all", now.sleeps))
}
