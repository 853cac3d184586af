//! Two devices driven by the in-process driver, with a connection between them as guest processes would set up.

use std::fs::File;
use std::hint;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use pvrdma_base::Counter;
use pvrdma_dev::{
    DeviceConfig, Limits, PvrdmaDevice,
    testing::{
        Buffer, Context, Cq, Driver, Encoded, GuestMemory, Irqs, Mr, Path, Pd, Placement, Qp, QpInit, SendWr, access,
    },
};
use pvrdma_packet::MacAddr;
use pvrdma_pci_function::PciFunction;
use pvrdma_verbs::{AddressRule, Backend, Rules, testing::gid};
use pvrdmad::testing::RemoteFunction;
use rustix::fs::MemfdFlags;

/// Parameters of a side.
#[derive(Clone, Debug)]
pub(crate) struct SideOptions {
    /// Bytes of the registered buffer.
    pub(crate) bytes: usize,
    /// Bytes of guest memory in addition to the buffer.
    pub(crate) other_memory: usize,
    /// Placement of the buffer in memory. Rings use scattered pages.
    pub(crate) placement: Placement,
    /// Requests per queue.
    pub(crate) depth: u32,
    /// Entries of the CQ.
    pub(crate) cq_entries: u32,
    /// The device's limits.
    pub(crate) limits: Limits,
    /// The buffer has the virtual address that this process has for it, and is contiguous.
    pub(crate) in_place: bool,
    /// Ports on which the host listens for the guest.
    pub(crate) listen: Vec<u16>,
}

impl SideOptions {
    /// Returns the options for checks, with a buffer of `bytes`.
    pub(crate) fn new(bytes: usize, placement: Placement) -> Self {
        let (limits, listen) = (Limits::default(), Vec::new());
        let in_place = false;
        Self { bytes, other_memory: 16 << 20, placement, depth: 64, cq_entries: 256, limits, in_place, listen }
    }
}

/// One side of the connection.
pub(crate) struct Side {
    /// Last byte of its address, 10.0.0.x.
    pub(crate) host: u8,
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) driver: Driver,
    pub(crate) pd: Pd,
    pub(crate) cq: Cq,
    pub(crate) qp: Qp,
    pub(crate) buffer: Buffer,
    pub(crate) mr: Mr,
    pub(crate) context: Context,
    counters: Box<dyn Fn() -> Vec<Counter> + Send>,
}

impl Side {
    /// Creates a device with a process that has a QP and a registered buffer. Guest memory is a file, so that host
    /// adapters can map it.
    pub(crate) fn new<B: Backend<Hca: 'static>>(backend: &B, host: u8, options: &SideOptions) -> Result<Self> {
        let memory = GuestMemory::shared(options.bytes + options.other_memory);
        Self::with_memory(backend, host, options, &memory)
    }

    /// Same as [`new`](Self::new), with memory that is private to this process.
    pub(crate) fn private<B: Backend<Hca: 'static>>(backend: &B, host: u8, options: &SideOptions) -> Result<Self> {
        let memory = GuestMemory::new(options.bytes + options.other_memory);
        Self::with_memory(backend, host, options, &memory)
    }

    /// Same as [`new`](Self::new), with this memory, which has room for the buffer and the rest.
    pub(crate) fn with_memory<B: Backend<Hca: 'static>>(
        backend: &B,
        host: u8,
        options: &SideOptions,
        memory: &Arc<GuestMemory>,
    ) -> Result<Self> {
        let irqs = Irqs::new();
        // Tests on the host's adapter give the host the same address.
        let addresses = AddressRule { listed: vec![[10, 0, 0, host].into()], ..AddressRule::default() };
        let rules = Rules::default().with_addresses(addresses).with_listen(options.listen.clone());
        let config = DeviceConfig::new(format!("guest{host}")).with_limits(options.limits).with_rules(rules);
        let device = PvrdmaDevice::new(config, Arc::clone(memory.space()), irqs.clone(), &backend.station(mac(host))?)?;
        let observed = Arc::clone(&device);
        let side = Self::on(device, memory, &irqs, host, options)?;
        Ok(Self { counters: Box::new(move || observed.status().adapter), ..side })
    }

    /// Does the same for a device behind a socket.
    fn at(socket: &std::path::Path, host: u8, options: &SideOptions, connect: Connect) -> Result<Self> {
        let file = File::from(rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC)?);
        file.set_len((options.bytes + options.other_memory) as u64)?;
        let (device, irqs) = connect(socket, &file)?;
        Self::on(device, &GuestMemory::in_file(file), &irqs, host, options)
    }

    fn on(
        device: Arc<dyn PciFunction>,
        memory: &Arc<GuestMemory>,
        irqs: &Arc<Irqs>,
        host: u8,
        options: &SideOptions,
    ) -> Result<Self> {
        let SideOptions { bytes, placement, depth, cq_entries, in_place, .. } = *options;
        // Rings use scattered pages. Reserving first keeps one contiguous piece for the buffer.
        let reserved = memory.alloc(bytes.div_ceil(4096), placement);
        let driver = Driver::probe(device, memory, irqs).context("probe")?;
        driver.bind_gid(0, gid(host))?;
        let context = driver.open()?;
        let pd = driver.create_pd(Some(&context))?;
        let cq = driver.create_cq(Some(&context), cq_entries)?;
        let qp = driver.create_qp(&QpInit { max_send_wr: depth, max_recv_wr: depth, ..QpInit::rc(&pd, &cq) })?;
        memory.free(&reserved);
        let buffer = if in_place { driver.buffer_in_place(bytes) } else { driver.buffer(bytes, 0, placement) };
        buffer.fill_pattern(host.into());
        let mr = driver.reg_mr(&pd, &buffer, access::ALL)?;
        let (memory, counters) = (Arc::clone(memory), Box::new(Vec::new));
        Ok(Self { host, memory, driver, pd, cq, qp, buffer, mr, context, counters })
    }

    /// Returns a counter of the adapter. A device behind a socket has none.
    pub(crate) fn counter(&self, name: &str) -> Option<u64> {
        (self.counters)().into_iter().find_map(|counter| (counter.name == name).then_some(counter.value))
    }

    /// Waits for `count` completions; calls `idle` whenever there is none.
    pub(crate) fn reap(&mut self, count: u32, idle: impl Fn(&mut Cq)) -> Result<()> {
        let mut left = count;
        while left > 0 {
            let (done, failed) = self.cq.reap(left);
            ensure!(failed == 0, "{failed} requests failed");
            if done == 0 {
                idle(&mut self.cq);
            }
            left -= done;
        }
        Ok(())
    }

    /// Posts `total` requests in batches and reaps the completions of each batch before the next.
    pub(crate) fn post_and_reap(
        &mut self,
        elements: &[Encoded],
        total: u32,
        batch: u32,
        idle: impl Fn(&mut Cq) + Copy,
    ) -> Result<()> {
        let mut done = 0;
        while done < total {
            let now = (total - done).min(batch);
            let at = done as usize % elements.len();
            let end = (at + now as usize).min(elements.len());
            let posted = self.qp.post_encoded(elements.get(at..end).unwrap_or(elements), now);
            ensure!(posted == now, "the send ring is full");
            self.reap(now, idle)?;
            done += now;
        }
        Ok(())
    }

    /// Returns writes of `size` bytes that walk through the buffers of both sides.
    pub(crate) fn writes(&self, to: &Self, size: usize) -> impl Iterator<Item = Encoded> {
        (0..self.buffer.len() / size).map(move |i| {
            let remote = to.buffer.va() + (i * size) as u64;
            self.qp.encode(&SendWr::write(0, &[self.buffer.sge(&self.mr, i * size, size)], remote, to.mr.rkey))
        })
    }

    /// Returns reads that do the same.
    pub(crate) fn reads(&self, from: &Self, size: usize) -> impl Iterator<Item = Encoded> {
        (0..self.buffer.len() / size).map(move |i| {
            let remote = from.buffer.va() + (i * size) as u64;
            self.qp.encode(&SendWr::read(0, &[self.buffer.sge(&self.mr, i * size, size)], remote, from.mr.rkey))
        })
    }
}

/// Polls again immediately.
pub(crate) fn spin(_: &mut Cq) {
    hint::spin_loop();
}

/// Polls as the guest's library does: an empty queue rings its doorbell.
pub(crate) fn ring(cq: &mut Cq) {
    cq.ring_poll();
}

/// Returns two connected sides.
pub(crate) fn connected<B: Backend<Hca: 'static>>(
    backend: &B,
    bytes: usize,
    placement: Placement,
) -> Result<[Side; 2]> {
    let options = SideOptions::new(bytes, placement);
    let a = Side::new(backend, 1, &options).context("the first side")?;
    let b = Side::new(backend, 2, &options).context("the second side")?;
    connect(a, b)
}

/// Function by which a client connects to a device.
type Connect = fn(&std::path::Path, &File) -> Result<(Arc<RemoteFunction>, Arc<Irqs>)>;

impl Side {
    /// Creates the device of this host behind a socket, without a peer.
    pub(crate) fn in_network(socket: &std::path::Path, host: u8, bytes: usize) -> Result<Self> {
        Self::at(socket, host, &SideOptions::new(bytes, Placement::Scattered), RemoteFunction::connect)
    }

    /// Creates a device behind a socket, without a peer.
    pub(crate) fn alone_at(socket: &std::path::Path, options: &SideOptions) -> Result<Self> {
        Self::at(socket, 1, options, RemoteFunction::connect)
    }
}

/// Returns two connected sides behind sockets.
pub(crate) fn connected_at(sockets: &[PathBuf; 2], bytes: usize) -> Result<[Side; 2]> {
    connected_by(RemoteFunction::connect, sockets, bytes)
}

/// Same as [`connected_at`], with the exported doorbell pages of the devices mapped.
pub(crate) fn connected_mapped_at(sockets: &[PathBuf; 2], bytes: usize) -> Result<[Side; 2]> {
    connected_by(RemoteFunction::connect_mapped, sockets, bytes)
}

/// Same as [`connected_at`], for devices with a network between them, which may lose the first packets while it
/// resolves their addresses.
pub(crate) fn connected_across(sockets: &[PathBuf; 2], bytes: usize) -> Result<[Side; 2]> {
    let side = |host: u8| Side::in_network(&sockets[usize::from(host - 1)], host, bytes);
    let (mut a, mut b) = (side(1).context("the first side")?, side(2).context("the second side")?);
    // A timeout of two seconds, seven times.
    connect_across(&mut a, &mut b, 19)?;
    Ok([a, b])
}

/// Connects two sides with a network between them, in which Ethernet addresses matter. The ACK timeout is an exponent.
pub(crate) fn connect_across(a: &mut Side, b: &mut Side, timeout: u8) -> Result<()> {
    let path = |to: &Side| Path { dmac: mac(to.host).0, timeout, ..Path::to(gid(to.host), to.qp.qpn) };
    a.qp.connect(&path(b)).context("connecting the first side")?;
    b.qp.connect(&path(a)).context("connecting the second side")
}

/// Returns the Ethernet address of a host's device.
pub(crate) const fn mac(host: u8) -> MacAddr {
    MacAddr([0x52, 0x54, 0, 0, 0, host])
}

fn connected_by(by: Connect, sockets: &[PathBuf; 2], bytes: usize) -> Result<[Side; 2]> {
    let options = SideOptions::new(bytes, Placement::Scattered);
    let a = Side::at(&sockets[0], 1, &options, by).context("the first side")?;
    let b = Side::at(&sockets[1], 2, &options, by).context("the second side")?;
    connect(a, b)
}

/// Connects two sides.
pub(crate) fn connect(mut a: Side, mut b: Side) -> Result<[Side; 2]> {
    let path = |host, qpn| Path { dmac: mac(host).0, ..Path::to(gid(host), qpn) };
    a.qp.connect(&path(2, b.qp.qpn)).context("connecting the first side")?;
    b.qp.connect(&path(1, a.qp.qpn)).context("connecting the second side")?;
    Ok([a, b])
}
