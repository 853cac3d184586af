//! Two devices with a connection between them.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use pvrdma_dev::testing::{
    Buffer, Context, Cq, Driver, GuestMemory, Irqs, Mr, Path, Pd, Placement, Qp, QpInit, access,
};
use pvrdma_dev::{DeviceConfig, PvrdmaDevice};
use pvrdma_rxe::{Rxe, RxeConfig};
use pvrdma_verbs::{Gid, MacAddr};

/// Requests per queue.
pub(super) const DEPTH: u32 = 256;

/// One side of the connection, as a guest process has it.
pub(super) struct Side {
    pub(super) memory: Arc<GuestMemory>,
    pub(super) driver: Driver,
    pub(super) pd: Pd,
    pub(super) cq: Cq,
    pub(super) qp: Qp,
    pub(super) buffer: Buffer,
    pub(super) mr: Mr,
    _context: Context,
}

fn gid(host: u8) -> Gid {
    let mut gid = Gid::default();
    gid.0[10..12].fill(0xff);
    gid.0[12..].copy_from_slice(&[10, 0, 0, host]);
    gid
}

impl Side {
    fn new(backend: &Rxe, host: u8, bytes: usize, spare: usize) -> Result<Self> {
        let (memory, irqs) = (GuestMemory::new(bytes + spare), Irqs::new());
        // Rings take scattered pages. This keeps a piece for the buffer in one.
        let reserved = memory.alloc(bytes.div_ceil(4096), Placement::Contiguous);
        let config = DeviceConfig::new(format!("bench{host}"), MacAddr([0x52, 0x54, 0, 0, 0, host]));
        let device = PvrdmaDevice::new(config, Arc::clone(memory.space()), irqs.clone(), backend)?;
        let driver = Driver::probe(device, &memory, &irqs)?;
        driver.bind_gid(0, gid(host))?;
        let context = driver.open()?;
        let pd = driver.create_pd(Some(&context))?;
        let cq = driver.create_cq(Some(&context), 2 * DEPTH)?;
        let qp = driver.create_qp(&QpInit { max_send_wr: DEPTH, max_recv_wr: DEPTH, ..QpInit::rc(&pd, &cq) })?;
        memory.free(&reserved);
        let buffer = driver.buffer(bytes, 0, Placement::Contiguous);
        buffer.fill_pattern(host.into());
        let mr = driver.reg_mr(&pd, &buffer, access::ALL)?;
        Ok(Self { memory, driver, pd, cq, qp, buffer, mr, _context: context })
    }

    /// Waits for `count` completions.
    pub(super) fn reap(&mut self, count: u32) -> Result<()> {
        let mut left = count;
        while left > 0 {
            let (done, failed) = self.cq.reap(left);
            anyhow::ensure!(failed == 0, "{failed} requests failed");
            if done == 0 {
                std::hint::spin_loop();
            }
            left -= done;
        }
        Ok(())
    }
}

/// Two connected sides, each with a registered buffer of `bytes`.
pub(super) fn connected(bytes: usize) -> Result<[Side; 2]> {
    connected_with_spare(bytes, 64 << 20)
}

/// The same with a choice of how much more memory the guests have.
pub(super) fn connected_with_spare(bytes: usize, spare: usize) -> Result<[Side; 2]> {
    let backend = Rxe::new(RxeConfig::default())?;
    let mut a = Side::new(&backend, 1, bytes, spare).context("cannot set up the first side")?;
    let mut b = Side::new(&backend, 2, bytes, spare).context("cannot set up the second side")?;
    a.qp.connect(&Path::to(gid(2), b.qp.qpn))?;
    b.qp.connect(&Path::to(gid(1), a.qp.qpn))?;
    Ok([a, b])
}
