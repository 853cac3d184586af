//! Cost of saved state: its size, the times to save and to restore it, the pause of a busy device, the gap that a
//! hand-over makes in the traffic, and the price of the log of written pages.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pvrdma_dev::DeviceConfig;
use pvrdma_dev::testing::{
    Buffer, Cq, Driver, Encoded, GuestMemory, Mr, Path, Pd, Placement, Qp, QpInit, SendWr, TestDevice, access,
};
use pvrdma_ether_link::af_packet::AfPacketLink;
use pvrdma_guest_memory::MemoryBudget;
use pvrdma_pci_function::PciFunction;
use pvrdma_rxe::{PortConfig, PortRules, Rxe, RxeConfig, RxeStation};
use pvrdma_verbs::{AddressRule, Rules, testing::gid};

use super::figure::Figure;
use crate::daemon::{Daemon, DaemonDevice};
use crate::device_pair::{Side, SideOptions, connect, connected_at, mac, spin};
use crate::namespaces::ip;

/// Number of queue pairs, and of regions, of the large device.
const OBJECTS: usize = 10_000;
/// Number of connected queue pairs of a device that moves.
const MOVED: usize = 1000;
/// Number of busy queue pairs.
const BUSY: u32 = 64;
/// Size of a write of the busy queue pairs.
const WRITE: usize = 64 << 10;
/// MTU of network interfaces.
const VETH_MTU: u32 = 4500;
/// Maximum time for a write.
const PATIENCE: Duration = Duration::from_secs(30);

pub(super) fn measure(runs: usize) -> Result<Vec<Figure>> {
    let mut figures = vec![idle()?];
    figures.extend(objects(runs)?);
    figures.push(pause(runs)?);
    figures.push(move_of_connections(runs)?);
    figures.push(torn_apart(runs)?);
    figures.push(hand_over(runs)?);
    for size in [64, WRITE] {
        figures.push(dirty_log(size, runs)?);
    }
    Ok(figures)
}

/// A device with a driver and the objects of a process.
struct Machine {
    host: u8,
    test: TestDevice<Rxe>,
    driver: Driver,
    pd: Pd,
    cq: Cq,
    buffer: Buffer,
    mr: Mr,
}

impl Machine {
    fn new(backend: &Rxe, host: u8, memory: usize) -> Result<Self> {
        let test = TestDevice::of_host(host, backend, config(host), GuestMemory::new(memory));
        let driver = Driver::probe(test.function(), &test.memory, &test.irqs)?;
        driver.bind_gid(0, gid(host))?;
        let pd = driver.create_pd(None)?;
        let cq = driver.create_cq(None, 2 * BUSY)?;
        let buffer = driver.buffer(WRITE, 0, Placement::Scattered);
        let mr = driver.reg_mr(&pd, &buffer, access::ALL)?;
        Ok(Self { host, test, driver, pd, cq, buffer, mr })
    }

    /// Pauses the device and returns its state.
    fn saved(&self) -> Result<Vec<u8>> {
        ensure!(self.test.device.pause(), "the device does not pause");
        let mut state = Vec::new();
        self.test.device.save(&mut state)?;
        Ok(state)
    }

    /// Starts the log of written pages, as a VMM does for a live migration. The connections of other saved devices end.
    fn log_writes(&self) -> Result<()> {
        let (space, budget) = (self.test.memory.space(), MemoryBudget::new(MemoryBudget::DEFAULT_LIMIT));
        Ok(space.start_dirty_log(&[self.test.memory.part(0)], &budget)?)
    }

    fn end(&self) -> End<'_> {
        End { host: self.host, driver: &self.driver, pd: &self.pd, cq: &self.cq }
    }
}

/// Returns the configuration of a host's device. It may have any address: a probe on the uplink would take a second.
fn config(host: u8) -> DeviceConfig {
    TestDevice::<Rxe>::config(host).with_rules(Rules::default().with_addresses(AddressRule::ANY))
}

fn new_backend() -> Result<Rxe> {
    Ok(Rxe::new(RxeConfig::default())?)
}

/// Place of one end of a connection.
struct End<'a> {
    host: u8,
    driver: &'a Driver,
    pd: &'a Pd,
    cq: &'a Cq,
}

/// Creates a queue pair at each end and connects the two.
fn connection(a: &End<'_>, b: &End<'_>) -> Result<[Qp; 2]> {
    let create = |end: &End<'_>| {
        let init = QpInit { max_send_wr: 1, max_recv_wr: 1, ..QpInit::rc(end.pd, end.cq) };
        end.driver.create_qp(&init)
    };
    let path = |end: &End<'_>, qpn| Path { dmac: mac(end.host).0, ..Path::to(gid(end.host), qpn) };
    let (mut near, mut far) = (create(a)?, create(b)?);
    near.connect(&path(b, far.qpn))?;
    far.connect(&path(a, near.qpn))?;
    Ok([near, far])
}

/// Time between completions.
struct Gaps {
    last: Instant,
    longest: Duration,
}

impl Gaps {
    fn new() -> Self {
        Self { last: Instant::now(), longest: Duration::ZERO }
    }

    /// Posts a request on each queue pair and waits for all completions.
    fn post_and_reap(&mut self, pairs: &mut [[Qp; 2]], request: &SendWr, cq: &mut Cq) -> Result<()> {
        for [requester, _] in &mut *pairs {
            let element = requester.encode(request);
            ensure!(requester.post_encoded(&[element], 1) == 1, "the send ring is full");
        }
        let mut left = u32::try_from(pairs.len())?;
        while left > 0 {
            let (done, failed) = cq.reap(left);
            ensure!(failed == 0, "{failed} requests failed");
            if done == 0 {
                thread::yield_now();
                continue;
            }
            self.longest = self.longest.max(self.last.elapsed());
            self.last = Instant::now();
            left -= done;
        }
        Ok(())
    }
}

/// The RDMA function of a guest whose driver has started, and that no program uses.
fn idle() -> Result<Figure> {
    let state = Machine::new(&new_backend()?, 1, 16 << 20)?.saved()?;
    let title = "state of an idle RDMA function".to_owned();
    Ok(Figure::against_target("state/idle", title, "KiB", true, vec![size(&state, 1 << 10)], 16.0))
}

/// Size of the state of a device with many connected queue pairs and regions, and the times to save and to restore it.
fn objects(runs: usize) -> Result<[Figure; 3]> {
    let backend = new_backend()?;
    let machine = Machine::new(&backend, 1, 512 << 20)?;
    let mut kept = Vec::with_capacity(OBJECTS);
    for _ in 0..OBJECTS {
        let init = QpInit { max_send_wr: 16, max_recv_wr: 16, ..QpInit::rc(&machine.pd, &machine.cq) };
        let mut qp = machine.driver.create_qp(&init)?;
        qp.connect(&Path::to(gid(2), qp.qpn))?;
        kept.push((qp, machine.driver.reg_mr(&machine.pd, &machine.buffer, access::ALL)?));
    }
    let state = machine.saved()?;
    let (mut saves, mut restores) = (Vec::new(), Vec::new());
    for _ in 0..runs {
        let mut again = Vec::with_capacity(state.len());
        let start = Instant::now();
        machine.test.device.save(&mut again)?;
        saves.push(milliseconds(start.elapsed()));
        let (next, space) = (new_backend()?, machine.test.memory.another_space());
        let successor = machine.test.successor(&next, config(1), space);
        let start = Instant::now();
        successor.device.restore(&mut &*state)?;
        successor.device.finish_restore()?;
        restores.push(milliseconds(start.elapsed()));
    }
    let of = format!("of {OBJECTS} connected QPs and {OBJECTS} MRs");
    let bytes = size(&state, 1 << 20);
    Ok([
        Figure::against_target("state/objects", format!("state {of}"), "MiB", true, vec![bytes], 4.0),
        Figure::against_target("state/save", format!("time to save the state {of}"), "ms", true, saves, 30.0),
        Figure::against_target("state/restore", format!("time to restore the state {of}"), "ms", true, restores, 100.0),
    ])
}

/// Time until a device with busy queue pairs has paused.
fn pause(runs: usize) -> Result<Figure> {
    let backend = new_backend()?;
    let (mut a, b) = (Machine::new(&backend, 1, 64 << 20)?, Machine::new(&backend, 2, 64 << 20)?);
    let mut pairs = (0..BUSY).map(|_| connection(&a.end(), &b.end())).collect::<Result<Vec<_>>>()?;
    let write = SendWr::write(0, &[a.buffer.sge(&a.mr, 0, WRITE)], b.buffer.va(), b.mr.rkey);
    let (device, cq) = (Arc::clone(&a.test.device), &mut a.cq);
    let (rounds, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let times = thread::scope(|scope| {
        let traffic = scope.spawn(|| -> Result<()> {
            let mut gaps = Gaps::new();
            while !stop.load(Ordering::Relaxed) {
                gaps.post_and_reap(&mut pairs, &write, cq)?;
                rounds.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        });
        let mut times = Vec::new();
        for _ in 0..runs {
            let before = rounds.load(Ordering::Relaxed);
            while rounds.load(Ordering::Relaxed) < before + 2 && !traffic.is_finished() {
                thread::yield_now();
            }
            let start = Instant::now();
            device.pause();
            times.push(milliseconds(start.elapsed()));
            device.resume();
        }
        stop.store(true, Ordering::Relaxed);
        let ended = traffic.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        ended.map(|()| times)
    })?;
    let title = format!("pause of a device with {BUSY} busy QPs");
    Ok(Figure::against_target("state/pause", title, "ms", true, times, 1.0))
}

/// Time for which a device stands still in a migration because of its own work: the VMM and the network take none.
fn move_of_connections(runs: usize) -> Result<Figure> {
    let machine = Machine::new(&new_backend()?, 1, 64 << 20)?;
    let mut qps = Vec::with_capacity(MOVED);
    for _ in 0..MOVED {
        let init = QpInit { max_send_wr: 16, max_recv_wr: 16, ..QpInit::rc(&machine.pd, &machine.cq) };
        let mut qp = machine.driver.create_qp(&init)?;
        qp.connect(&Path::to(gid(2), qp.qpn))?;
        qps.push(qp);
    }
    machine.log_writes()?;
    let mut times = Vec::new();
    for _ in 0..runs {
        let (next, space) = (new_backend()?, machine.test.memory.another_space());
        let successor = machine.test.successor(&next, config(1), space);
        let start = Instant::now();
        let state = machine.saved()?;
        successor.device.restore_alone(&mut &*state)?;
        successor.device.finish_restore()?;
        ensure!(successor.device.resume(), "the device does not continue");
        times.push(milliseconds(start.elapsed()));
        // The migration has failed for the source, which continues for the next run.
        drop(successor);
        ensure!(machine.test.device.resume(), "the device does not continue");
    }
    let title = format!("pause, save, restore and start of a device with {MOVED} connected QPs");
    Ok(Figure::against_target("state/move", title, "ms", true, times, 30.0))
}

/// Two network interfaces with a cable between them, removed on drop.
struct Veth([String; 2]);

impl Veth {
    fn new() -> Result<Self> {
        let ends = ["a", "b"].map(|end| format!("bench{}{end}", std::process::id()));
        let [a, b] = &ends;
        ip(&format!("link add {a} mtu {VETH_MTU} type veth peer name {b} mtu {VETH_MTU}"))?;
        let veth = Self(ends.clone());
        ends.iter().try_for_each(|end| ip(&format!("link set {end} up")))?;
        Ok(veth)
    }
}

impl Drop for Veth {
    fn drop(&mut self) {
        // The other end goes with it.
        if let Err(error) = ip(&format!("link delete {}", self.0[0])) {
            log::warn!("{error:#}");
        }
    }
}

/// Connects the port of a host's device with an interface.
fn plug(backend: &Rxe, host: u8, interface: &str) -> Result<RxeStation> {
    let station = backend.station(mac(host));
    let link = Arc::new(AfPacketLink::open(interface, mac(host))?);
    station.plug(PortConfig::new(link, VETH_MTU).with_rules(PortRules::default().with_negotiate(true)))?;
    Ok(station)
}

/// Time from the start of a device at another host until the next write of its former neighbour completes.
fn torn_apart(runs: usize) -> Result<Figure> {
    let veth = Veth::new().context("network interfaces need root")?;
    let times = (0..runs).map(|_| tear_apart(&veth)).collect::<Result<Vec<_>>>()?;
    let title = "first write over a veth pair to a device that has moved away from the same host".to_owned();
    Ok(Figure::against_target("state/torn-apart", title, "ms", true, times, 5.0))
}

fn tear_apart(Veth([here, there]): &Veth) -> Result<f64> {
    let (first, second) = (new_backend()?, new_backend()?);
    let [_near, leaving, _far] = [plug(&first, 1, here)?, plug(&first, 2, here)?, plug(&second, 2, there)?];
    let (mut a, b) = (Machine::new(&first, 1, 16 << 20)?, Machine::new(&first, 2, 16 << 20)?);
    let [mut requester, _responder] = connection(&a.end(), &b.end())?;
    let write = SendWr::write(0, &[a.buffer.sge(&a.mr, 0, 64)], b.buffer.va(), b.mr.rkey);
    let post = |requester: &mut Qp| {
        let element = requester.encode(&write);
        ensure!(requester.post_encoded(&[element], 1) == 1, "the send ring is full");
        Ok(())
    };
    let mut complete = || {
        let start = Instant::now();
        loop {
            match a.cq.reap(1) {
                (1, 0) => return Ok(()),
                (_, 1..) => bail!("a write has failed"),
                _ if start.elapsed() > PATIENCE => bail!("a write does not complete"),
                _ => thread::yield_now(),
            }
        }
    };
    post(&mut requester)?;
    complete()?;
    b.log_writes()?;
    let state = b.saved()?;
    post(&mut requester)?;
    let successor = b.test.successor(&second, config(2), b.test.memory.another_space());
    successor.device.restore_alone(&mut &*state)?;
    successor.device.finish_restore()?;
    b.test.device.leave();
    PciFunction::reset(&*b.test.device);
    b.test.device.resume();
    leaving.unplug();
    let start = Instant::now();
    successor.device.resume();
    complete()?;
    Ok(milliseconds(start.elapsed()))
}

/// Longest time between two completions of busy queue pairs while their daemon's processes are replaced.
fn hand_over(runs: usize) -> Result<Figure> {
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let sockets = [1, 2].map(|host| directory.path().join(format!("vm{host}.sock")));
    let devices = [1_u8, 2].map(|host| DaemonDevice {
        name: format!("vm{host}"),
        socket: sockets[usize::from(host - 1)].clone(),
        mac: mac(host).to_string(),
        options: String::new(),
    });
    let daemon = Daemon::start(directory.path(), &devices)?;
    let [mut a, b] = connected_at(&sockets, WRITE)?;
    let [near, far] = [&a, &b].map(|Side { host, driver, pd, cq, .. }| End { host: *host, driver, pd, cq });
    let mut pairs = (0..BUSY).map(|_| connection(&near, &far)).collect::<Result<Vec<_>>>()?;
    let write = SendWr::write(0, &[a.buffer.sge(&a.mr, 0, WRITE)], b.buffer.va(), b.mr.rkey);
    let mut gaps = Vec::new();
    for _ in 0..runs {
        let gap = thread::scope(|scope| -> Result<Duration> {
            let upgrade = scope.spawn(|| daemon.upgrade());
            let mut gaps = Gaps::new();
            // One round more after the end of the upgrade, which may be when the first completion arrives.
            let mut last = false;
            while !last {
                last = upgrade.is_finished();
                gaps.post_and_reap(&mut pairs, &write, &mut a.cq)?;
            }
            upgrade.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            Ok(gaps.longest)
        })?;
        gaps.push(milliseconds(gap));
    }
    let title = format!("longest gap in the traffic of {BUSY} QPs while the process of their network is replaced");
    Ok(Figure::against_target("state/hand-over", title, "ms", true, gaps, 50.0))
}

/// Writes of this size while the log of written pages is on.
fn dirty_log(size: usize, runs: usize) -> Result<Figure> {
    const REQUESTS: u32 = 1 << 18;
    let backend = new_backend()?;
    let options = SideOptions { depth: 256, cq_entries: 512, ..SideOptions::new(1 << 20, Placement::Scattered) };
    let [mut a, b] = connect(Side::private(&backend, 1, &options)?, Side::private(&backend, 2, &options)?)?;
    let elements: Vec<Encoded> = a.writes(&b, size).take(256).collect();
    let total = REQUESTS / u32::try_from(size / 64).unwrap_or(u32::MAX).clamp(1, 64);
    let spaces = [&a, &b].map(|side| (Arc::clone(side.memory.space()), side.memory.part(0)));
    let budget = MemoryBudget::new(MemoryBudget::DEFAULT_LIMIT);
    let mut rounds = Vec::new();
    for _ in 0..runs {
        let mut rate = || {
            let start = Instant::now();
            a.post_and_reap(&elements, total, 16, spin)?;
            Ok::<_, anyhow::Error>(f64::from(total) / start.elapsed().as_secs_f64() / 1e6)
        };
        for (space, part) in &spaces {
            space.start_dirty_log(&[*part], &budget)?;
        }
        let on = rate()?;
        spaces.iter().for_each(|(space, _)| space.stop_dirty_log());
        rounds.push([on, rate()?]);
    }
    let title = format!("RDMA write of {size} bytes with the log of written pages");
    let name = format!("state/dirty-log-{size}");
    Ok(Figure::of_rounds(name, title, "million/s", false, &rounds, "without the log"))
}

#[expect(clippy::cast_precision_loss, reason = "figures have three digits")]
fn size(state: &[u8], unit: usize) -> f64 {
    state.len() as f64 / unit as f64
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
