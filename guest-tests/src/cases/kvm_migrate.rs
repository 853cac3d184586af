//! A VM of `pvrdma-vmm` that moves from one process to another while its programs run. The uplinks of both processes
//! lead to a bridge of the host, whose `rdma_rxe` is a peer.

use std::net::Ipv4Addr;

use anyhow::{Context, Result, ensure};

use super::case::Case;
use super::kernel_log;
use super::kvm_saved::{ADDRESS, COUNT, MAC, MEMORY, Machine, PATIENT, on_hosts};
use crate::kvm_bed::{KvmBed, KvmBeds, MOVING_GUEST};
use crate::vm::{Job, Vm};

/// Sockets of destinations on the host, and the numbers of their uplinks.
const THERE: (&str, u8) = ("/run/there.sock", 2);
const BACK: (&str, u8) = ("/run/back.sock", 1);
/// Address of the host on the bridge.
const HOST: Ipv4Addr = Ipv4Addr::new(192, 168, 84, 2);

const WHEN: &str = "takes minutes; runs when asked for: --only kvm/migrate";

/// Returns the case `kvm/migrate`.
pub(crate) fn cases(beds: &KvmBeds) -> Vec<Case> {
    let beds = beds.clone();
    let run = move |image: &_| {
        let options = format!("--uplink af_packet:veth1 --migrate {}", THERE.0);
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

/// Returns the options of a destination on this socket.
fn incoming((socket, uplink): (&str, u8)) -> String {
    format!("--uplink af_packet:veth{uplink} --incoming {socket}")
}

/// A guest moves to another process, back to the first interface, and there again. Its programs, its clock, and its
/// connections to itself and to the host continue. Before, a migration is cancelled, and a destination that does not
/// fit refuses the guest.
fn migrate(machine: &Machine) -> Result<String> {
    let Machine { vm, vmm, bed, .. } = machine;
    machine.exchange().context("before the migration")?;
    let _counting = vm.spawn(COUNT)?;
    vm.wait_until("[ -s /run/count ]", PATIENT)?;
    cancelled(machine).context("a migration that is cancelled")?;
    refused(machine).context("another machine")?;

    let (guest, host) = ((vm, ADDRESS), (bed.vm(), HOST));
    let pings = [(guest, guest), (guest, host), (host, guest)].into_iter().zip(7174..);
    let pings = pings.map(|((from, to), port)| Pings::start(from.0, to, port)).collect::<Result<Vec<_>>>()?;
    let (first, there) = moved(machine, vmm, &pings, THERE, Some(BACK))?;
    let (second, back) = moved(machine, &there, &pings, BACK, Some(THERE)).context("second move")?;
    let (third, _there) = moved(machine, &back, &pings, THERE, None).context("third move")?;
    let counts = pings.iter().map(Pings::count).collect::<Result<Vec<_>>>()?;
    pings.iter().try_for_each(Pings::end)?;
    machine.exchange().context("after the migration")?;
    kernel_log::check(vm)?;
    kernel_log::check(bed.vm())?;
    Ok(format!("{first}; {second}; {third}; messages to itself, to the host, and from the host: {counts:?}"))
}

/// A destination with less memory refuses the machine, which stays.
fn refused(machine: &Machine) -> Result<()> {
    let destination = listen(machine, THERE, None, "256M")?;
    request(machine.bed.vm())?;
    let refused = destination.wait(PATIENT)?;
    let named = refused.text.contains("the state has memory ");
    ensure!(refused.code == 1 && named, "exit code {}\n{}", refused.code, refused.text);
    machine.vmm.wait_for_output("the destination refuses: the state has memory ", PATIENT)?;
    machine.continues(machine.progress()?).map(drop)
}

/// A migration whose destination does not answer is cancelled. The machine stays. The destination, which could move the
/// machine on, has got the request for that before the machine came.
fn cancelled(machine: &Machine) -> Result<()> {
    let host = machine.bed.vm();
    let destination = listen(machine, THERE, Some(BACK), MEMORY)?;
    host.run("kill -USR1 $(pgrep -n -x pvrdma-vmm) && kill -STOP $(pgrep -n -x pvrdma-vmm)")?;
    request(host)?;
    machine.vmm.wait_for_output("migrates to ", PATIENT)?;
    host.run("kill -USR2 $(pgrep -o -x pvrdma-vmm) && kill -CONT $(pgrep -n -x pvrdma-vmm)")?;
    machine.vmm.wait_for_output("cancelled; the machine goes on", PATIENT)?;
    let ended = destination.wait(PATIENT)?;
    ensure!(ended.code == 1 && ended.text.contains("nothing runs here"), "{}: {}", ended.code, ended.text);
    machine.continues(machine.progress()?).map(drop)
}

/// Moves the guest from `source` to a new VMM, which can move it on. Returns a note, and the new VMM.
fn moved(
    machine: &Machine,
    source: &Job,
    pings: &[Pings<'_>],
    to: (&str, u8),
    next: Option<(&str, u8)>,
) -> Result<(String, Job)> {
    let destination = listen(machine, to, next, MEMORY)?;
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
    let stood_still = said.lines().find(|line| line.contains("stood still")).context("no time in the output")?;
    Ok((format!("{} rounds, {stood_still}, {counted}", rounds.len()), destination))
}

/// Starts a destination, and waits until it listens.
fn listen(machine: &Machine, to: (&str, u8), next: Option<(&str, u8)>, memory: &str) -> Result<Job> {
    let migrate = next.map_or_else(String::new, |(socket, _)| format!(" --migrate {socket}"));
    let destination = machine.start(&format!("{}{migrate}", incoming(to)), MAC, memory)?;
    destination.wait_for_output("waits for a source", PATIENT)?;
    let mode = machine.bed.vm().run(&format!("stat -c %a {}", to.0)).with_context(|| destination.output())?;
    ensure!(mode.trim() == "600", "the mode of the socket is {mode}");
    Ok(destination)
}

/// Requests the migration from the VMM that has run for the longest time.
fn request(host: &Vm) -> Result<()> {
    host.run("kill -USR1 $(pgrep -o -x pvrdma-vmm)").map(drop)
}

/// A connection on which messages go there and back, and are compared.
struct Pings<'a> {
    from: &'a Vm,
    /// File with a line for each message.
    file: String,
    server: Job,
    client: Job,
}

impl<'a> Pings<'a> {
    /// Connects a client to a server at this address and port.
    fn start(from: &'a Vm, (to, address): (&'a Vm, Ipv4Addr), port: u16) -> Result<Self> {
        let file = format!("/run/pings-{port}");
        from.run(&format!(": > {file}"))?;
        let server = to.spawn(&format!("rping -s -V -S 64 -a {address} -p {port}"))?;
        to.wait_until(&format!("rdma resource show cm_id | grep LISTEN | grep -q ':{port} '"), PATIENT)?;
        let client = from.spawn(&format!("stdbuf -oL rping -c -V -v -S 64 -a {address} -p {port} > {file}"))?;
        let pings = Self { from, file, server, client };
        pings.continue_().with_context(|| format!("before the migration, port {port}"))?;
        Ok(pings)
    }

    fn count(&self) -> Result<u64> {
        self.from.run(&format!("wc -l < {}", self.file))?.trim().parse().context("lines of a file")
    }

    /// Checks that messages arrive.
    fn continue_(&self) -> Result<()> {
        let more = format!("[ $(wc -l < {}) -gt {} ]", self.file, self.count()?.saturating_add(5));
        let context = || format!("{}\n{}", self.client.output(), self.server.output());
        self.from.wait_until(&more, PATIENT).with_context(context)
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
