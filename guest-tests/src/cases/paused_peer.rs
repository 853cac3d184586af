//! The `rdma_rxe` of a guest sends requests to an adapter of this process, whose device is paused meanwhile.

use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pvrdma_ether_link::unix::DatagramLink;
use pvrdma_rxe::{HeldRequests, PortConfig, PortRules, Rxe, RxeConfig, RxeHca, RxeStation};
use pvrdma_verbs::testing::{Buffer, End, Node, gid, mac};
use pvrdma_verbs::{MemoryRegion, PauseHca, QueuePair};
use pvrdma_verbs_types::{QpType, Qpn};
use tempfile::TempDir;

use super::case::Case;
use super::kernel_log;
use crate::endpoints::{gid_index, network_script};
use crate::guest_with_daemon::{MEMORY_MIB, cable};
use crate::image::GuestImage;
use crate::vm::{Job, Nic, NicModel, Vm, VmBuilder};

/// IP MTU of the cable.
const MTU: u32 = 1500;
/// Number of the device in this process, and of the guest.
const OURS: u8 = 1;
const THEIRS: u8 = 2;
/// ACK timeout of the peer: 4.096 µs × 2^14.
const TIMEOUT: Duration = Duration::from_micros(67_109);
/// Number of retries that `rdma_rxe` takes for no limit.
const ENDLESS: u32 = 7;
/// Requests that must have arrived before a pause, and again after it.
const FEW: u64 = 3;
/// Receives that are posted: more requests do not arrive in any of the tests.
const RECEIVES: u64 = 100_000;
/// Attempts at a pause that this machine must not make much longer than intended.
const ATTEMPTS: u32 = 5;
const PATIENCE: Duration = Duration::from_secs(60);

const WHEN: &str = "takes two minutes; runs when asked for: --only slow/paused-peer";

/// The only test.
pub(crate) fn cases() -> Vec<Case> {
    vec![Case::alone("slow/paused-peer", paused_peer).slow(WHEN)]
}

/// Tests each setting of `HeldRequests` with two operations, three numbers of retries, and pauses that are shorter and
/// longer than the retries last. A request fails only if it is not held off, the pause is longer, and its retries are
/// limited. Pauses of ten seconds follow.
fn paused_peer(image: &GuestImage) -> Result<String> {
    let guest = Guest::boot(image)?;
    let tests = || {
        let mut notes = Vec::new();
        for held in [HeldRequests::Off, HeldRequests::Sends, HeldRequests::All] {
            let ours = Ours::new(&guest, held)?;
            for (operation, retries) in ["send", "write"].into_iter().flat_map(|it| [1, 3, 7].map(|count| (it, count)))
            {
                let budget = TIMEOUT * (retries + 1);
                for (pause, is_long) in [(budget * 3 / 10, false), (budget * 3, true)] {
                    let test = format!("hold {held:?}, {operation}, {retries} retries, a pause of {pause:?}");
                    let is_held = held == HeldRequests::All || (held == HeldRequests::Sends && operation == "send");
                    let survives = is_held || !is_long || retries == ENDLESS;
                    let end = ours.pause_beside(&guest, operation, retries, pause).with_context(|| test.clone())?;
                    let is_expected = match &end {
                        Peer::Continues(_) => survives,
                        Peer::Ended(error) => !survives && error.ends_with("transport retry counter exceeded"),
                    };
                    ensure!(is_expected, "{test}: {end:?}");
                }
            }
            for operation in ["send", "write"] {
                let end = ours.pause_beside(&guest, operation, ENDLESS, Duration::from_secs(10))?;
                let Peer::Continues(gap) = end else { bail!("hold {held:?}, ten seconds, {operation}: {end:?}") };
                notes.push(format!("{operation} with hold {held:?} {} ms", gap.as_millis()));
            }
        }
        Ok(notes)
    };
    let notes = tests().with_context(|| guest.vm.diagnosis())?;
    kernel_log::check(&guest.vm)?;
    Ok(format!("time from the end of a pause of 10 s to the next request: {}", notes.join(", ")))
}

/// Fate of the peer's requests.
#[derive(Debug)]
enum Peer {
    /// The next one was executed this time after the pause.
    Continues(Duration),
    /// One ended with an error.
    Ended(String),
}

/// The guest with `rdma_rxe`.
struct Guest {
    vm: Vm,
    gid_index: u32,
    directory: TempDir,
}

impl Guest {
    fn boot(image: &GuestImage) -> Result<Self> {
        let directory =
            tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
        let [ours, theirs] = cable(directory.path());
        let nic = Nic { model: NicModel::Virtio, mac: mac(THEIRS).to_string(), local: theirs, remote: ours };
        let vm = VmBuilder::new(image, directory.path()).name("rxe").memory_mib(MEMORY_MIB).nic(nic).boot()?;
        vm.run(&network_script("virtio_net", &[address(THEIRS)?.into()], MTU))?;
        // The device in this process has no network function, which would answer for its address.
        vm.run(&format!(
            "modprobe -a ib_uverbs rdma_rxe && rdma link add rxe0 type rxe netdev eth0 &&
             ip neigh replace {} lladdr {} dev eth0 nud permanent",
            address(OURS)?,
            mac(OURS)
        ))?;
        let gid_index = gid_index(&vm, "rxe0", address(THEIRS)?.into())?;
        Ok(Self { vm, gid_index, directory })
    }
}

fn address(number: u8) -> Result<std::net::Ipv4Addr> {
    std::net::Ipv6Addr::from(gid(number).0).to_ipv4_mapped().context("the GID of a node is an IPv4 address")
}

/// The device in this process.
struct Ours {
    node: Node<RxeHca>,
    _station: RxeStation,
}

impl Ours {
    fn new(guest: &Guest, held: HeldRequests) -> Result<Self> {
        let [ours, theirs] = cable(guest.directory.path());
        // The socket of an adapter before this one.
        let _ = std::fs::remove_file(&ours);
        let socket = UnixDatagram::bind(&ours).context("cannot bind a socket")?;
        let link = Arc::new(DatagramLink::new(socket, theirs)?);
        let rxe = Rxe::new(RxeConfig::default())?;
        let station = rxe.station(mac(OURS));
        station.plug(PortConfig::new(link, MTU).with_rules(PortRules::default().with_held(held)))?;
        Ok(Self { node: Node::new(&rxe, OURS), _station: station })
    }

    /// Pauses the device for this time while a peer with these retries sends requests to it.
    fn pause_beside(&self, guest: &Guest, operation: &str, retries: u32, pause: Duration) -> Result<Peer> {
        for _ in 0..ATTEMPTS {
            let requests = Requests::start(self, guest, operation, retries)?;
            requests.wait_for(FEW)?;
            ensure!(self.node.hca.pause(), "the device is paused");
            let began = Instant::now();
            let before = requests.arrived();
            // The pause is what is tested.
            thread::sleep(pause);
            let lasted = began.elapsed();
            ensure!(self.node.hca.resume(), "the device is not paused");
            let resumed = Instant::now();
            let end = match requests.wait_for(before + 1) {
                Ok(()) => {
                    let gap = resumed.elapsed();
                    requests.wait_for(before + FEW).map_or_else(|_| requests.failure(), |()| Ok(Peer::Continues(gap)))
                }
                Err(_) => requests.failure(),
            }?;
            if lasted < pause * 2 {
                return Ok(end);
            }
        }
        bail!("this machine is so busy that a sleep of {pause:?} takes more than twice as long")
    }
}

/// The program that sends requests, and the queue pair that executes them.
struct Requests {
    program: Job,
    end: End<RxeHca>,
    /// Memory in which each request leaves its number.
    numbers: Buffer<RxeHca>,
}

impl Requests {
    fn start(ours: &Ours, guest: &Guest, operation: &str, retries: u32) -> Result<Self> {
        let (end, numbers) = (ours.node.qp(QpType::Rc), ours.node.buffer(8));
        let program = guest.vm.spawn(&format!(
            "exec requests rxe0 {} {operation} {retries} {} {} {} {}",
            guest.gid_index,
            std::net::Ipv6Addr::from(gid(OURS).0),
            end.qp.qpn().get(),
            numbers.mr.rkey(),
            numbers.start,
        ))?;
        program.wait_for_output("queue pair ", PATIENCE)?;
        let output = program.output();
        let (_, qpn) = output.trim().rsplit_once(' ').context("no number of a queue pair")?;
        let qpn = Qpn::new(qpn.parse().with_context(|| format!("the program says {output}"))?);
        end.connect(&end, |attrs| {
            attrs.dest_qpn = qpn;
            (attrs.av.dgid, attrs.av.dmac) = (gid(THEIRS), mac(THEIRS));
        });
        let receive = pvrdma_verbs_types::RecvWr { sges: vec![numbers.all()], ..Default::default() };
        end.receives.posted.lock().extend((0..RECEIVES).map(|_| receive.clone()));
        end.qp.notify_recv();
        guest.vm.run("pkill -USR1 -x requests")?;
        Ok(Self { program, end, numbers })
    }

    /// Returns the number of the last request that was executed.
    fn arrived(&self) -> u64 {
        let bytes = self.numbers.read(0, 8);
        bytes.try_into().map_or(0, u64::from_le_bytes)
    }

    /// Waits until this request was executed. The error is the end of the program, or of the time.
    fn wait_for(&self, number: u64) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while self.arrived() < number {
            ensure!(self.program.is_running(), "the program has ended: {}", self.program.output());
            ensure!(Instant::now() < deadline, "request {number} was not executed: {}", self.program.output());
            // Memory that a peer writes to has no event.
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Returns the error with which a request has ended.
    fn failure(&self) -> Result<Peer> {
        ensure!(!self.program.is_running(), "the program makes no progress");
        let text = self.program.wait_success(PATIENCE)?;
        text.lines().last().map(|line| Peer::Ended(line.to_owned())).context("the program says nothing")
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.program.kill();
        self.end.qp.destroy();
    }
}
