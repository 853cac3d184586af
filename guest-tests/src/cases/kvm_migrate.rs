//! A VM of `pvrdma-vmm` that moves from one process to another while its programs run. The uplinks of both processes
//! lead to a bridge of the host, whose `rdma_rxe` is a peer.

use std::net::Ipv4Addr;

use anyhow::{Context, Result, ensure};

use super::case::Case;
use super::kernel_log;
use super::kvm_saved::{ADDRESS, COUNT, MAC, MTU, Machine, PATIENT, on_hosts};
use super::kvm_traffic::Traffic;
use crate::endpoints::bring_up;
use crate::image::GuestImage;
use crate::kvm_bed::{KvmBed, KvmBeds, MOVING_GUEST, PEER_GUEST};
use crate::kvm_host::TOOLS;
use crate::kvm_qemu;
use crate::played_pair::{FILES, device};
use crate::vm::{Job, Vm};

/// Memory of the VM.
const MEMORY: &str = "256M";
/// Sockets of destinations on the host, and the numbers of their uplinks.
const THERE: (&str, u8) = ("/run/there.sock", 2);
const BACK: (&str, u8) = ("/run/back.sock", 1);
/// Address of the host on the bridge.
const HOST: Ipv4Addr = Ipv4Addr::new(192, 168, 84, 2);
/// Addresses of a guest of QEMU and a daemon, which does not move.
const PEER: Ipv4Addr = Ipv4Addr::new(192, 168, 84, 3);
const PEER_MAC: &str = "52:54:00:00:04:12";
/// Uplink of the peer.
const PEER_LINK: &str = "af_packet:veth3";

const WHEN: &str = "takes minutes; runs when asked for: --only kvm/migrate";

/// Returns the case `kvm/migrate`.
pub(crate) fn cases(beds: &KvmBeds) -> Vec<Case> {
    let beds = beds.clone();
    let run = move |image: &GuestImage| {
        let options = format!("--uplink af_packet:veth1 --migrate {}", THERE.0);
        on_hosts(
            || Machine::boot(image, &beds, (MOVING_GUEST, MEMORY), &options, bridge),
            |machine| migrate(image, machine),
        )
    };
    vec![Case::alone("kvm/migrate", run).slow(WHEN)]
}

/// Sets up a bridge with interfaces for uplinks, and `rdma_rxe` on it. Guests of two VMMs run for minutes, in which a
/// host with two processors breaks down.
fn bridge(bed: &KvmBed) -> Result<()> {
    bed.use_second_processor(false)?;
    bed.vm()
        .run(&format!(
            "[ -e /sys/class/net/br0 ] && exit
             modprobe -a bridge veth af_packet ib_uverbs rdma_ucm rdma_rxe && ip link add br0 type bridge || exit
             for number in 1 2 3; do
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
/// connections to itself and to the host continue. Before, a migration is cancelled, a destination that does not fit
/// refuses the guest, and a destination is killed. At the end a source is killed.
fn migrate(image: &GuestImage, machine: &Machine) -> Result<String> {
    let Machine { vm, vmm, bed, .. } = machine;
    machine.exchange().context("before the migration")?;
    let _counting = vm.spawn(COUNT)?;
    vm.wait_until("[ -s /run/count ]", PATIENT)?;
    cancelled(machine).context("a migration that is cancelled")?;
    refused(machine).context("another machine")?;
    destination_killed(machine).context("a destination that is killed")?;

    let peer = Peer::boot(image, bed).context("the peer")?;
    let (guest, host, peer) = ((vm, ADDRESS), (bed.vm(), HOST), (&peer.vm, PEER));
    let traffic = vec![
        Traffic::pings(vm, guest, 7174)?,
        Traffic::pings(vm, host, 7175)?,
        Traffic::pings(bed.vm(), guest, 7176)?,
        Traffic::pings(vm, peer, 7177)?,
        Traffic::pings(peer.0, guest, 7178)?,
        Traffic::writes(vm, host)?,
        Traffic::stream(vm, host)?,
        Traffic::disk(vm, host)?,
    ];
    let (first, there) = moved(machine, vmm, &traffic, THERE, Some(BACK))?;
    let (second, back) = moved(machine, &there, &traffic, BACK, Some(THERE)).context("second move")?;
    let (third, there) = moved(machine, &back, &traffic, THERE, Some(BACK)).context("third move")?;
    let notes = traffic.iter().map(Traffic::note).collect::<Result<Vec<_>>>()?.join(", ");
    traffic.into_iter().try_for_each(Traffic::end)?;
    machine.exchange().context("after the migration")?;
    kernel_log::check(vm)?;
    kernel_log::check(bed.vm())?;
    source_killed(machine, &there).context("a source that is killed")?;
    Ok(format!("{first}; {second}; {third}; progress of programs: {notes}"))
}

/// A guest of QEMU, whose devices belong to a daemon.
struct Peer {
    // Declared in the order in which they must be dropped.
    vm: Vm,
    _machine: Job,
    _daemon: Job,
}

impl Peer {
    fn boot(image: &GuestImage, bed: &KvmBed) -> Result<Self> {
        bed.clear("pvrdmad")?;
        let prepared = bed.prepare(image, PEER_GUEST)?;
        let daemon = bed.vm().spawn(&format!(
            "RUST_BACKTRACE=1 RUST_LOG=info exec {TOOLS}/pvrdmad --sandbox strict --control {FILES}/control \
             --network name=default,uplink={PEER_LINK} {}",
            device(PEER_GUEST, PEER_MAC)
        ))?;
        daemon.wait_for_output(&format!("{PEER_GUEST}: ready"), PATIENT)?;
        let machine = bed.vm().spawn(&kvm_qemu::qemu(bed, PEER_GUEST)?)?;
        let vm = prepared.accept(bed.vm().process())?;
        let outputs = || format!("{}\n{}", daemon.output(), machine.output());
        vm.wait_boot().with_context(outputs)?;
        bring_up(&vm, &[PEER.into()], MTU).with_context(outputs)?;
        Ok(Self { vm, _machine: machine, _daemon: daemon })
    }
}

/// Returns a shell word for the process id of a VMM of the moving guest: the oldest (`-o`), or the newest (`-n`).
fn process(option: &str) -> String {
    // The brackets keep the pattern from matching the shell that contains it.
    format!("$(pgrep {option} -f 'pvrdma-vm[m] .*name={MOVING_GUEST},')")
}

/// A destination with less memory refuses the machine, which stays.
fn refused(machine: &Machine) -> Result<()> {
    let destination = listen(machine, THERE, None, "128M")?;
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
    host.run(&format!("kill -USR1 {0} && kill -STOP {0}", process("-n")))?;
    request(host)?;
    machine.vmm.wait_for_output("migrates to ", PATIENT)?;
    host.run(&format!("kill -USR2 {} && kill -CONT {}", process("-o"), process("-n")))?;
    machine.vmm.wait_for_output("cancelled; the machine goes on", PATIENT)?;
    let ended = destination.wait(PATIENT)?;
    ensure!(ended.code == 1 && ended.text.contains("nothing runs here"), "{}: {}", ended.code, ended.text);
    machine.continues(machine.progress()?).map(drop)
}

/// A destination is killed when the source has connected. The machine stays.
fn destination_killed(machine: &Machine) -> Result<()> {
    let host = machine.bed.vm();
    let _destination = begin(machine, THERE)?;
    host.run(&format!("kill -KILL {}", process("-n")))?;
    machine.vmm.wait_for_output("Connection reset", PATIENT)?;
    host.run(&format!("rm {}", THERE.0))?;
    machine.continues(machine.progress()?).map(drop)
}

/// A source is killed when it has connected. The destination has no machine to run, and ends.
fn source_killed(machine: &Machine, source: &Job) -> Result<()> {
    let host = machine.bed.vm();
    let destination = begin(machine, BACK)?;
    host.run(&format!("kill -KILL {} && kill -CONT {}", process("-o"), process("-n")))?;
    let ended = destination.wait(PATIENT)?;
    ensure!(ended.code == 1 && ended.text.contains("nothing runs here"), "{}: {}", ended.code, ended.text);
    source.wait(PATIENT)?;
    host.run(&format!("[ -z \"{}\" ]", process("-o"))).map(drop).context("a VMM still runs")
}

/// Begins a migration to a destination that is stopped, and waits until the source has connected.
fn begin(machine: &Machine, to: (&str, u8)) -> Result<Job> {
    let host = machine.bed.vm();
    let destination = listen(machine, to, None, MEMORY)?;
    host.run(&format!("kill -STOP {}", process("-n")))?;
    request(host)?;
    // The source has connected and introduced the machine when its thread waits for an answer.
    let thread = format!("$(dirname $(grep -lx migration /proc/{}/task/*/comm))", process("-o"));
    host.wait_until(&format!("grep -q unix_stream {thread}/wchan"), PATIENT)?;
    Ok(destination)
}

/// Moves the guest from `source` to a new VMM, which can move it on. Returns a note, and the new VMM.
fn moved(
    machine: &Machine,
    source: &Job,
    traffic: &[Traffic<'_>],
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
        traffic.iter().try_for_each(Traffic::continues).map(|()| counted)
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
    host.run(&format!("kill -USR1 {}", process("-o"))).map(drop)
}
