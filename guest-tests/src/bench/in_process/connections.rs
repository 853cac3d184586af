//! Processor time of connections that the guests' `rdma_cm` makes.

use anyhow::{Result, ensure};
use pvrdma_dev::testing::{AddressHandle, Buffer, Cq, Mr, Path, Pd, Placement, Qp, QpInit, RecvWr, SendWr};
use pvrdma_rxe::{Rxe, RxeConfig};
use pvrdma_verbs::testing::gid;

use crate::bench::figure::Figure;
use crate::bench::wire::processor_time;
use crate::device_pair::{Side, SideOptions, mac};

/// Connections of a round.
const CONNECTIONS: u32 = 2000;
/// Size in bytes of a management datagram, and of the GRH in front of a received one.
const MAD: usize = 256;
const GRH: usize = 40;
/// Number of the QP for management datagrams, and its Q_Key.
const GSI: u32 = 1;
const GSI_QKEY: u32 = 0x8001_0000;
/// Goal in microseconds: ten thousand connections a second on one processor.
const TARGET: f64 = 100.0;

/// Measures all that a connection between two local guests costs the process: both QPs through their states, the five
/// datagrams from REQ to DREP, and the destruction of the QPs. The calls of the test driver are included.
pub(super) fn processor_time_of_one(runs: usize) -> Result<Figure> {
    let backend = Rxe::new(RxeConfig::default())?;
    let side = |host| Side::private(&backend, host, &SideOptions::new(1 << 20, Placement::Contiguous));
    let (a, b) = (side(1)?, side(2)?);
    let [mut a, mut b] = [Manager::new(&a, 2)?, Manager::new(&b, 1)?];
    let mut times = Vec::new();
    for _ in 0..runs {
        let start = processor_time();
        for _ in 0..CONNECTIONS {
            connect_and_close(&mut a, &mut b)?;
        }
        times.push((processor_time() - start) * 1e6 / f64::from(CONNECTIONS));
    }
    let title = "processor time of a connection by rdma_cm, from creation to destruction of both QPs".to_owned();
    Ok(Figure::against_target("in-process/connection", title, "µs", true, times, TARGET))
}

/// The order of the kernel's connection manager and of `rdma_cm` programs.
fn connect_and_close<'a>(a: &mut Manager<'a>, b: &mut Manager<'a>) -> Result<()> {
    let mut active = a.create_qp()?;
    a.send_to(b, "REQ")?;
    let mut passive = b.create_qp()?;
    passive.connect(&b.path(active.qpn))?;
    b.send_to(a, "REP")?;
    active.connect(&a.path(passive.qpn))?;
    a.send_to(b, "RTU")?;
    active.to_error()?;
    a.send_to(b, "DREQ")?;
    passive.to_error()?;
    b.send_to(a, "DREP")?;
    active.destroy()?;
    passive.destroy()?;
    Ok(())
}

/// The connection manager of a guest.
struct Manager<'a> {
    side: &'a Side,
    /// The other host.
    peer: u8,
    pd: Pd,
    gsi: Qp,
    cq: Cq,
    buffer: Buffer,
    mr: Mr,
}

impl<'a> Manager<'a> {
    fn new(side: &'a Side, peer: u8) -> Result<Self> {
        // Objects of the kernel, which has all memory in one region.
        let driver = &side.driver;
        let (pd, cq) = (driver.create_pd(None)?, driver.create_cq(None, 1024)?);
        let mut gsi = driver.create_qp(&QpInit::gsi(&pd, &cq))?;
        gsi.start_datagrams(GSI_QKEY)?;
        let (mr, buffer) = (driver.dma_mr(&pd)?, driver.buffer(8192, 0, Placement::Contiguous));
        Ok(Self { side, peer, pd, gsi, cq, buffer, mr })
    }

    fn create_qp(&self) -> Result<Qp> {
        let side = self.side;
        Ok(side.driver.create_qp(&QpInit { max_send_wr: 16, max_recv_wr: 16, ..QpInit::rc(&side.pd, &side.cq) })?)
    }

    fn path(&self, peer: u32) -> Path {
        Path { dmac: mac(self.peer).0, ..Path::to(gid(self.peer), peer) }
    }

    /// Sends a datagram to the other manager, which has posted a receive for it.
    fn send_to(&mut self, other: &mut Self, name: &str) -> Result<()> {
        other.gsi.post_recv(&[RecvWr::new(0, &[other.buffer.dma_sge(other.mr.lkey, 0, GRH + MAD)])])?;
        let to = AddressHandle { dmac: mac(self.peer).0, ..AddressHandle::new(self.pd.handle, gid(self.peer)) };
        let from = self.buffer.dma_sge(self.mr.lkey, 4096, MAD);
        self.gsi.post_send(&[SendWr::datagram(0, &[from], &to, GSI, GSI_QKEY)])?;
        for cq in [&mut self.cq, &mut other.cq] {
            let (done, failed) = loop {
                let reaped = cq.reap(1);
                if reaped.0 > 0 {
                    break reaped;
                }
                std::hint::spin_loop();
            };
            ensure!((done, failed) == (1, 0), "{name} was not delivered");
        }
        Ok(())
    }
}
