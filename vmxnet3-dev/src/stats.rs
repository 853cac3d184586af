//! Statistics: per queue in the guest's format (`UPT1_TxStats`, `UPT1_RxStats`), and per device for the status.

use pvrdma_base::{Count, Counter, counters};
use pvrdma_saved_state::vmxnet3 as saved;

use crate::filter::is_multicast;
use crate::saved_state::error::{RestoreError, require};

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

    const fn counts(&self) -> [&Count; 6] {
        let Self { counts: [[a, b], [c, d], [e, f]] } = self;
        [a, b, c, d, e, f]
    }
}

/// Number of values of a queue's statistics.
const VALUES: usize = STATS_LEN / 8;

fn encode(counts: [&Count; VALUES]) -> [u8; STATS_LEN] {
    let mut bytes = [0; STATS_LEN];
    for (to, count) in bytes.chunks_exact_mut(8).zip(counts) {
        to.copy_from_slice(&count.get().to_le_bytes());
    }
    bytes
}

fn save(counts: [&Count; VALUES]) -> saved::Statistics {
    saved::Statistics { values: counts.map(Count::get).to_vec() }
}

/// Checks the saved statistics of a queue.
pub(crate) fn check(statistics: &saved::Statistics) -> Result<(), RestoreError> {
    let len = statistics.values.len();
    require("number of values of statistics", len as u64, len == VALUES)
}

fn restore(counts: [&Count; VALUES], statistics: &saved::Statistics) {
    let values = statistics.values.iter().copied().chain(std::iter::repeat(0));
    counts.into_iter().zip(values).for_each(|(count, value)| count.set(value));
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

    /// Returns the counts in the order of the guest's format.
    const fn counts(&self) -> [&Count; VALUES] {
        let Self { segmented: [a, b], sent, errors, discarded } = self;
        let [c, d, e, f, g, h] = sent.counts();
        [a, b, c, d, e, f, g, h, errors, discarded]
    }

    /// Encodes the statistics in the guest's format.
    pub(crate) fn encode(&self) -> [u8; STATS_LEN] {
        encode(self.counts())
    }

    /// Returns the saved form.
    pub(crate) fn save(&self) -> saved::Statistics {
        save(self.counts())
    }

    /// Replaces the values.
    pub(crate) fn restore(&self, statistics: &saved::Statistics) {
        restore(self.counts(), statistics);
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

    /// Returns the counts in the order of the guest's format.
    const fn counts(&self) -> [&Count; VALUES] {
        let Self { large: [a, b], received, out_of_buffers, errors } = self;
        let [c, d, e, f, g, h] = received.counts();
        [a, b, c, d, e, f, g, h, out_of_buffers, errors]
    }

    /// Encodes the statistics in the guest's format.
    pub(crate) fn encode(&self) -> [u8; STATS_LEN] {
        encode(self.counts())
    }

    /// Returns the saved form.
    pub(crate) fn save(&self) -> saved::Statistics {
        save(self.counts())
    }

    /// Replaces the values.
    pub(crate) fn restore(&self, statistics: &saved::Statistics) {
        restore(self.counts(), statistics);
    }
}

counters! {
    /// Counters of a device as a whole.
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

impl DeviceCounters {
    /// Returns the saved form.
    pub(crate) fn save(&self) -> saved::Counters {
        let Self {
            vmxnet3_sent_frames,
            vmxnet3_sent_bytes,
            vmxnet3_received_frames,
            vmxnet3_received_bytes,
            vmxnet3_send_errors,
            vmxnet3_send_discards,
            vmxnet3_receive_no_buffers,
            vmxnet3_receive_filtered,
            vmxnet3_queue_errors,
            vmxnet3_command_errors,
            vmxnet3_activations,
            vmxnet3_resets,
        } = self;
        saved::Counters {
            sent_frames: vmxnet3_sent_frames.get(),
            sent_bytes: vmxnet3_sent_bytes.get(),
            received_frames: vmxnet3_received_frames.get(),
            received_bytes: vmxnet3_received_bytes.get(),
            send_errors: vmxnet3_send_errors.get(),
            send_discards: vmxnet3_send_discards.get(),
            receive_no_buffers: vmxnet3_receive_no_buffers.get(),
            receive_filtered: vmxnet3_receive_filtered.get(),
            queue_errors: vmxnet3_queue_errors.get(),
            command_errors: vmxnet3_command_errors.get(),
            activations: vmxnet3_activations.get(),
            resets: vmxnet3_resets.get(),
        }
    }

    /// Adds saved counts, because a counter never decreases.
    pub(crate) fn restore(&self, counters: &saved::Counters) {
        let saved::Counters {
            sent_frames,
            sent_bytes,
            received_frames,
            received_bytes,
            send_errors,
            send_discards,
            receive_no_buffers,
            receive_filtered,
            queue_errors,
            command_errors,
            activations,
            resets,
        } = *counters;
        self.vmxnet3_sent_frames.add(sent_frames);
        self.vmxnet3_sent_bytes.add(sent_bytes);
        self.vmxnet3_received_frames.add(received_frames);
        self.vmxnet3_received_bytes.add(received_bytes);
        self.vmxnet3_send_errors.add(send_errors);
        self.vmxnet3_send_discards.add(send_discards);
        self.vmxnet3_receive_no_buffers.add(receive_no_buffers);
        self.vmxnet3_receive_filtered.add(receive_filtered);
        self.vmxnet3_queue_errors.add(queue_errors);
        self.vmxnet3_command_errors.add(command_errors);
        self.vmxnet3_activations.add(activations);
        self.vmxnet3_resets.add(resets);
    }
}

/// Returns all counters of a device, at zero.
pub fn all_counters() -> Vec<Counter> {
    DeviceCounters::default().list()
}
