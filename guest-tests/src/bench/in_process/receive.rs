//! What a device does with packets that come, and nothing else: they are recorded once, and a link brings them as fast
//! as they are taken.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pvrdma_dev::testing::{Encoded, Path, Placement, Qp, QpInit, RecvWr, SendWr};
use pvrdma_ether_link::memory::{self, MemoryLink};
use pvrdma_ether_link::{Bell, Frames, Link, LinkInspect, Readiness};
use pvrdma_rxe::{PortConfig, PortRules, Rxe, RxeConfig, Uplink};
use pvrdma_verbs::testing::gid;

use crate::bench::figure::Figure;
use crate::device_pair::{Side, SideOptions, mac};

/// Connections, and what each brings.
const QPS: usize = 8;
const WRITES: usize = 8;
const WRITE: usize = 1 << 20;
/// Packets of a connection that follow each other: a super-frame of packets of 1024 bytes, as in a network with an MTU
/// of 1500.
const RUN: usize = 44;
/// Position of the destination QP in an Ethernet frame with IPv4, UDP and BTH.
const DESTINATION_QP: std::ops::Range<usize> = 47..50;

/// RDMA writes that come for a port with two threads, against one.
pub(super) fn threads(runs: usize) -> Result<Figure> {
    let (mut two, mut one) = (Receiver::new(2)?, Receiver::new(1)?);
    let rounds = (0..runs).map(|_| Ok([two.play()?, one.play()?])).collect::<Result<Vec<_>>>()?;
    let title = format!("received RDMA writes of {QPS} QPs, a port with two threads");
    Ok(Figure::of_rounds("in-process/receive-threads", title, "GB/s", false, &rounds, "one thread"))
}

/// A device on a link, with queue pairs.
struct Station {
    side: Side,
    qps: Vec<Qp>,
    _uplink: Uplink,
}

impl Station {
    fn new(host: u8, link: Arc<dyn Link>, port_threads: usize) -> Result<Self> {
        let backend = Rxe::new(RxeConfig { port_threads, ..RxeConfig::default() })?;
        let config = PortConfig { uplink: link, nic: None, mtu: 4500, rules: PortRules::default() };
        let uplink = backend.plug(mac(host), config)?;
        let side = Side::private(&backend, host, &SideOptions::new(QPS * WRITE, Placement::Contiguous))?;
        let one = || side.driver.create_qp(&QpInit { max_recv_wr: 8, ..QpInit::rc(&side.pd, &side.cq) });
        let qps = (0..QPS).map(|_| one()).collect::<Result<_, _>>()?;
        Ok(Self { side, qps, _uplink: uplink })
    }

    /// Connects each queue pair with that of the same place at the other host, with a receive.
    fn connect(&mut self, peers: &[u32]) -> Result<()> {
        let host = 3 - self.side.host;
        for (qp, &peer) in self.qps.iter_mut().zip(peers) {
            qp.connect(&Path {
                mtu: if std::env::var_os("M5").is_some() { 5 } else { 3 },
                dmac: mac(host).0,
                ..Path::to(gid(host), peer)
            })?;
            ensure!(qp.post_encoded_recv(&[RecvWr::new(0, &[]).encode()], 1) == 1, "the receive ring is full");
        }
        Ok(())
    }

    fn qpns(&self) -> Vec<u32> {
        self.qps.iter().map(|qp| qp.qpn).collect()
    }
}

/// A station to which a tape brings writes.
struct Receiver {
    station: Station,
    tape: Arc<Tape>,
    peers: Vec<u32>,
}

impl Receiver {
    /// Records writes to a station whose port has so many threads, the last of each queue pair with immediate data.
    fn new(port_threads: usize) -> Result<Self> {
        let (ours, theirs) = memory::pair(10_000)?;
        let tape =
            Arc::new(Tape { cable: theirs, frames: Mutex::default(), next: AtomicUsize::new(0), more: Bell::new()? });
        let mut to = Station::new(2, Arc::clone(&tape) as _, port_threads)?;
        let mut from = Station::new(1, Arc::new(ours), 1)?;
        let peers = from.qpns();
        to.connect(&peers)?;
        from.connect(&to.qpns())?;
        for (index, qp) in from.qps.iter_mut().enumerate() {
            let local = [from.side.buffer.sge(&from.side.mr, index * WRITE, WRITE)];
            let remote = to.side.buffer.va() + (index * WRITE) as u64;
            let write = SendWr::write(0, &local, remote, to.side.mr.rkey);
            let mut list: Vec<Encoded> = vec![qp.encode(&write); WRITES - 1];
            list.push(qp.encode(&write.immediate([0; 4])));
            let count = u32::try_from(WRITES)?;
            ensure!(qp.post_encoded(&list, count) == count, "the send ring is full");
            from.side.reap(count, |_| thread::yield_now())?;
        }
        to.side.reap(u32::try_from(QPS)?, |_| thread::yield_now())?;
        drop(from);
        tape.interleave(&to.qpns());
        Ok(Self { station: to, tape, peers })
    }

    /// Brings everything once more, and gives how many bytes were written in a second, in GB.
    #[expect(clippy::cast_precision_loss, reason = "figures have three digits")]
    fn play(&mut self) -> Result<f64> {
        for qp in &mut self.station.qps {
            qp.to_reset()?;
        }
        self.station.connect(&self.peers)?;
        let came = |side: &Side| side.counter("wire_frames_received").context("no counter");
        let before = came(&self.station.side)?;
        let start = Instant::now();
        let frames = self.tape.play();
        // Both processors are for the port.
        self.station.side.reap(u32::try_from(QPS)?, |_| thread::sleep(Duration::from_micros(200)))?;
        let seconds = start.elapsed().as_secs_f64();
        let received = came(&self.station.side)? - before;
        ensure!(received == frames as u64, "{received} of {frames} packets came");
        Ok((QPS * WRITES * WRITE) as f64 / seconds / 1e9)
    }
}

/// An end of a cable that remembers what came, and brings it again.
#[derive(Debug)]
struct Tape {
    cable: MemoryLink,
    frames: Mutex<Vec<Vec<u8>>>,
    /// What comes next, behind the end while nothing is brought.
    next: AtomicUsize,
    /// Readable while something is.
    more: Bell,
}

impl Tape {
    fn frames(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.frames.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps what is for these queue pairs, in turns, as if all had sent at the same time.
    fn interleave(&self, qpns: &[u32]) {
        let mut frames = self.frames();
        let mut lists = vec![Vec::new(); qpns.len()];
        for frame in frames.drain(..) {
            let qpn = frame.get(DESTINATION_QP).and_then(|bytes| bytes.first_chunk());
            let qpn = qpn.map(|&[a, b, c]| u32::from_be_bytes([0, a, b, c]));
            if let Some(list) = qpns.iter().position(|&of| Some(of) == qpn).and_then(|at| lists.get_mut(at)) {
                list.push(frame);
            }
        }
        let mut lists: Vec<_> = lists.into_iter().map(Vec::into_iter).collect();
        while lists.iter().any(|list| list.len() > 0) {
            lists.iter_mut().for_each(|list| frames.extend(list.take(RUN)));
        }
        self.next.store(frames.len(), Ordering::SeqCst);
    }

    /// Begins to bring everything, and gives how many frames that are.
    fn play(&self) -> usize {
        self.next.store(0, Ordering::SeqCst);
        self.more.ring();
        self.frames().len()
    }
}

impl Link for Tape {
    fn receive(&self, frames: &mut Frames, most: usize) {
        let mut tape = self.frames();
        let next = self.next.load(Ordering::SeqCst);
        if next < tape.len() {
            let end = next.saturating_add(most).min(tape.len());
            tape.iter().take(end).skip(next).for_each(|frame| frames.push(frame));
            self.next.store(end, Ordering::SeqCst);
            if end == tape.len() {
                self.more.clear();
            }
            return;
        }
        let before = frames.len();
        self.cable.receive(frames, most);
        tape.extend(frames.iter_from(before).map(<[u8]>::to_vec));
        self.next.store(tape.len(), Ordering::SeqCst);
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        self.cable.send(frames, from);
        // Nobody reads it later on.
        frames.len() - from
    }

    fn readiness(&self) -> Readiness {
        Readiness { changed: Some(self.more.descriptor()), ..self.cable.readiness() }
    }

    fn lost(&self) -> u64 {
        self.cable.lost()
    }

    fn inspect(&self) -> LinkInspect {
        self.cable.inspect()
    }
}
