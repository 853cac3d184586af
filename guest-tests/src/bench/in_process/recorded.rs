//! Devices that only receive RDMA writes that were recorded once.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pvrdma_dev::testing::{Encoded, Path, Placement, Qp, QpInit, RecvWr, SendWr};
use pvrdma_link::{
    Link, memory,
    switch::{Switch, UnknownUnicast},
};
use pvrdma_rxe::{PortConfig, PortRules, Rxe, RxeConfig, RxeStation};
use pvrdma_verbs::testing::gid;
use pvrdma_verbs_types::Mtu;

use super::tape::{Tape, Way};
use crate::bench::wire::processor_time;
use crate::device_pair::{Side, SideOptions, mac};

/// Writes of a connection.
const WRITES: usize = 8;
/// Number of the sending host; the others receive.
const SENDER: u8 = 1;
/// IP MTU.
const MTU: u32 = 1500;

/// Recorded load.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    /// Number of devices, each with the same number of connections.
    pub(super) devices: u8,
    pub(super) connections: usize,
    /// Bytes of a write.
    pub(super) write: usize,
    /// Maximum number of packets of a connection in flight.
    pub(super) window: usize,
    /// A switch is between the devices and the link, as in a network.
    pub(super) switched: bool,
    /// Threads of each device's port.
    pub(super) port_threads: usize,
}

impl Load {
    fn of_a_device(&self) -> usize {
        self.connections / usize::from(self.devices)
    }
}

/// Cost of receiving all packets.
#[derive(Clone, Copy, Debug)]
pub(super) struct Played {
    pub(super) bytes: usize,
    pub(super) packets: usize,
    pub(super) seconds: f64,
    /// Seconds of processor time of this process, including the thread that delivers the packets.
    pub(super) processor: f64,
}

/// A device on a link, with queue pairs.
pub(super) struct Station {
    pub(super) side: Side,
    pub(super) qps: Vec<Qp>,
    /// The largest path MTU of its network.
    path_mtu: Mtu,
    _station: RxeStation,
}

impl Station {
    /// Creates a device with queue pairs and a buffer for a write of each, in a network with these rules and this MTU.
    pub(super) fn new(
        backend: &Rxe,
        host: u8,
        (link, rules): (Arc<dyn Link>, PortRules),
        (qps, write): (usize, usize),
        mtu: u32,
    ) -> Result<Self> {
        let station = backend.station(mac(host));
        station.plug(PortConfig::new(link, mtu).with_rules(rules))?;
        let side = Side::private(backend, host, &SideOptions::new(qps * write, Placement::Contiguous))?;
        let one = || side.driver.create_qp(&QpInit { max_recv_wr: 8, ..QpInit::rc(&side.pd, &side.cq) });
        let qps = (0..qps).map(|_| one()).collect::<Result<_, _>>()?;
        let path_mtu = if mtu > 4200 { Mtu::M4096 } else { Mtu::M1024 };
        Ok(Self { side, qps, path_mtu, _station: station })
    }

    /// Connects each queue pair with the one at the same index in the list, and posts a receive.
    pub(super) fn connect(&mut self, peers: &[(u8, u32)]) -> Result<()> {
        for (qp, &(host, peer)) in self.qps.iter_mut().zip(peers) {
            qp.connect(&Path { mtu: self.path_mtu as u32, dmac: mac(host).0, ..Path::to(gid(host), peer) })?;
            ensure!(qp.post_encoded_recv(&[RecvWr::new(0, &[]).encode()], 1) == 1, "the receive ring is full");
        }
        Ok(())
    }

    pub(super) fn addresses(&self) -> impl Iterator<Item = (u8, u32)> {
        self.qps.iter().map(|qp| (self.side.host, qp.qpn))
    }

    /// Waits until all data on each connection has arrived. It sleeps, so that both processors are left to the ports.
    fn reap(&mut self) -> Result<()> {
        self.side.reap(u32::try_from(self.qps.len())?, |_| thread::sleep(Duration::from_micros(200)))
    }
}

/// Devices of a network, to which a tape replays writes.
pub(super) struct Receivers {
    stations: Vec<Station>,
    tape: Arc<Tape>,
    /// The sender's end of each station's connections.
    peers: Vec<Vec<(u8, u32)>>,
    load: Load,
    switch: Switch,
}

impl Receivers {
    /// Records the writes, the last of each queue pair with immediate data.
    pub(super) fn new(load: Load) -> Result<Self> {
        let (ours, theirs) = memory::pair(10_000)?;
        let tape = Arc::new(Tape::new(theirs, load.window)?);
        let switch = Switch::new(Some(Arc::clone(&tape) as _), MTU)?;
        let config = RxeConfig::default().with_port_threads(load.port_threads);
        let backend = Rxe::new(config)?;
        let each = load.of_a_device();
        let station = |index| {
            let host = SENDER + 1 + index;
            let port = || switch.port(mac(host), UnknownUnicast::Drop);
            let link = if load.switched { port()? as _ } else { Arc::clone(&tape) as Arc<dyn Link> };
            Station::new(&backend, host, (link, PortRules::default()), (each, load.write), MTU)
        };
        let mut stations = (0..load.devices).map(station).collect::<Result<Vec<_>>>()?;
        let sender = Rxe::new(RxeConfig::default())?;
        let link = (Arc::new(ours) as _, PortRules::default());
        let mut from = Station::new(&sender, SENDER, link, (load.connections, load.write), MTU)?;
        let targets: Vec<_> = stations.iter().flat_map(Station::addresses).collect();
        from.connect(&targets)?;
        let peers: Vec<Vec<_>> = from.addresses().collect::<Vec<_>>().chunks(each).map(<[_]>::to_vec).collect();
        for (station, peers) in stations.iter_mut().zip(&peers) {
            station.connect(peers)?;
        }
        let way = |(&(host, to), &(_, from)): (&(u8, u32), &(u8, u32))| Way { mac: mac(host).0, to, from };
        tape.set_ways(&targets.iter().zip(peers.iter().flatten()).map(way).collect::<Vec<_>>());
        for (index, qp) in from.qps.iter_mut().enumerate() {
            let to = stations.get(index / each).context("no station")?;
            let local = [from.side.buffer.sge(&from.side.mr, index * load.write, load.write)];
            let remote = to.side.buffer.va() + (index % each * load.write) as u64;
            let write = SendWr::write(0, &local, remote, to.side.mr.rkey);
            let mut list: Vec<Encoded> = vec![qp.encode(&write); WRITES - 1];
            list.push(qp.encode(&write.immediate([0; 4])));
            let count = u32::try_from(WRITES)?;
            ensure!(qp.post_encoded(&list, count) == count, "the send ring is full");
            from.side.reap(count, |_| thread::yield_now())?;
        }
        stations.iter_mut().try_for_each(Station::reap)?;
        Ok(Self { stations, tape, peers, load, switch })
    }

    /// Replays everything once more.
    pub(super) fn play(&mut self) -> Result<Played> {
        for (station, peers) in self.stations.iter_mut().zip(&self.peers) {
            station.qps.iter_mut().try_for_each(|qp| qp.to_reset())?;
            station.connect(peers)?;
        }
        let before = self.received()?;
        let (start, processor) = (Instant::now(), processor_time());
        let packets = self.tape.play();
        self.switch.uplink_changed();
        self.stations.iter_mut().try_for_each(Station::reap)?;
        let (seconds, processor) = (start.elapsed().as_secs_f64(), processor_time() - processor);
        let received = self.received()? - before;
        ensure!(received == packets as u64, "{received} of {packets} packets came");
        Ok(Played { bytes: self.load.connections * WRITES * self.load.write, packets, seconds, processor })
    }

    fn received(&self) -> Result<u64> {
        let of = |station: &Station| station.side.counter("wire_frames_received").context("no counter");
        self.stations.iter().map(of).sum()
    }
}
