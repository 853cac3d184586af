//! Statistics: per queue in the guest's format (`UPT1_TxStats`, `UPT1_RxStats`), and per device for the status.

use pvrdma_base::{Count, Counter, counters};

use crate::filter::is_multicast;

/// Size of a queue's statistics, in bytes.
pub(crate) const STATS_LEN: usize = 80;

/// Frames and bytes by destination type.
#[derive(Debug, Default)]
struct ByDestination {
    /// Frames and bytes: unicast, multicast, broadcast.
    counts: [[Count; 2]; 3],
}

impl ByDestination {
    fn add(&self, destination: [u8; 6], frames: u64, bytes: u64) {
        let [unicast, multicast, broadcast] = &self.counts;
        let [frame_count, byte_count] = match destination {
            [0xff, 0xff, 0xff, 0xff, 0xff, 0xff] => broadcast,
            address if is_multicast(address) => multicast,
            _ => unicast,
        };
        frame_count.add(frames);
        byte_count.add(bytes);
    }

    fn words(&self) -> impl Iterator<Item = u64> {
        self.counts.iter().flatten().map(Count::get)
    }
}

fn encode(words: impl Iterator<Item = u64>) -> [u8; STATS_LEN] {
    let mut bytes = [0; STATS_LEN];
    for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// Statistics of a transmit queue.
#[derive(Debug, Default)]
pub(crate) struct TxStats {
    segmented: [Count; 2],
    sent: ByDestination,
    /// Invalid frames.
    pub(crate) errors: Count,
    /// Frames dropped because the link had no room.
    pub(crate) discarded: Count,
}

impl TxStats {
    /// Counts a sent frame that makes `frames` frames and `bytes` bytes on the wire.
    pub(crate) fn sent(&self, destination: [u8; 6], segmented: bool, frames: u64, bytes: u64) {
        self.sent.add(destination, frames, bytes);
        if segmented {
            let [frame_count, byte_count] = &self.segmented;
            frame_count.add(frames);
            byte_count.add(bytes);
        }
    }

    /// Encodes the statistics in the guest's format.
    pub(crate) fn encode(&self) -> [u8; STATS_LEN] {
        let ends = [self.errors.get(), self.discarded.get()];
        encode(self.segmented.iter().map(Count::get).chain(self.sent.words()).chain(ends))
    }
}

/// Statistics of a receive queue.
#[derive(Debug, Default)]
pub(crate) struct RxStats {
    large: [Count; 2],
    received: ByDestination,
    /// Frames for which no buffer was available.
    pub(crate) out_of_buffers: Count,
    /// Frames that could not be stored.
    pub(crate) errors: Count,
}

impl RxStats {
    /// Counts a received frame that stands for `frames` frames and `bytes` bytes on the wire.
    pub(crate) fn received(&self, destination: [u8; 6], large: bool, frames: u64, bytes: u64) {
        self.received.add(destination, frames, bytes);
        if large {
            let [frame_count, byte_count] = &self.large;
            frame_count.add(frames);
            byte_count.add(bytes);
        }
    }

    /// Encodes the statistics in the guest's format.
    pub(crate) fn encode(&self) -> [u8; STATS_LEN] {
        let ends = [self.out_of_buffers.get(), self.errors.get()];
        encode(self.large.iter().map(Count::get).chain(self.received.words()).chain(ends))
    }
}

counters! {
    /// What a device counts in all.
    pub(crate) struct DeviceCounters {
        /// Frames sent by the guest; each TCP segment counts.
        vmxnet3_sent_frames,
        /// Bytes of sent frames.
        vmxnet3_sent_bytes in Bytes,
        /// Frames received by the guest; each TCP segment counts.
        vmxnet3_received_frames,
        /// Bytes of received frames.
        vmxnet3_received_bytes in Bytes,
        /// Invalid frames of the guest.
        vmxnet3_send_errors,
        /// Frames of the guest that were dropped because the link had no room.
        vmxnet3_send_discards,
        /// Frames that found no receive buffer.
        vmxnet3_receive_no_buffers,
        /// Frames that the guest's filters drop: another address, another VLAN, or too long.
        vmxnet3_receive_filtered,
        /// Queues that were stopped because of invalid rings.
        vmxnet3_queue_errors,
        /// Refused commands.
        vmxnet3_command_errors,
        /// Activations by a driver.
        vmxnet3_activations,
        /// Resets of the device.
        vmxnet3_resets,
    }
}

/// Returns all counters of a device, at zero.
pub fn all_counters() -> Vec<Counter> {
    DeviceCounters::default().list()
}
