//! Two devices of the in-process driver on one backend, with a connection between them.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use pvrdma_dev::testing::{
    Buffer, Context, Cq, Driver, GuestMemory, Irqs, Mr, Path, Pd, Placement, Qp, QpInit, access,
};
use pvrdma_dev::{DeviceConfig, Limits, PciFunction, PvrdmaDevice};
use pvrdma_verbs::{Backend, Counter, Gid, MacAddr};
use pvrdmad::testing::RemoteFunction;
use rustix::fs::MemfdFlags;

/// What a guest needs beside its buffer.
const OTHER_MEMORY: usize = 16 << 20;
/// Requests per queue.
pub(super) const DEPTH: u32 = 64;

/// One side of the connection, as a guest process has it.
pub(super) struct Side {
    pub(super) host: u8,
    pub(super) driver: Driver,
    pub(super) pd: Pd,
    pub(super) cq: Cq,
    pub(super) qp: Qp,
    pub(super) buffer: Buffer,
    pub(super) mr: Mr,
    pub(super) context: Context,
    counters: Box<dyn Fn() -> Vec<Counter>>,
}

/// The GID of a guest.
pub(super) fn gid(host: u8) -> Gid {
    let mut gid = Gid::default();
    gid.0[10..12].fill(0xff);
    gid.0[12..].copy_from_slice(&[10, 0, 0, host]);
    gid
}

impl Side {
    /// A device with a process that has a QP and a registered buffer of `bytes`.
    pub(super) fn new<B: Backend + 'static>(backend: &B, host: u8, bytes: usize, placement: Placement) -> Result<Self> {
        Self::with_limits(backend, host, bytes, placement, Limits::default())
    }

    /// The same, of a device with limits of its own.
    pub(super) fn with_limits<B: Backend + 'static>(
        backend: &B,
        host: u8,
        bytes: usize,
        placement: Placement,
        limits: Limits,
    ) -> Result<Self> {
        let (memory, irqs) = (GuestMemory::shared(bytes + OTHER_MEMORY), Irqs::new());
        let mac = MacAddr([0x52, 0x54, 0, 0, 0, host]);
        let config = DeviceConfig { limits, ..DeviceConfig::new(format!("guest{host}"), mac) };
        let device = PvrdmaDevice::new(config, Arc::clone(memory.space()), irqs.clone(), backend)?;
        let observed = Arc::clone(&device);
        let side = Self::on(device, &memory, &irqs, host, bytes, placement)?;
        Ok(Self { counters: Box::new(move || observed.status().adapter), ..side })
    }

    /// The same of a device behind a socket.
    pub(super) fn at(socket: &std::path::Path, host: u8, bytes: usize, placement: Placement) -> Result<Self> {
        let file = File::from(rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC)?);
        file.set_len((bytes + OTHER_MEMORY) as u64)?;
        let (device, irqs) = RemoteFunction::connect(socket, &file)?;
        Self::on(device, &GuestMemory::in_file(file), &irqs, host, bytes, placement)
    }

    fn on(
        device: Arc<dyn PciFunction>,
        memory: &Arc<GuestMemory>,
        irqs: &Arc<Irqs>,
        host: u8,
        bytes: usize,
        placement: Placement,
    ) -> Result<Self> {
        // Rings take scattered pages. This keeps a piece for the buffer in one.
        let reserved = memory.alloc(bytes.div_ceil(4096), placement);
        let driver = Driver::probe(device, memory, irqs).context("probe")?;
        driver.bind_gid(0, gid(host))?;
        let context = driver.open()?;
        let pd = driver.create_pd(Some(&context))?;
        let cq = driver.create_cq(Some(&context), 4 * DEPTH)?;
        let qp = driver.create_qp(&QpInit { max_send_wr: DEPTH, max_recv_wr: DEPTH, ..QpInit::rc(&pd, &cq) })?;
        memory.free(&reserved);
        let buffer = driver.buffer(bytes, 0, placement);
        buffer.fill_pattern(host.into());
        let mr = driver.reg_mr(&pd, &buffer, access::ALL)?;
        let counters = Box::new(Vec::new);
        Ok(Self { host, driver, pd, cq, qp, buffer, mr, context, counters })
    }

    /// A counter of the adapter. There are none behind a socket.
    pub(super) fn counter(&self, name: &str) -> Option<u64> {
        (self.counters)().into_iter().find_map(|counter| (counter.name == name).then_some(counter.value))
    }
}

/// Two connected sides, each with a registered buffer of `bytes`.
pub(super) fn connected<B: Backend + 'static>(backend: &B, bytes: usize, placement: Placement) -> Result<[Side; 2]> {
    let a = Side::new(backend, 1, bytes, placement).context("the first side")?;
    let b = Side::new(backend, 2, bytes, placement).context("the second side")?;
    connect(a, b)
}

/// The same of two devices behind sockets.
pub(super) fn connected_at(sockets: &[PathBuf; 2], bytes: usize) -> Result<[Side; 2]> {
    let a = Side::at(&sockets[0], 1, bytes, Placement::Scattered).context("the first side")?;
    let b = Side::at(&sockets[1], 2, bytes, Placement::Scattered).context("the second side")?;
    connect(a, b)
}

fn connect(mut a: Side, mut b: Side) -> Result<[Side; 2]> {
    a.qp.connect(&Path::to(gid(2), b.qp.qpn)).context("connecting the first side")?;
    b.qp.connect(&Path::to(gid(1), a.qp.qpn)).context("connecting the second side")?;
    Ok([a, b])
}
