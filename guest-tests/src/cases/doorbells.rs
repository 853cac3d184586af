//! Two guests whose doorbell pages are memory (`doorbells=mapped`): the unmodified driver and library post, poll and
//! arm without a message to the daemon, which its counters show exactly.

use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::case::{Case, skip};
use super::shared::{Machines, Shared};
use super::{connection, nvme, perftest, pingpong};
use crate::endpoints::Endpoints;
use crate::image::GuestImage;
use crate::pair::{LinkKind, Pair, PairOptions};
use crate::vm::Vm;

/// The guests, and how programs in them name each other's devices.
struct MappedPair(Pair);

impl Machines for MappedPair {
    fn vms(&self) -> [&Vm; 2] {
        self.0.vms().each_ref()
    }

    fn diagnosis(&self) -> String {
        self.0.diagnosis()
    }
}

/// What runs unasked.
const ORDINARY: [&str; 2] = ["doorbells/rc_pingpong", "doorbells/rc_pingpong-events"];
const WHEN: &str = "takes a minute with the others; runs when asked for: --only doorbells/";

/// The guests boot for the first of them.
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
    cases.push(case(&shared, "rstream", rstream));
    cases.push(shared.case("doorbells/kernel", kernel));
    cases.push(shared.case("doorbells/idle", idle));
    cases.into_iter().map(|case| case.slow_unless(&ORDINARY, WHEN)).collect()
}

/// Both devices lend their pages, to guests that know nothing of it.
fn boot(image: &GuestImage) -> Result<MappedPair> {
    let options = PairOptions { rxe: false, doorbells: ["mapped"; 2], ..PairOptions::default() };
    match Pair::boot(image, &options) {
        Err(error) if format!("{error:#}").contains("doorbells=mapped:") => Err(skip(format!("{error:#}"))),
        pair => pair.map(MappedPair),
    }
}

/// A program that rings no doorbell that is a message, in neither guest.
fn case(shared: &Rc<Shared<MappedPair>>, name: &str, run: impl Fn(&Endpoints<'_>) -> Result<String> + 'static) -> Case {
    shared.case(format!("doorbells/{name}"), move |MappedPair(pair)| {
        let link = pair.link(LinkKind::Pvrdma)?;
        let before = [Counts::of(pair, 0)?, Counts::of(pair, 1)?];
        let note = run(&pair.endpoints(&link))?;
        let mut notes = Vec::new();
        for (guest, before) in before.iter().enumerate() {
            let now = Counts::of(pair, guest)?;
            // Guest b serves, and posts nothing where it is written to and read from.
            now.check_since(before, guest == 0).with_context(|| format!("guest {guest}"))?;
            notes.push(format!("{} faults, {} arms", now.faults - before.faults, now.arms - before.arms));
        }
        Ok(format!("{note}; {}", notes.join("; ")))
    })
}

/// What a device has counted.
#[derive(Debug)]
struct Counts {
    /// Doorbells of processes that came as messages.
    messages: u64,
    /// Processes whose pages are memory.
    contexts: u64,
    faults: u64,
    arms: u64,
    found: u64,
    failed: u64,
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
            sleeps: count("doorbell_sleeps")?,
        })
    }

    /// Nothing came as a message, and no more faults than pages taken away and processes that began, since the start.
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

/// Sockets over RDMA, which poll for a while and sleep then.
fn rstream(endpoints: &Endpoints<'_>) -> Result<String> {
    let [a, b] = endpoints.vms;
    let server = b.spawn(&format!("rstream -b {} -S 4096 -C 200 -I 10", endpoints.ip[1]))?;
    b.wait_until(
        "ss -xtl >/dev/null 2>&1; rdma resource show cm_id 2>/dev/null | grep -q LISTEN",
        Duration::from_secs(60),
    )?;
    a.run(&format!("rstream -s {} -S 4096 -C 200 -I 10", endpoints.ip[1]))?;
    server.wait_success(endpoints.patience)?;
    Ok(String::new())
}

/// Who uses the device from the kernel rings on the first page, which traps.
fn kernel(MappedPair(pair): &MappedPair) -> Result<String> {
    let link = pair.link(LinkKind::Pvrdma)?;
    let before = Counts::of(pair, 0)?;
    let note = nvme::between(pair.vms().each_ref(), link.ip[0], 16)?;
    let now = Counts::of(pair, 0)?;
    ensure!((now.messages, now.contexts) == (0, before.contexts), "{now:?}, before {before:?}");
    Ok(note)
}

/// A process that has asked for an event and waits costs nothing: who looks at rings sleeps, and is not woken.
fn idle(MappedPair(pair): &MappedPair) -> Result<String> {
    let link = pair.link(LinkKind::Pvrdma)?;
    let endpoints = pair.endpoints(&link);
    let _server = endpoints.vms[1].spawn(&format!("ibv_rc_pingpong -e -d {} -g 1", endpoints.device[1]))?;
    endpoints.vms[1].wait_until(&crate::endpoints::listens(18515), endpoints.patience)?;
    let daemon = pair.daemon().context("no daemon")?;
    let asleep = || -> Result<bool> {
        let status = daemon.status()?;
        Ok(status.pointer("/devices/1/doorbells/watcher").is_some_and(|word| word == "cold"))
    };
    while !asleep()? {}
    let before = Counts::of(pair, 1)?;
    // Time that only passes: what must not happen cannot be waited for.
    endpoints.vms[1].run("sleep 10")?;
    let now = Counts::of(pair, 1)?;
    ensure!((now.sleeps, now.faults) == (before.sleeps, before.faults), "{now:?}, before {before:?}");
    Ok(format!("{} sleeps in all", now.sleeps))
}
