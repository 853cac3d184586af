//! Test driver that performs the steps of the kernel's driver, in the same order.

use super::{DriverRxQueue, DriverTxQueue, Guest, RxLayout, RxPacket, TxPacket};

/// Commands.
#[expect(missing_docs, reason = "the names of the interface")]
pub mod command {
    pub const ACTIVATE: u32 = 0xcafe_0000;
    pub const QUIESCE: u32 = 0xcafe_0001;
    pub const RESET: u32 = 0xcafe_0002;
    pub const UPDATE_RX_MODE: u32 = 0xcafe_0003;
    pub const UPDATE_MAC_FILTERS: u32 = 0xcafe_0004;
    pub const UPDATE_VLAN_FILTERS: u32 = 0xcafe_0005;
    pub const UPDATE_RSS: u32 = 0xcafe_0006;
    pub const UPDATE_FEATURE: u32 = 0xcafe_0009;
    pub const SET_COALESCE: u32 = 0xcafe_000e;
    pub const GET_QUEUE_STATUS: u32 = 0xf00d_0000;
    pub const GET_STATS: u32 = 0xf00d_0001;
    pub const GET_LINK: u32 = 0xf00d_0002;
    pub const GET_CONF_INTR: u32 = 0xf00d_0008;
    pub const GET_TXDATA_DESC_SIZE: u32 = 0xf00d_000a;
    pub const GET_COALESCE: u32 = 0xf00d_000b;
}

/// Bits of `uptFeatures`.
#[expect(missing_docs, reason = "the names of the interface")]
pub mod feature {
    pub const RXCSUM: u64 = 1;
    pub const RSS: u64 = 2;
    pub const RXVLAN: u64 = 4;
    pub const LRO: u64 = 8;
}

/// Bits of `rxMode`.
#[expect(missing_docs, reason = "the names of the interface")]
pub mod rx_mode {
    pub const UCAST: u32 = 1;
    pub const MCAST: u32 = 2;
    pub const BCAST: u32 = 4;
    pub const ALL_MULTI: u32 = 8;
    pub const PROMISC: u32 = 16;
}

/// Configuration that the driver requests.
#[derive(Clone, Copy, Debug)]
pub struct DriverConfig {
    /// Number of transmit queues.
    pub tx_queues: u8,
    /// Number of receive queues.
    pub rx_queues: u8,
    /// Number of descriptors of a transmit ring.
    pub tx_ring: u32,
    /// Layout of the receive buffers.
    pub rx: RxLayout,
    /// See [`feature`].
    pub features: u64,
    /// MTU in bytes.
    pub mtu: u32,
    /// Revision, 1 to 3.
    pub revision: u8,
    /// Raising a vector masks it.
    pub auto_mask: bool,
    /// Use MSI-X instead of the legacy line.
    pub msix: bool,
}

impl Default for DriverConfig {
    fn default() -> Self {
        Self {
            tx_queues: 1,
            rx_queues: 1,
            tx_ring: 64,
            rx: RxLayout::SMALL,
            features: feature::RXCSUM | feature::RXVLAN,
            mtu: 1500,
            revision: 3,
            auto_mask: false,
            msix: true,
        }
    }
}

/// A driver.
#[derive(Debug)]
pub struct Driver<'a> {
    /// The guest that the driver runs in.
    pub guest: &'a Guest,
    /// Configuration that the driver requested.
    pub config: DriverConfig,
    /// Bus address of the shared area.
    pub shared: u64,
    /// Bus address of the queue descriptors.
    pub queue_desc: u64,
    /// Transmit queues.
    pub tx: Vec<DriverTxQueue>,
    /// Receive queues.
    pub rx: Vec<DriverRxQueue>,
}

/// A driver whose guest has no device at the moment.
#[derive(Clone, Debug)]
pub struct DetachedDriver {
    config: DriverConfig,
    shared: u64,
    queue_desc: u64,
    tx: Vec<DriverTxQueue>,
    rx: Vec<DriverRxQueue>,
}

impl DetachedDriver {
    /// Attaches the driver to a device that continues the state of the previous one.
    pub fn attach(self, guest: &Guest) -> Driver<'_> {
        let Self { config, shared, queue_desc, tx, rx } = self;
        Driver { guest, config, shared, queue_desc, tx, rx }
    }
}

impl<'a> Driver<'a> {
    /// Detaches the driver from its device.
    pub fn detach(self) -> DetachedDriver {
        let Self { guest: _, config, shared, queue_desc, tx, rx } = self;
        DetachedDriver { config, shared, queue_desc, tx, rx }
    }

    /// Probes and opens the device.
    pub fn up(guest: &'a Guest, config: DriverConfig) -> Self {
        let mut driver = Self::prepare(guest, config);
        assert_eq!(driver.activate(), 0, "ACTIVATE");
        driver.finish();
        driver
    }

    /// Probes, and sets up memory for ACTIVATE.
    pub fn prepare(guest: &'a Guest, config: DriverConfig) -> Self {
        guest.set_switches(true, config.msix);
        let revisions = guest.read(1, 0);
        let chosen = 1 << (config.revision - 1);
        assert_ne!(revisions & chosen, 0, "revision");
        guest.write(1, 0, chosen);
        assert_eq!(guest.read(1, 8) & 1, 1, "UPT version");
        guest.write(1, 8, 1);
        guest.command(command::GET_CONF_INTR);
        let memory = &guest.memory;
        let queues = u64::from(config.tx_queues) + u64::from(config.rx_queues);
        let (shared, queue_desc) = (memory.alloc(1024), memory.alloc(queues as usize * 256));
        memory.fill(shared, 1024, 0);
        memory.fill(queue_desc, queues as usize * 256, 0);
        let mut driver = Self { guest, config, shared, queue_desc, tx: Vec::new(), rx: Vec::new() };
        driver.write_shared();
        for number in 0..config.tx_queues {
            driver.add_tx(number);
        }
        for number in 0..config.rx_queues {
            driver.add_rx(number);
        }
        driver
    }

    fn write_shared(&self) {
        let (memory, config, at) = (&self.guest.memory, &self.config, self.shared);
        memory.store(at, 0xbabe_fee1);
        memory.store_u64(at + 24, config.features);
        memory.store_u64(at + 40, self.queue_desc);
        memory.store(at + 52, (u32::from(config.tx_queues) + u32::from(config.rx_queues)) * 256);
        memory.store(at + 56, config.mtu);
        let fragments = if config.features & feature::LRO != 0 { 18_u16 } else { 0 };
        memory.write(at + 60, &fragments.to_le_bytes());
        memory.write(at + 62, &[config.tx_queues, config.rx_queues]);
        // Disable all interrupts in memory. The kernel's driver clears this bit only after it has unmasked all vectors.
        memory.write(at + 80, &[config.auto_mask.into(), self.vectors(), self.event_vector()]);
        memory.store(at + 108, 1);
    }

    fn vectors(&self) -> u8 {
        if self.config.msix { self.config.tx_queues.max(self.config.rx_queues) + 1 } else { 1 }
    }

    /// Returns the vector for events, which follows those of the queues.
    pub fn event_vector(&self) -> u8 {
        self.vectors() - 1
    }

    /// Returns the vector of a queue pair.
    pub fn vector(&self, queue: usize) -> u8 {
        if self.config.msix { queue as u8 } else { 0 }
    }

    fn add_tx(&mut self, number: u8) {
        let memory = &self.guest.memory;
        let queue = DriverTxQueue::new(memory, self.config.tx_ring);
        let at = self.queue_desc + u64::from(number) * 256;
        memory.store_u64(at + 16, queue.ring);
        memory.store_u64(at + 32, queue.completions);
        memory.store(at + 56, queue.size);
        memory.store(at + 64, queue.size);
        memory.write(at + 72, &[self.vector(number.into())]);
        self.tx.push(queue);
    }

    fn add_rx(&mut self, number: u8) {
        let (memory, layout) = (&self.guest.memory, self.config.rx);
        let at = self.rx_desc(number.into());
        let queue = DriverRxQueue::new(memory, layout, number.into(), self.config.rx_queues.into(), at);
        let [first, second, completions, data] = queue.bases();
        memory.store_u64(at + 16, first);
        memory.store_u64(at + 24, second);
        memory.store_u64(at + 32, completions);
        memory.store_u64(at + 48, data);
        memory.store(at + 56, layout.first);
        memory.store(at + 60, layout.second);
        memory.store(at + 64, layout.first + layout.second);
        memory.write(at + 72, &[self.vector(number.into())]);
        memory.write(at + 74, &layout.data_slot.to_le_bytes());
        self.rx.push(queue);
    }

    /// Returns the bus address of a receive queue's descriptor.
    pub fn rx_desc(&self, number: usize) -> u64 {
        self.queue_desc + (u64::from(self.config.tx_queues) + number as u64) * 256
    }

    /// Passes the shared area to the device and activates it. Returns the result of the command.
    pub fn activate(&mut self) -> u32 {
        self.guest.write(1, 0x10, self.shared as u32);
        self.guest.write(1, 0x18, (self.shared >> 32) as u32);
        self.guest.command(command::ACTIVATE)
    }

    /// Performs the kernel's steps after ACTIVATE: unmasks, and only then clears the bit in memory that disables
    /// interrupts.
    pub fn finish(&self) {
        for number in 0..u64::from(self.config.rx_queues) {
            self.guest.write(0, 0x800 + number * 8, self.config.rx.first - 1);
            self.guest.write(0, 0xa00 + number * 8, self.config.rx.second.saturating_sub(1));
        }
        self.set_mode(rx_mode::UCAST | rx_mode::BCAST | rx_mode::MCAST);
        for vector in 0..self.vectors() {
            self.unmask(vector);
        }
        self.guest.memory.store(self.shared + 108, 0);
    }

    /// Unmasks a vector.
    pub fn unmask(&self, vector: u8) {
        self.guest.write(0, u64::from(vector) * 8, 0);
    }

    /// Sets the receive mode.
    pub fn set_mode(&self, mode: u32) {
        self.guest.memory.store(self.shared + 120, mode);
        assert_eq!(self.guest.command(command::UPDATE_RX_MODE), 0);
    }

    /// Sets a coalescing scheme, and returns the result of the command.
    pub fn set_coalesce(&self, scheme: [u32; 4]) -> u32 {
        let memory = &self.guest.memory;
        let at = memory.alloc(16);
        memory.write(at, &scheme.map(u32::to_le_bytes).concat());
        memory.store(self.shared + 708, 16);
        memory.store_u64(self.shared + 712, at);
        self.guest.command(command::SET_COALESCE)
    }

    /// Sets the multicast table, in memory that is overwritten right after the command, as the kernel frees it.
    pub fn set_multicast(&self, addresses: &[[u8; 6]]) -> u32 {
        let memory = &self.guest.memory;
        let table = addresses.concat();
        let at = memory.alloc(table.len().max(1));
        memory.write(at, &table);
        memory.write(self.shared + 124, &(table.len() as u16).to_le_bytes());
        memory.store_u64(self.shared + 128, at);
        let result = self.guest.command(command::UPDATE_MAC_FILTERS);
        memory.fill(at, table.len(), 0xee);
        result
    }

    /// Adds a VLAN to the filter or removes it.
    pub fn set_vlan(&self, id: u16, wanted: bool) {
        let at = self.shared + 136 + u64::from(id / 8);
        let byte = self.guest.memory.read(at, 1)[0];
        let bit = 1 << (id % 8);
        self.guest.memory.write(at, &[if wanted { byte | bit } else { byte & !bit }]);
        assert_eq!(self.guest.command(command::UPDATE_VLAN_FILTERS), 0);
    }

    /// Changes the features.
    pub fn set_features(&self, features: u64) {
        self.guest.memory.store_u64(self.shared + 24, features);
        assert_eq!(self.guest.command(command::UPDATE_FEATURE), 0);
    }

    /// Writes the RSS configuration, without a command.
    pub fn write_rss(&self, key: &[u8; 40], table: &[u8]) -> u64 {
        let memory = &self.guest.memory;
        let at = memory.alloc(176);
        memory.fill(at, 176, 0);
        for (offset, value) in [(0, 0xf_u16), (2, 1), (4, 40), (6, table.len() as u16)] {
            memory.write(at + offset, &value.to_le_bytes());
        }
        memory.write(at + 8, key);
        memory.write(at + 48, table);
        memory.store(self.shared + 648, 1);
        memory.store(self.shared + 652, 176);
        memory.store_u64(self.shared + 656, at);
        at
    }

    /// Posts packets and rings the doorbell once.
    pub fn send_all(&mut self, queue: usize, packets: &[TxPacket]) {
        for packet in packets {
            self.tx[queue].post(&self.guest.memory, packet);
        }
        self.ring(queue);
    }

    /// Posts a packet and rings the doorbell.
    pub fn send(&mut self, queue: usize, packet: &TxPacket) {
        self.send_all(queue, std::slice::from_ref(packet));
    }

    /// Rings the doorbell of a transmit queue.
    pub fn ring(&self, queue: usize) {
        self.guest.write(0, 0x600 + queue as u64 * 8, self.tx[queue].next_fill());
    }

    /// Consumes completions of a transmit queue.
    pub fn reap(&mut self, queue: usize) -> usize {
        self.tx[queue].reap(&self.guest.memory)
    }

    /// Receives packets, and rings the doorbell if the device asks for it.
    pub fn poll(&mut self, queue: usize) -> Vec<RxPacket> {
        self.poll_some(queue, usize::MAX)
    }

    /// Like [`Self::poll`], for at most `most` packets.
    pub fn poll_some(&mut self, queue: usize, most: usize) -> Vec<RxPacket> {
        let (packets, doorbells) = self.rx[queue].poll(&self.guest.memory, most);
        for (base, producer) in [0x800, 0xa00].into_iter().zip(doorbells) {
            if let Some(producer) = producer {
                self.guest.write(0, base + queue as u64 * 8, producer);
            }
        }
        packets
    }

    /// Returns the events that are not acknowledged.
    pub fn events(&self) -> u32 {
        self.guest.memory.load(self.shared + 696)
    }

    /// Acknowledges events.
    pub fn acknowledge(&self, events: u32) {
        self.guest.write(1, 0x40, events);
    }

    /// Returns the error code of a queue, transmit queues first; 0 if it runs.
    pub fn queue_error(&self, number: usize) -> u32 {
        self.guest.command(command::GET_QUEUE_STATUS);
        let at = self.queue_desc + number as u64 * 256 + 80;
        let error = self.guest.memory.load(at + 4);
        assert_eq!(self.guest.memory.read(at, 1)[0] != 0, error != 0);
        error
    }

    /// Returns the statistics of a queue, transmit queues first.
    pub fn stats(&self, number: usize) -> [u64; 10] {
        self.guest.command(command::GET_STATS);
        let bytes = self.guest.memory.read(self.queue_desc + number as u64 * 256 + 88, 80);
        std::array::from_fn(|i| u64::from_le_bytes(bytes[i * 8..i * 8 + 8].try_into().unwrap()))
    }
}
