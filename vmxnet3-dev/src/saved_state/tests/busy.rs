//! A device with a value other than the initial one in each field of its state, and everything that a guest can observe
//! of such a state.

use std::fmt::Write;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, LazyLock};

use pvrdma_pci_function::PciFunction;

use super::{another, config, save};
use crate::offload::headers::Headers;
use crate::testing::frames::{Flow, PEER_MAC, ethernet, pattern, tagged};
use crate::testing::{
    DetachedDriver, Driver, DriverConfig, Guest, MEMORY_BASE, Memory, RecordingPort, RxLayout, SentFrame, TxPacket,
    command, feature, rx_mode,
};
use crate::{Frame, Received, RestoreError};

/// Both kinds of rings, with a data ring, and small, so that they wrap.
pub(super) const LAYOUT: RxLayout =
    RxLayout { first: 32, second: 32, head: 1536, body: 512, bodies: 0, data_slot: 128 };

/// Address that the driver has set.
const MAC: [u8; 6] = [0x52, 0x54, 0, 0, 0xab, 1];
const GROUPS: [[u8; 6]; 2] = [[1, 0, 0x5e, 0, 0, 1], [0x33, 0x33, 0, 0, 0, 3]];
const SEGMENT: u16 = 1000;
const VECTORS: u8 = 16;

/// A saved device, with its guest.
pub(super) struct Busy {
    pub(super) state: Vec<u8>,
    memory: Arc<Memory>,
    driver: DetachedDriver,
    /// A flow for each receive queue.
    flows: [Flow; 3],
}

/// Everything that can be observed of a device that continues a state.
pub(super) struct Observed {
    text: String,
    memory: Arc<Memory>,
}

impl PartialEq for Observed {
    fn eq(&self, other: &Self) -> bool {
        const PIECE: usize = 64 << 10;
        let piece = |memory: &Memory, at| memory.read(at, PIECE);
        let mut places = (MEMORY_BASE..self.memory.end()).step_by(PIECE);
        self.text == other.text && places.all(|at| piece(&self.memory, at) == piece(&other.memory, at))
    }
}

/// Returns a hash, which is shorter than the value.
fn digest(value: &impl Hash) -> String {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    format!("{:x}", hasher.finish())
}

/// Returns the frames that have left.
fn sent(port: &RecordingPort) -> Vec<(Vec<u8>, Option<u16>, String)> {
    let frames = port.take().into_iter();
    frames.map(|SentFrame { bytes, checksum, mss }| (bytes, mss, format!("{checksum:?}"))).collect()
}

/// Receives a frame of TCP that is to be segmented.
fn receive_long(guest: &Guest, flow: Flow, len: usize) -> Received {
    let bytes = flow.left_open(flow.tcp(1, 0x10, 0, &pattern(len)), 16, true);
    guest.device.receive(&Frame::to_be_segmented(&bytes, SEGMENT).unwrap())
}

fn receive(guest: &Guest, bytes: &[u8]) -> Received {
    guest.device.receive(&Frame::new(bytes, false).unwrap())
}

/// Returns a flow of each receive queue.
fn flows(guest: &Guest) -> [Flow; 3] {
    let session = guest.device.core.session().clone().unwrap();
    let of = |queue| {
        let mut flows = (1..).map(|port| Flow { to: MAC, ports: [port, 80], ..Flow::TO_GUEST });
        let goes_there = |flow: &Flow| {
            let bytes = flow.tcp(1, 0x10, 0, b"data");
            session.settings.read().queue_of(&bytes, &Headers::parse(&bytes)).0 == queue
        };
        flows.find(goes_there).unwrap()
    };
    [of(0), of(1), of(2)]
}

/// Sets everything that a driver can set.
fn set_all(driver: &Driver<'_>) {
    let guest = driver.guest;
    let key: Vec<_> = pattern(40).iter().map(|byte| byte ^ 0x5a).collect();
    driver.write_rss(key.first_chunk().unwrap(), &[0, 1, 2, 1]);
    assert_eq!(guest.command(command::UPDATE_RSS), 0);
    driver.set_features(feature::RXCSUM | feature::RSS | feature::RXVLAN | feature::LRO);
    driver.set_mode(rx_mode::UCAST | rx_mode::MCAST | rx_mode::BCAST);
    assert_eq!(driver.set_multicast(&GROUPS), 0);
    driver.set_vlan(8, true);
    driver.set_vlan(100, true);
    assert_eq!(driver.set_coalesce([2, 4, 5, 6]), 0);
    guest.write(1, 0x28, u32::from_le_bytes([MAC[0], MAC[1], MAC[2], MAC[3]]));
    guest.write(1, 0x30, u16::from_le_bytes([MAC[4], MAC[5]]).into());
}

/// Sends and receives until each ring is in its second round.
fn wrap(driver: &mut Driver<'_>, flows: [Flow; 3]) {
    for round in 0..36_usize {
        for (queue, flow) in flows.into_iter().enumerate() {
            if queue < 2 {
                driver.send(queue, &TxPacket::plain(&ethernet(PEER_MAC, MAC, 0x88b5, &pattern(60 + round))));
                driver.reap(queue);
            }
            assert_eq!(receive(driver.guest, &flow.tcp(1, 0x10, 0, &pattern(round * 9))), Received::Delivered);
            assert_eq!(receive_long(driver.guest, flow, 3000 + round), Received::Delivered);
            driver.guest.device.flush();
            driver.poll(queue);
            driver.unmask(queue as u8);
        }
    }
}

/// Lets a transmit queue stop.
fn stop_queue(driver: &mut Driver<'_>, queue: usize) {
    let at = driver.tx[queue].desc(driver.tx[queue].next_fill()) + 12;
    driver.tx[queue].post(&driver.guest.memory, &TxPacket::plain(&pattern(60)));
    driver.guest.memory.store(at, driver.guest.memory.load(at) & !(1 << 12));
    driver.ring(queue);
    assert_ne!(driver.queue_error(queue), 0);
    driver.acknowledge(u32::MAX);
}

impl Busy {
    /// Returns the one device of this kind, which no test changes.
    pub(super) fn get() -> &'static Self {
        static BUSY: LazyLock<Busy> = LazyLock::new(Busy::new);
        &BUSY
    }

    fn new() -> Self {
        let port = Arc::new(RecordingPort::default());
        let guest = Guest::new(config(), 4 << 20, Arc::clone(&port) as _);
        let rest = DriverConfig { auto_mask: true, rx: LAYOUT, ..DriverConfig::default() };
        let mut driver = Driver::up(&guest, DriverConfig { tx_queues: 3, rx_queues: 3, tx_ring: 32, ..rest });
        set_all(&driver);
        let flows = flows(&guest);
        wrap(&mut driver, flows);
        stop_queue(&mut driver, 2);
        (0..4).for_each(|vector| driver.unmask(vector));
        // Packets that found no room in the port, up to one round of the ring.
        port.set_room(Some(0));
        for queue in 0..2 {
            for number in 0..driver.tx[queue].free() as usize {
                let bytes = ethernet(PEER_MAC, MAC, 0x88b5, &pattern(60 + number));
                driver.tx[queue].post(&guest.memory, &TxPacket::plain(&bytes));
            }
        }
        // Queues 0 and 1: the driver is in a round, and a long frame waits for buffers.
        for flow in flows.into_iter().take(2) {
            receive(&guest, &flow.tcp(1, 0x10, 0, b"frame"));
            guest.device.flush();
            while receive_long(&guest, flow, 5000) != Received::NoBuffers {}
            guest.device.flush();
        }
        // Queue 1: that round has ended, and the next one has begun.
        driver.unmask(1);
        // Queue 2: the driver has masked its vector, and is asked for a doorbell.
        guest.write(0, 2 * 8, 1);
        while receive(&guest, &flows[2].tcp(1, 0x10, 0, &pattern(1000))) != Received::NoBuffers {}
        // The driver has masked the vector of events, and was not interrupted for one.
        guest.write(0, 3 * 8, 1);
        guest.device.set_link(false);
        guest.device.set_link(true);
        driver.acknowledge(u32::MAX);
        // A value that a guest may write, although only the device does.
        guest.memory.write(driver.rx_desc(0), &[1]);
        guest.memory.write(driver.rx_desc(1), &[1]);
        assert_eq!(guest.command(0xcafe_0100), 1, "an unknown command");
        let driver = driver.detach();
        Self { state: save(&guest.device), memory: Arc::clone(&guest.memory), driver, flows }
    }

    /// Returns a device for a state, with a copy of the memory.
    pub(super) fn next(&self) -> Guest {
        self.next_with(&Arc::default())
    }

    fn next_with(&self, port: &Arc<RecordingPort>) -> Guest {
        port.set_offloads(true, true);
        Guest::with_memory(config(), self.memory.copied(), Arc::default(), Arc::clone(port) as _)
    }

    /// Brings frames to a device, until its queues have no buffers or have stopped.
    pub(super) fn bring_frames(&self, guest: &Guest) {
        for flow in self.flows.into_iter().cycle().take(150) {
            receive(guest, &flow.tcp(1, 0x10, 0, &pattern(100)));
            receive(guest, &flow.udp(&pattern(1000)));
            receive_long(guest, flow, 5000);
        }
        guest.device.flush();
        guest.device.resume_transmit();
        guest.device.set_link(false);
    }

    /// Observes a device that continues a state, in a copy of the memory.
    pub(super) fn observe(&self, state: &[u8]) -> Result<Observed, RestoreError> {
        let port = Arc::new(RecordingPort::default());
        let guest = self.next_with(&port);
        guest.device.restore_state(&mut &state[..])?;
        let mut text = String::new();
        look(&guest, &mut text);
        guest.device.resume_state()?;
        look(&guest, &mut text);
        let mut driver = self.driver.clone().attach(&guest);
        let mut observer = Observer { driver: &mut driver, port: &port, flows: self.flows, text: &mut text };
        observer.queues();
        observer.filters();
        observer.buffers();
        observer.commands();
        Ok(Observed { memory: guest.memory, text })
    }

    /// Returns a device without a driver, for the same guest.
    pub(super) fn fresh(&self) -> (Guest, Arc<RecordingPort>) {
        let port = Arc::new(RecordingPort::default());
        let origin = Guest::new(config(), 4096, Arc::clone(&port) as _);
        (another(&origin, Memory::new(16 << 20), &port), port)
    }
}

/// Records registers, interrupts and counters.
fn look(guest: &Guest, text: &mut String) {
    let registers = [0x00, 0x10, 0x18, 0x20, 0x28, 0x30, 0x38].map(|at| guest.read(1, at));
    let masks: Vec<_> = (0..u64::from(VECTORS)).map(|vector| guest.read(0, vector * 8)).collect();
    let interrupts: Vec<_> = (0..VECTORS).map(|vector| guest.irqs.take(vector)).collect();
    let mut space = [0; 256];
    guest.device.config_read(0, &mut space);
    let status = guest.device.status();
    let counters: Vec<_> = status.counters.iter().map(|counter| counter.value).collect();
    writeln!(
        text,
        "{registers:x?} {masks:?} {interrupts:?} {}",
        digest(&(space, status.name, status.mac, status.active, status.link_up))
    )
    .unwrap();
    writeln!(text, "{counters:?} {}", status.interrupts).unwrap();
    let core = &guest.device.core;
    let transmit: Vec<_> = core.tx_stats.iter().map(|stats| stats.encode()).collect();
    let receive: Vec<_> = core.rx_stats.iter().map(|stats| stats.encode()).collect();
    writeln!(text, "{}", digest(&(transmit, receive))).unwrap();
}

/// A driver that records the frames and events that it sees.
struct Observer<'a, 'b> {
    driver: &'a mut Driver<'b>,
    port: &'a RecordingPort,
    flows: [Flow; 3],
    text: &'a mut String,
}

impl Observer<'_, '_> {
    fn poll(&mut self) {
        for queue in 0..3 {
            let (packets, completions) = (self.driver.poll(queue), self.driver.reap(queue));
            let wanted = self.driver.rx[queue].doorbell_wanted(&self.driver.guest.memory);
            writeln!(self.text, "{queue}: {completions} {wanted} {}", digest(&packets)).unwrap();
        }
    }

    fn receive(&mut self, bytes: &[u8]) {
        let received = receive(self.driver.guest, bytes);
        writeln!(self.text, "{received:?}").unwrap();
    }

    /// The packets that were posted, the frame that waits, and the vectors.
    fn queues(&mut self) {
        let sent = sent(self.port);
        writeln!(self.text, "{} {}", digest(&sent), self.driver.events()).unwrap();
        for queue in 0..2 {
            let waits = receive_long(self.driver.guest, self.flows[queue], 5000);
            let wanted = self.driver.rx[queue].doorbell_wanted(&self.driver.guest.memory);
            writeln!(self.text, "{waits:?} {wanted}").unwrap();
        }
        self.poll();
        for vector in 0..VECTORS {
            self.driver.unmask(vector);
        }
        look(self.driver.guest, self.text);
        self.poll();
    }

    /// Frames of all kinds.
    fn filters(&mut self) {
        let base = self.flows[0];
        for to in [MAC, PEER_MAC, [0xff; 6], GROUPS[0], GROUPS[1], [1, 0, 0x5e, 9, 9, 9]] {
            self.receive(&Flow { to, ..base }.udp(b"frame"));
        }
        for vlan in [7, 8, 96, 100, 4095] {
            self.receive(&tagged(&base.udp(b"frame"), vlan));
        }
        for len in [1486, 1487] {
            self.receive(&ethernet(MAC, PEER_MAC, 0x88b5, &pattern(len + 14)));
        }
        self.poll();
        for port in 0..16 {
            let flow = Flow { ports: [port * 7, 90], ipv6: port % 2 == 1, ..base };
            self.receive(&flow.udp(b"datagram"));
            self.receive(&flow.tcp(1, 0x10, 0, &pattern(200)));
            self.driver.guest.device.flush();
            self.poll();
        }
    }

    /// Long frames with and without buffers, and all rings around once more.
    fn buffers(&mut self) {
        // 18 buffers hold 1,536 + 17 * 512 bytes.
        for (flow, len) in self.flows.into_iter().flat_map(|flow| [(flow, 10_240), (flow, 10_300)]) {
            let received = receive_long(self.driver.guest, flow, len - 54);
            writeln!(self.text, "{received:?}").unwrap();
            self.poll();
        }
        wrap(self.driver, self.flows);
        let sent = sent(self.port);
        writeln!(self.text, "{}", digest(&sent)).unwrap();
    }

    fn commands(&mut self) {
        let guest = self.driver.guest;
        let size = guest.command(command::GET_TXDATA_DESC_SIZE);
        let coalesce = guest.command(command::GET_COALESCE);
        for queue in 0..2 {
            (0..4).for_each(|vector| self.driver.unmask(vector));
            look(guest, self.text);
            self.driver.send(queue, &TxPacket::plain(&pattern(60)));
            look(guest, self.text);
        }
        for flow in self.flows {
            (0..4).for_each(|vector| self.driver.unmask(vector));
            look(guest, self.text);
            receive(guest, &flow.tcp(1, 0x10, 0, b"frame"));
            guest.device.flush();
            look(guest, self.text);
        }
        let errors: Vec<_> = (0..5).map(|queue| self.driver.queue_error(queue)).collect();
        let stats = self.driver.stats(0);
        guest.device.set_link(false);
        writeln!(self.text, "{size} {coalesce} {errors:?} {stats:?} {}", self.driver.events()).unwrap();
        look(guest, self.text);
    }
}
