//! What a device counts: for each queue as the guest reads it (`UPT1_TxStats`, `UPT1_RxStats`), and in all for our own
//! status.

use pvrdma_base::{Count, Counter, counters};

use crate::filter::is_multicast;

/// Bytes of the statistics of a queue.
pub(crate) const STATS_LEN: usize = 80;

/// Frames and bytes by kind of destination.
#[derive(Debug, Default)]
struct ByDestination {
    /// Frames and bytes: to one, to many, to all.
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

/// What a transmit queue counts.
#[derive(Debug, Default)]
pub(crate) struct TxStats {
    segmented: [Count; 2],
    sent: ByDestination,
    /// Frames that made no sense.
    pub(crate) errors: Count,
    /// Frames that the link had no place for.
    pub(crate) discarded: Count,
}

impl TxStats {
    /// Counts a frame that left as so many, of so many bytes.
    pub(crate) fn sent(&self, destination: [u8; 6], segmented: bool, frames: u64, bytes: u64) {
        self.sent.add(destination, frames, bytes);
        if segmented {
            let [frame_count, byte_count] = &self.segmented;
            frame_count.add(frames);
            byte_count.add(bytes);
        }
    }

    /// As the guest reads it.
    pub(crate) fn encode(&self) -> [u8; STATS_LEN] {
        let ends = [self.errors.get(), self.discarded.get()];
        encode(self.segmented.iter().map(Count::get).chain(self.sent.words()).chain(ends))
    }
}

/// What a receive queue counts.
#[derive(Debug, Default)]
pub(crate) struct RxStats {
    large: [Count; 2],
    received: ByDestination,
    /// Frames for which there was no buffer.
    pub(crate) out_of_buffers: Count,
    /// Frames that could not be stored.
    pub(crate) errors: Count,
}

impl RxStats {
    /// Counts a frame that stands for so many on a wire, of so many bytes.
    pub(crate) fn received(&self, destination: [u8; 6], large: bool, frames: u64, bytes: u64) {
        self.received.add(destination, frames, bytes);
        if large {
            let [frame_count, byte_count] = &self.large;
            frame_count.add(frames);
            byte_count.add(bytes);
        }
    }

    /// As the guest reads it.
    pub(crate) fn encode(&self) -> [u8; STATS_LEN] {
        let ends = [self.out_of_buffers.get(), self.errors.get()];
        encode(self.large.iter().map(Count::get).chain(self.received.words()).chain(ends))
    }
}

counters! {
    /// What a device counts in all.
    pub(crate) struct DeviceCounters {
        /// Frames that the guest sent, each segment of TCP by itself.
        vmxnet3_sent_frames,
        /// Bytes in them.
        vmxnet3_sent_bytes in Bytes,
        /// Frames that the guest received, each segment of TCP by itself.
        vmxnet3_received_frames,
        /// Bytes in them.
        vmxnet3_received_bytes in Bytes,
        /// Frames of the guest that made no sense.
        vmxnet3_send_errors,
        /// Frames of the guest for which the link had no place.
        vmxnet3_send_discards,
        /// Times that a frame found no receive buffer.
        vmxnet3_receive_no_buffers,
        /// Frames that the guest does not want: another address, another VLAN, too long.
        vmxnet3_receive_filtered,
        /// Queues that were stopped because the driver's rings made no sense.
        vmxnet3_queue_errors,
        /// Commands that were refused.
        vmxnet3_command_errors,
        /// Times that a driver started the device.
        vmxnet3_activations,
        /// Times that the device was reset.
        vmxnet3_resets,
    }
}

/// Everything that a device counts, at zero.
pub fn all_counters() -> Vec<Counter> {
    DeviceCounters::default().list()
}
