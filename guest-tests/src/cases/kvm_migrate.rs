//! A VM of `pvrdma-vmm` that moves from one process to another while its programs run. The uplinks of both processes
//! lead to a bridge of the host, whose `rdma_rxe` is a peer.

use std::net::Ipv4Addr;

use anyhow::{Context, Result, ensure};

use super::case::Case;
use super::exchange::{Programs, Ready};
use super::kernel_log;
use super::kvm_saved::{ADDRESS, COUNT, MAC, MEMORY, Machine, PATIENT, on_hosts};
use crate::kvm_bed::{KvmBed, KvmBeds, MOVING_GUEST};
use crate::vm::{Job, Vm};

/// Sockets of the destinations, on the host.
const THERE: &str = "/run/there.sock";
const BACK: &str = "/run/back.sock";
/// Address of the host on the bridge.
const HOST: Ipv4Addr = Ipv4Addr::new(192, 168, 84, 2);

const WHEN: &str = "takes minutes; runs when asked for: --only kvm/migrate";

/// Returns the case `kvm/migrate`.
pub(crate) fn cases(beds: &KvmBeds) -> Vec<Case> {
    let beds = beds.clone();
    let run = move |image: &_| {
        let options = format!("{} --migrate {THERE}", uplink(1));
        on_hosts(|| Machine::boot(image, &beds, MOVING_GUEST, &options, bridge), migrate)
    };
    vec![Case::alone("kvm/migrate", run).slow(WHEN)]
}

/// Sets up a bridge with two interfaces for uplinks, and `rdma_rxe` on it.
fn bridge(bed: &KvmBed) -> Result<()> {
    bed.vm()
        .run(&format!(
            "[ -e /sys/class/net/br0 ] && exit
             modprobe -a bridge veth af_packet ib_uverbs rdma_ucm rdma_rxe && ip link add br0 type bridge || exit
             for number in 1 2; do
                 ip link add veth$number type veth peer name port$number || exit
                 ip link set port$number master br0 up && ip link set veth$number up || exit
             done
             ip addr add {HOST}/24 dev br0 && ip link set br0 up && rdma link add rxe0 type rxe netdev br0"
        ))
        .map(drop)
}

fn uplink(number: u8) -> String {
    format!("--uplink af_packet:veth{number}")
}

/// A guest moves to another process, and back to the first interface. Its programs, its clock, and its connections to
/// the host and inside the guest continue. Before, a migration is cancelled, and a destination that does not fit
/// refuses the guest.
fn migrate(machine: &Machine) -> Result<String> {
    let Machine { vm, vmm, bed, .. } = machine;
    machine.exchange().context("before the migration")?;
    let _counting = vm.spawn(COUNT)?;
    vm.wait_until("[ -s /run/count ]", PATIENT)?;
    cancelled(machine).context("a migration that is cancelled")?;
    refused(machine).context("another machine")?;

    let pings = [Pings::start("inside", vm, vm, ADDRESS)?, Pings::start("host", bed.vm(), vm, HOST)?];
    let options = format!("{} --incoming {THERE} --migrate {BACK}", uplink(2));
    let (first, there) = moved(machine, vmm, &pings, THERE, &options)?;
    let options = format!("{} --incoming {BACK}", uplink(1));
    let (second, _back) = moved(machine, &there, &pings, BACK, &options).context("second move")?;
    let counts = pings.iter().map(Pings::count).collect::<Result<Vec<_>>>()?;
    pings.iter().try_for_each(Pings::end)?;
    machine.exchange().context("after the migration")?;
    kernel_log::check(vm)?;
    kernel_log::check(bed.vm())?;
    Ok(format!("{first}; {second}; messages to itself and to the host: {counts:?}"))
}

/// A destination with less memory refuses the machine, which stays.
fn refused(machine: &Machine) -> Result<()> {
    let destination = listen(machine, THERE, &format!("{} --incoming {THERE}", uplink(2)), "256M")?;
    request(machine.bed.vm())?;
    let refused = destination.wait(PATIENT)?;
    let named = refused.text.contains("the state has memory ");
    ensure!(refused.code == 1 && named, "exit code {}\n{}", refused.code, refused.text);
    machine.vmm.wait_for_output("the destination refuses: the state has memory ", PATIENT)?;
    machine.continues(machine.progress()?).map(drop)
}

/// A migration whose destination does not answer is cancelled. The machine stays.
fn cancelled(machine: &Machine) -> Result<()> {
    let host = machine.bed.vm();
    let destination = listen(machine, THERE, &format!("{} --incoming {THERE}", uplink(2)), MEMORY)?;
    host.run("kill -STOP $(pgrep -n -x pvrdma-vmm)")?;
    request(host)?;
    machine.vmm.wait_for_output("migrates to ", PATIENT)?;
    host.run("kill -USR2 $(pgrep -o -x pvrdma-vmm) && kill -CONT $(pgrep -n -x pvrdma-vmm)")?;
    machine.vmm.wait_for_output("cancelled; the machine goes on", PATIENT)?;
    let ended = destination.wait(PATIENT)?;
    ensure!(ended.code == 1 && ended.text.contains("nothing runs here"), "{}: {}", ended.code, ended.text);
    machine.continues(machine.progress()?).map(drop)
}

/// Moves the guest from `source` to a VMM with these options. Returns a note, and the new VMM.
fn moved(machine: &Machine, source: &Job, pings: &[Pings<'_>], socket: &str, options: &str) -> Result<(String, Job)> {
    let destination = listen(machine, socket, options, MEMORY)?;
    let before = machine.progress()?;
    request(machine.bed.vm())?;
    let said = source.wait_success(PATIENT).context("migration")?;
    let rounds = said.lines().filter(|line| line.contains(": round ")).collect::<Vec<_>>();
    ensure!(said.contains(&format!("{MOVING_GUEST}: moved")) && rounds.len() >= 2, "the VMM said:\n{said}");
    let continued = || {
        let counted = machine.continues(before)?;
        pings.iter().try_for_each(Pings::continue_).map(|()| counted)
    };
    let counted = continued().with_context(|| format!("after the move\n{}", destination.output()))?;
    let sent = rounds.last().and_then(|line| line.rsplit(", ").next()).unwrap_or_default();
    Ok((format!("{} rounds, {sent}, {counted}", rounds.len()), destination))
}

/// Starts a destination, and waits until it listens.
fn listen(machine: &Machine, socket: &str, options: &str, memory: &str) -> Result<Job> {
    let destination = machine.start(options, MAC, memory)?;
    destination.wait_for_output("waits for a source", PATIENT)?;
    let mode = machine.bed.vm().run(&format!("stat -c %a {socket}")).with_context(|| destination.output())?;
    ensure!(mode.trim() == "600", "the mode of the socket is {mode}");
    Ok(destination)
}

/// Requests the migration from the VMM that has run for the longest time.
fn request(host: &Vm) -> Result<()> {
    host.run("kill -USR1 $(pgrep -o -x pvrdma-vmm)").map(drop)
}

/// A connection of the guest on which messages go there and back, and are compared.
struct Pings<'a> {
    guest: &'a Vm,
    /// File with a line for each message.
    file: String,
    server: Job,
    client: Job,
}

impl<'a> Pings<'a> {
    /// Connects a client in the guest to a server at this address.
    fn start(name: &str, server_vm: &'a Vm, guest: &'a Vm, address: Ipv4Addr) -> Result<Self> {
        let file = format!("/run/pings-{name}");
        guest.run(&format!(": > {file}"))?;
        let programs = Programs {
            server_vm,
            server: format!("rping -s -V -S 64 -a {address}"),
            ready: Ready::ConnectionManager,
            client_vm: guest,
            client: format!("stdbuf -oL rping -c -V -v -S 64 -a {address} > {file}"),
            timeout: PATIENT,
        };
        let (server, client) = programs.start()?;
        let pings = Self { guest, file, server, client };
        pings.continue_().with_context(|| format!("before the migration: {name}"))?;
        Ok(pings)
    }

    fn count(&self) -> Result<u64> {
        self.guest.run(&format!("wc -l < {}", self.file))?.trim().parse().context("lines of a file")
    }

    /// Checks that messages arrive.
    fn continue_(&self) -> Result<()> {
        let more = format!("[ $(wc -l < {}) -gt {} ]", self.file, self.count()?.saturating_add(5));
        let context = || format!("{}\n{}", self.client.output(), self.server.output());
        self.guest.wait_until(&more, PATIENT).with_context(context)
    }

    /// Ends both programs, which must not have ended.
    fn end(&self) -> Result<()> {
        for job in [&self.client, &self.server] {
            ensure!(job.is_running(), "it has ended: {}\n{}", job.title(), job.output());
        }
        self.client.kill()?;
        self.server.kill()
    }
}
