//! The common configuration structure (section 4.1.4.3).

use anyhow::{Context, Result, ensure};
use virtio_queue::{Queue, QueueState, QueueT};

use crate::saved::messages::DiskRegisters;

/// Size of the structure in bytes.
pub(super) const COMMON_SIZE: u32 = 56;
const QUEUES: u16 = 1;
/// Maximum number of entries of the queue.
const QUEUE_SIZE: u16 = 256;
/// Value of a vector register without a vector.
const NONE: u16 = 0xffff;
const FEATURE_VERSION_1: u64 = 1 << 32;
const STATUS_DRIVER_OK: u8 = 1 << 2;

/// Registers of a device with one queue.
pub(super) struct Registers {
    offered: u64,
    accepted: u64,
    offered_select: u32,
    accepted_select: u32,
    config_vector: u16,
    status: u8,
    queue_select: u16,
    /// MSI-X vector of the queue.
    pub(super) vector: u16,
    pub(super) queue: Queue,
}

impl Registers {
    /// Creates registers in the power-on state that offer these features in addition to `VIRTIO_F_VERSION_1`.
    pub(super) fn new(features: u64) -> Result<Self> {
        Ok(Self {
            offered: features | FEATURE_VERSION_1,
            accepted: 0,
            offered_select: 0,
            accepted_select: 0,
            config_vector: NONE,
            status: 0,
            queue_select: 0,
            vector: NONE,
            queue: Queue::new(QUEUE_SIZE).context("a queue")?,
        })
    }

    /// Restores the power-on state.
    pub(super) fn reset(&mut self) {
        (self.accepted, self.offered_select, self.accepted_select) = (0, 0, 0);
        (self.config_vector, self.status, self.queue_select, self.vector) = (NONE, 0, 0, NONE);
        self.queue.reset();
    }

    /// Returns the state for a stream. The offered features are not saved, because they belong to the device.
    pub(super) fn save(&self) -> DiskRegisters {
        let Self { offered: _, accepted, offered_select, accepted_select, config_vector, .. } = *self;
        let Self { status, queue_select, vector, ref queue, .. } = *self;
        let state = queue.state();
        DiskRegisters {
            accepted,
            offered_select,
            accepted_select,
            config_vector: config_vector.into(),
            status: status.into(),
            queue_select: queue_select.into(),
            vector: vector.into(),
            size: state.size.into(),
            ready: state.ready,
            next_avail: state.next_avail.into(),
            next_used: state.next_used.into(),
            descriptors: state.desc_table,
            available: state.avail_ring,
            used: state.used_ring,
        }
    }

    /// Returns registers in a saved state, of a device that offers these features.
    ///
    /// # Errors
    /// A value does not fit its register, or the driver has accepted a feature that is not offered.
    pub(super) fn restore(features: u64, saved: &DiskRegisters) -> Result<Self> {
        let new = Self::new(features)?;
        ensure!(saved.accepted & !new.offered == 0, "the guest uses features {:#x} of its disk", saved.accepted);
        let queue = QueueState {
            max_size: QUEUE_SIZE,
            next_avail: saved.next_avail.try_into()?,
            next_used: saved.next_used.try_into()?,
            event_idx_enabled: false,
            size: saved.size.try_into()?,
            ready: saved.ready,
            desc_table: saved.descriptors,
            avail_ring: saved.available,
            used_ring: saved.used,
        };
        Ok(Self {
            accepted: saved.accepted,
            offered_select: saved.offered_select,
            accepted_select: saved.accepted_select,
            config_vector: saved.config_vector.try_into()?,
            status: saved.status.try_into()?,
            queue_select: saved.queue_select.try_into()?,
            vector: saved.vector.try_into()?,
            queue: Queue::try_from(queue).context("the queue of a disk")?,
            ..new
        })
    }

    /// Returns `true` if the driver has finished the setup.
    pub(super) fn is_running(&self) -> bool {
        self.status & STATUS_DRIVER_OK != 0 && self.accepted & FEATURE_VERSION_1 != 0 && self.queue.ready()
    }

    /// Returns the structure as the driver reads it.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let half = |features: u64, select: u32| match select {
            0 => features & 0xffff_ffff,
            1 => features >> 32,
            _ => 0,
        };
        let queue = (self.queue_select == 0).then_some(&self.queue);
        let of = |value: fn(&Queue) -> u64| queue.map_or(0, value);
        let fields: [(u64, usize); 16] = [
            (self.offered_select.into(), 4),
            (half(self.offered, self.offered_select), 4),
            (self.accepted_select.into(), 4),
            (half(self.accepted, self.accepted_select), 4),
            (self.config_vector.into(), 2),
            (QUEUES.into(), 2),
            (self.status.into(), 1),
            (0, 1),
            (self.queue_select.into(), 2),
            (of(|queue| queue.size().into()), 2),
            (queue.map_or(NONE, |_| self.vector).into(), 2),
            (of(|queue| queue.ready().into()), 2),
            (0, 2),
            (of(QueueT::desc_table), 8),
            (of(QueueT::avail_ring), 8),
            (of(QueueT::used_ring), 8),
        ];
        let bytes = fields.into_iter().flat_map(|(value, len)| value.to_le_bytes().into_iter().take(len));
        bytes.collect()
    }

    /// Handles a write of one, two, four or eight bytes. Writes to anything but a register are ignored.
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) {
        match *data {
            [value] if offset == 20 => self.set_status(value),
            [a, b] => self.write_u16(offset, u16::from_le_bytes([a, b])),
            [a, b, c, d] => self.write_u32(offset, u32::from_le_bytes([a, b, c, d])),
            [a, b, c, d, e, f, g, h] if offset >= 32 => {
                self.write_u32(offset, u32::from_le_bytes([a, b, c, d]));
                self.write_u32(offset.saturating_add(4), u32::from_le_bytes([e, f, g, h]));
            }
            _ => {}
        }
    }

    fn set_status(&mut self, value: u8) {
        if value == 0 {
            return self.reset();
        }
        self.status = value;
    }

    fn write_u16(&mut self, offset: u64, value: u16) {
        match offset {
            16 => self.config_vector = value,
            22 => self.queue_select = value,
            _ if self.queue_select != 0 => {}
            24 => self.queue.set_size(value),
            26 => self.vector = value,
            28 => self.queue.set_ready(value == 1),
            _ => {}
        }
    }

    fn write_u32(&mut self, offset: u64, value: u32) {
        match offset {
            0 => self.offered_select = value,
            8 => self.accepted_select = value,
            12 => self.accept(value),
            _ if self.queue_select != 0 => {}
            32 => self.queue.set_desc_table_address(Some(value), None),
            36 => self.queue.set_desc_table_address(None, Some(value)),
            40 => self.queue.set_avail_ring_address(Some(value), None),
            44 => self.queue.set_avail_ring_address(None, Some(value)),
            48 => self.queue.set_used_ring_address(Some(value), None),
            52 => self.queue.set_used_ring_address(None, Some(value)),
            _ => {}
        }
    }

    fn accept(&mut self, value: u32) {
        let value = u64::from(value);
        self.accepted = match self.accepted_select {
            0 => self.accepted & !0xffff_ffff | value,
            1 => self.accepted & 0xffff_ffff | value << 32,
            _ => self.accepted,
        };
    }
}
