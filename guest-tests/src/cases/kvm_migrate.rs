//! A VM of `pvrdma-vmm` that moves from one process to another while its programs run.

use anyhow::{Context, Result, ensure};

use super::case::Case;
use super::kernel_log;
use super::kvm_saved::{ADDRESS, COUNT, MAC, MEMORY, Machine, PATIENT, on_hosts};
use crate::endpoints::{Endpoints, listens};
use crate::kvm_bed::{KvmBeds, MOVING_GUEST};
use crate::vm::{Job, Vm};

/// Sockets of the destinations, on the host.
const THERE: &str = "/run/there.sock";
const BACK: &str = "/run/back.sock";
/// Ping-pong rounds of a connection inside the guest, which has to outlast a move.
const ROUNDS: u32 = 20_000;

const WHEN: &str = "takes minutes; runs when asked for: --only kvm/migrate";

/// Returns the case `kvm/migrate`.
pub(crate) fn cases(beds: &KvmBeds) -> Vec<Case> {
    let beds = beds.clone();
    let options = format!("--migrate {THERE}");
    let run = move |image: &_| {
        let boot = || Machine::boot(image, &beds, MOVING_GUEST, &options, |_| Ok(()));
        on_hosts(boot, migrate)
    };
    vec![Case::alone("kvm/migrate", run).slow(WHEN)]
}

/// A guest moves to another process, and on to a third one. Its programs, its clock and a connection inside of it
/// continue. A destination that does not fit is refused before.
fn migrate(machine: &Machine) -> Result<String> {
    let Machine { vm, vmm, .. } = machine;
    machine.exchange().context("before the migration")?;
    let _counting = vm.spawn(COUNT)?;
    vm.wait_until("[ -s /run/count ]", PATIENT)?;
    refused(machine).context("another machine")?;

    let connected = Connected::start(&machine.endpoints()?)?;
    let (first, there) = moved(machine, vmm, THERE, &format!("--incoming {THERE} --migrate {BACK}"))?;
    let (second, _back) = moved(machine, &there, BACK, &format!("--incoming {BACK}")).context("second move")?;
    let speed = connected.finish().context("a connection that was open during both moves")?;
    machine.exchange().context("after the migration")?;
    kernel_log::check(vm)?;
    kernel_log::check(machine.bed.vm())?;
    Ok(format!("{first}; {second}; a connection that was open: {speed}"))
}

/// A destination with less memory refuses the machine, which stays.
fn refused(machine: &Machine) -> Result<()> {
    let destination = listen(machine, THERE, &format!("--incoming {THERE}"), "256M")?;
    request(machine.bed.vm())?;
    let refused = destination.wait(PATIENT)?;
    let named = refused.text.contains("the state has memory ");
    ensure!(refused.code == 1 && named, "exit code {}\n{}", refused.code, refused.text);
    machine.vmm.wait_for_output("the destination refuses: the state has memory ", PATIENT)?;
    machine.continues(machine.progress()?).map(drop)
}

/// Moves the guest from `source`, the only VMM that runs, to one with these options. Returns the new one.
fn moved(machine: &Machine, source: &Job, socket: &str, options: &str) -> Result<(String, Job)> {
    let destination = listen(machine, socket, options, MEMORY)?;
    let before = machine.progress()?;
    request(machine.bed.vm())?;
    let said = source.wait_success(PATIENT).context("migration")?;
    let rounds = said.lines().filter(|line| line.contains(": round ")).collect::<Vec<_>>();
    ensure!(said.contains(&format!("{MOVING_GUEST}: moved")) && rounds.len() >= 2, "the VMM said:\n{said}");
    let sent = rounds.last().and_then(|line| line.rsplit(", ").next()).unwrap_or_default();
    let counted = machine.continues(before).with_context(|| format!("after the move\n{}", destination.output()))?;
    Ok((format!("{} rounds, {sent}, {counted}", rounds.len()), destination))
}

/// Starts a destination, and waits until it listens.
fn listen(machine: &Machine, socket: &str, options: &str, memory: &str) -> Result<Job> {
    let destination = machine.start(options, MAC, memory)?;
    let mode = format!("[ \"$(stat -c %a {socket})\" = 600 ]");
    machine.bed.vm().wait_until(&mode, PATIENT).with_context(|| destination.output())?;
    destination.wait_for_output("waits for a source", PATIENT)?;
    Ok(destination)
}

/// Requests the migration from the VMM that has run for the longest time.
fn request(host: &Vm) -> Result<()> {
    host.run("kill -USR1 $(pgrep -o -x pvrdma-vmm)").map(drop)
}

/// Two ends of a connection inside the guest, which exchange messages.
struct Connected {
    server: Job,
    client: Job,
}

impl Connected {
    fn start(endpoints: &Endpoints<'_>) -> Result<Self> {
        let [vm, _] = endpoints.vms;
        let program =
            format!("ibv_rc_pingpong -d {} -g {} -e -s 64 -n {ROUNDS}", endpoints.device[0], endpoints.gid_index[0]);
        let server = vm.spawn(&program)?;
        vm.wait_until(&listens(18515), PATIENT)?;
        Ok(Self { server, client: vm.spawn(&format!("{program} {ADDRESS}"))? })
    }

    /// Waits for the end of both, which must not have been reached yet.
    fn finish(self) -> Result<String> {
        ensure!(self.client.is_running(), "it has ended already:\n{}", self.client.output());
        let said = self.client.wait_success(PATIENT)?;
        self.server.wait_success(PATIENT)?;
        let line = said.lines().rfind(|line| line.contains("usec/iter")).context("no result")?;
        Ok(line.rsplit('=').next().unwrap_or(line).trim().to_owned())
    }
}
