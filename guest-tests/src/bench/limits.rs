//! One daemon whose devices are connected to daemons of many hosts: memory, set-up of connections, and processor time.
//!
//! The hosts are network namespaces of this machine. Only the first one's daemon is measured. This program drives the
//! devices of all daemons as their VMM and guest.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path as FilePath;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pvrdma_dev::testing::{Encoded, Path, Qp, QpInit, SendWr};
use pvrdma_verbs::testing::gid;

use super::daemon::processor_ns;
use super::figure::Figure;
use super::wire::Row;
use crate::daemon::{Daemon, DaemonDevice, Setup};
use crate::device_pair::{Side, connect_across, mac, ring};
use crate::fabric::{Fabric, address};
use crate::namespaces::Namespaces;

/// Devices of the measured daemon.
const DEVICES: u8 = 64;
/// Other daemons, each with one device on a host of its own.
const REMOTES: u8 = 64;
/// Queue pairs between each of these devices and each remote one.
const EACH: usize = 4;
/// Queue pairs of a device.
const OF_DEVICE: usize = REMOTES as usize * EACH;
/// Queue pairs of the measured daemon.
const ALL: usize = DEVICES as usize * OF_DEVICE;
/// Devices whose connections are set up at the same time.
const AT_ONCE: usize = 8;
/// Duration of each measurement of processor time.
const WATCHED: Duration = Duration::from_secs(10);
/// Bytes of the registered buffers.
const BYTES: usize = 4096;

pub(super) fn measure() -> Result<Vec<Row>> {
    if let Some(obstacle) = Namespaces::obstacle() {
        return Ok(vec![Err(format!("a daemon with many connections: {obstacle}"))]);
    }
    let fabric = Fabric::new("limits", 1 + usize::from(REMOTES))?;
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let hosts = 0..=REMOTES;
    let daemons: Vec<_> =
        hosts.map(|host| start(&fabric, directory.path(), host)).collect::<Result<_>>().context("the daemons")?;
    let measured = Measured(&daemons[0]);
    let mut near = guests(directory.path(), 0, 1..=DEVICES)?;
    let far = (1..=REMOTES).map(|host| guests(directory.path(), host, DEVICES + host..=DEVICES + host));
    let mut far: Vec<_> = far.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
    for (a, b) in near.iter_mut().zip(&mut far) {
        connect_across(a, b, 19)?;
    }
    let cost_alone = measured.cost_of(&mut near, &far, &mut [])?;
    let memory_alone = measured.memory()?;
    let mut connected = connect_all(&mut near, &far)?;
    let memory_before = measured.memory()?;
    let idle = measured.processor(|| thread::sleep(WATCHED))?;
    let cost = measured.cost_of(&mut near, &far, &mut connected.qps)?;
    // A connection gets the state of the transport with its first request.
    let memory = measured.memory()?;
    log::info!(
        "memory of each process in KiB: {memory_alone:?} with a connection of each device, {memory_before:?} with all, \
         {memory:?} after their first requests"
    );
    let sum = |memory: &BTreeMap<u32, u64>| mebibytes(memory.values().sum());
    let outcome =
        Outcome { memory: [sum(&memory), sum(&memory_alone)], rate: connected.rate, idle, cost: [cost, cost_alone] };
    Ok(outcome.figures().into_iter().map(Ok).collect())
}

/// Results. A pair has the value with all connections, and that with one connection of each device.
struct Outcome {
    /// MiB.
    memory: [f64; 2],
    /// Queue pairs that are connected in a second, at last and at first.
    rate: [f64; 2],
    /// Percent of a core.
    idle: f64,
    /// Microseconds of processor time for a write.
    cost: [f64; 2],
}

impl Outcome {
    fn figures(self) -> [Figure; 4] {
        let all = format!("{DEVICES} devices and {ALL} QPs to {REMOTES} other daemons");
        let few = "a QP of each device";
        let connecting =
            format!("QPs of a daemon created and connected, {AT_ONCE} devices at a time, the last of {ALL}");
        let writing = format!("processor time of a daemon with {all}, for an 8-byte write, one a second on each QP");
        [
            Figure::of_rounds(
                "limits/memory",
                format!("memory of a daemon with {all}"),
                "MiB",
                true,
                &[self.memory],
                few,
            ),
            Figure::of_rounds("limits/connect", connecting, "/s", false, &[self.rate], "the first ones"),
            // Less than this cannot be told from nothing.
            Figure::against_target(
                "limits/idle",
                format!("processor time of a daemon with {all}, without traffic"),
                "% of a core",
                true,
                vec![self.idle.max(0.01)],
                1.0,
            ),
            Figure::of_rounds(
                "limits/steady",
                writing,
                "µs",
                true,
                &[self.cost],
                "as many writes on a QP of each device",
            ),
        ]
    }
}

/// Starts the daemon of a host: the measured one, or a remote one with its only device.
fn start(fabric: &Fabric, directory: &FilePath, host: u8) -> Result<Daemon> {
    let (peers, guests) = if host == 0 { (1..=REMOTES, 1..=DEVICES) } else { (0..=0, DEVICES + host..=DEVICES + host) };
    let remotes: String = peers.map(|peer| format!(",remote={}", address(peer.into()))).collect();
    let network = format!("name=far,uplink=vxlan:{}{remotes},mtu=1450", address(host.into()));
    let place = directory.join(host.to_string());
    fs::create_dir(&place).context("cannot create a directory")?;
    let device = |guest: u8| DaemonDevice {
        name: format!("vm{guest}"),
        socket: place.join(guest.to_string()),
        mac: mac(guest).to_string(),
        options: ",network=far,pin=off".to_owned(),
    };
    let setup = Setup { namespace: Some(fabric.host(host.into())), networks: &[network], ..Setup::default() };
    Daemon::launch(&setup, &place, &guests.map(device).collect::<Vec<_>>())
}

/// Connects to the devices of these guests on a host.
fn guests(directory: &FilePath, host: u8, numbers: std::ops::RangeInclusive<u8>) -> Result<Vec<Side>> {
    let place = directory.join(host.to_string());
    let guest =
        |guest: u8| Side::in_network(&place.join(guest.to_string()), guest, BYTES).context(format!("vm{guest}"));
    numbers.map(guest).collect()
}

/// Queue pairs of each near device, and the rates at which they were connected.
struct Connected {
    qps: Vec<Vec<Qp>>,
    /// Queue pairs that were connected in a second, at last and at first.
    rate: [f64; 2],
}

/// Creates queue pairs at all far devices, then creates and connects those of the near ones, which is timed, then
/// connects the far ones.
fn connect_all(near: &mut [Side], far: &[Side]) -> Result<Connected> {
    let create = |side: &Side| {
        let init = QpInit {
            max_send_wr: 1,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            ..QpInit::rc(&side.pd, &side.cq)
        };
        side.driver.create_qp(&init).context("CREATE_QP")
    };
    let of_far = usize::from(DEVICES) * EACH;
    let mut theirs: Vec<Vec<Qp>> =
        far.iter().map(|side| (0..of_far).map(|_| create(side)).collect()).collect::<Result<_>>()?;
    let path = |host: u8, qpn| Path { dmac: mac(host).0, timeout: 19, ..Path::to(gid(host), qpn) };
    let numbers: Vec<(u8, Vec<u32>)> =
        far.iter().zip(&theirs).map(|(side, qps)| (side.host, qps.iter().map(|qp| qp.qpn).collect())).collect();
    // Each thread sets up the connections of one device.
    let of_device = |(index, side): (usize, &mut Side)| -> Result<Vec<Qp>> {
        let peers =
            numbers.iter().flat_map(|(host, qpns)| qpns.iter().skip(index * EACH).take(EACH).map(|&qpn| (*host, qpn)));
        let connected = peers.map(|(host, qpn)| {
            let mut qp = create(side)?;
            qp.connect(&path(host, qpn)).context("connecting")?;
            Ok(qp)
        });
        connected.collect()
    };
    let (mut qps, mut rates) = (Vec::new(), Vec::new());
    for (group, sides) in near.chunks_mut(AT_ONCE).enumerate() {
        let began = Instant::now();
        let group = thread::scope(|scope| {
            let of_device = &of_device;
            let indexed = sides.iter_mut().enumerate().map(|(place, side)| (group * AT_ONCE + place, side));
            let threads: Vec<_> = indexed.map(|it| scope.spawn(move || of_device(it))).collect();
            let joined =
                threads.into_iter().map(|it| it.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            joined.collect::<Result<Vec<_>>>()
        })?;
        rates.push(count(group.len() * OF_DEVICE) / began.elapsed().as_secs_f64());
        qps.extend(group);
    }
    log::info!("queue pairs connected a second: {rates:.0?}");
    for (peer, side) in theirs.iter_mut().enumerate() {
        for (number, qp) in side.iter_mut().enumerate() {
            let (device, nth) = (number / EACH, number % EACH);
            qp.connect(&path(near[device].host, qps[device][peer * EACH + nth].qpn))
                .context("connecting the far end")?;
        }
    }
    Ok(Connected { qps, rate: [rates.last(), rates.first()].map(|rate| rate.copied().unwrap_or(f64::NAN)) })
}

/// The measured daemon.
struct Measured<'a>(&'a Daemon);

impl Measured<'_> {
    /// Returns the ids of all its processes.
    fn processes(&self) -> Result<BTreeSet<u32>> {
        let mut parents = BTreeMap::new();
        for entry in fs::read_dir("/proc").context("/proc")? {
            let Ok(pid) = entry?.file_name().to_string_lossy().parse::<u32>() else { continue };
            // A process that has ended meanwhile is not one of the daemon's.
            let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
            let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse().ok());
            parents.extend(parent.map(|parent: u32| (pid, parent)));
        }
        let mut found: BTreeSet<u32> = self.0.processes().collect();
        loop {
            let more: Vec<_> =
                parents.iter().filter(|(pid, parent)| found.contains(parent) && !found.contains(pid)).collect();
            if more.is_empty() {
                return Ok(found);
            }
            found.extend(more.into_iter().map(|(pid, _)| *pid));
        }
    }

    /// Returns the resident memory of each of its processes in KiB, without the guests' memory.
    fn memory(&self) -> Result<BTreeMap<u32, u64>> {
        let of = |pid: u32| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).context("a process has ended")?;
            let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
            let kib = line.and_then(|line| line.split_whitespace().next()?.parse().ok()).context("no RssAnon")?;
            Ok((pid, kib))
        };
        self.processes()?.into_iter().map(of).collect()
    }

    fn processor_ns(&self) -> Result<u64> {
        self.processes()?.into_iter().map(processor_ns).sum()
    }

    /// Returns the processor time that it uses during `work`, in percent of a core.
    fn processor(&self, work: impl FnOnce()) -> Result<f64> {
        let (before, began) = (self.processor_ns()?, Instant::now());
        work();
        let used = Duration::from_nanos(self.processor_ns()?.saturating_sub(before));
        Ok(used.as_secs_f64() * 100.0 / began.elapsed().as_secs_f64())
    }

    /// Returns the processor time of an 8-byte write in microseconds. In turn, each device writes on each of its `qps`,
    /// or as often on its first one, about once a second.
    fn cost_of(&self, near: &mut [Side], far: &[Side], qps: &mut [Vec<Qp>]) -> Result<f64> {
        let (mut writes, began) = (0_usize, Instant::now());
        let before = self.processor_ns()?;
        while began.elapsed() < WATCHED {
            for (index, side) in near.iter_mut().enumerate() {
                match qps.get_mut(index) {
                    Some(qps) => write_on_each(side, far, qps)?,
                    None => write_on_first(side, &far[index])?,
                }
                writes += OF_DEVICE;
                let due = Duration::from_secs(1).mul_f64(count(writes) / count(ALL));
                thread::sleep(due.saturating_sub(began.elapsed()));
            }
        }
        let elapsed = began.elapsed().as_secs_f64();
        let used = Duration::from_nanos(self.processor_ns()?.saturating_sub(before)).as_secs_f64();
        let rate = count(writes) / elapsed;
        log::info!("{rate:.0} writes a second with {:.1} % of a core", used * 100.0 / elapsed);
        // The result is the cost of a write, so the pace of the machine does not matter much.
        ensure!(rate > 0.25 * count(ALL), "only {rate:.0} writes a second");
        Ok(used * 1e6 / count(writes))
    }
}

/// Posts a write on each queue pair of a device, and takes the completions.
fn write_on_each(side: &mut Side, far: &[Side], qps: &mut [Qp]) -> Result<()> {
    for (number, qp) in qps.iter_mut().enumerate() {
        let write = [small_write(side, &far[number / EACH], qp)];
        ensure!(qp.post_encoded(&write, 1) == 1, "a send ring is full");
    }
    side.reap(u32::try_from(qps.len())?, ring)
}

/// Posts the same number of writes on the first queue pair, in parts for which its ring has room.
fn write_on_first(side: &mut Side, peer: &Side) -> Result<()> {
    const ROOM: usize = 64;
    let write = [small_write(side, peer, &side.qp)];
    for _ in 0..OF_DEVICE / ROOM {
        for _ in 0..ROOM {
            ensure!(side.qp.post_encoded(&write, 1) == 1, "the send ring is full");
        }
        side.reap(u32::try_from(ROOM)?, ring)?;
    }
    Ok(())
}

fn small_write(side: &Side, peer: &Side, qp: &Qp) -> Encoded {
    qp.encode(&SendWr::write(0, &[side.buffer.sge(&side.mr, 0, 8)], peer.buffer.va(), peer.mr.rkey))
}

#[expect(clippy::cast_precision_loss, reason = "figures have three digits")]
fn count(number: usize) -> f64 {
    number as f64
}

#[expect(clippy::cast_precision_loss, reason = "figures have three digits")]
fn mebibytes(kib: u64) -> f64 {
    kib as f64 / 1024.0
}
