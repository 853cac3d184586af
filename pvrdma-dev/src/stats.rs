//! Counters and status of a device.

use pvrdma_base::{Count, Counter, Unit, counters};
use pvrdma_guest_memory::{Kept, MemoryBudget};
use pvrdma_packet::MacAddr;
use pvrdma_verbs::PortAttributes;
use pvrdma_verbs_types::GidType;
use serde::{Deserialize, Serialize, Serializer};

use crate::abi::cmd::{COMMANDS, Opcode};
use crate::due::InferCounters;
use crate::events::EventCounters;
use crate::intr::InterruptCounters;

counters! {
    /// Counters of a device, except those of commands.
    pub(crate) struct DeviceCounters {
        /// Device shared regions that were accepted.
        handshakes,
        /// Device shared regions that were refused.
        handshakes_refused,
        /// Activations by a driver.
        activations,
        /// Resets of the device.
        resets,
        /// Accesses to nonexistent registers, or of an invalid size.
        register_errors,
        /// MODIFY_QP commands that the adapter refused.
        modify_qp_refused,
        /// Connections that ended because the device was restored from a snapshot, or because another machine runs with
        /// its saved state.
        connections_not_restored,
        /// Commands with an unknown number.
        commands_unknown,
        /// Doorbells of send queues.
        doorbells_send,
        /// Doorbells of receive queues, including shared ones.
        doorbells_recv,
        /// Doorbells that arm a completion queue.
        doorbells_arm,
        /// Doorbells that report a poll of an empty completion queue.
        doorbells_poll,
        /// Doorbells that name no object of their context.
        doorbells_ignored,
        /// Doorbells on pages of processes that arrived as messages.
        doorbells_of_processes,
        /// Doorbell pages of processes that were found to be memory.
        doorbells_mapped,
        /// Doorbell pages of processes that were memory and trap again.
        doorbells_unmapped,
        /// Rings in which polling found work.
        doorbells_found,
    }
}

counters! {
    /// Refusals by the VMM's system. They lose nothing: doorbells of such pages trap, or their rings are watched.
    pub(crate) struct WindowCounters {
        /// Failures to turn a doorbell page into memory.
        doorbells_map_refused,
        /// Failures to make a mapped doorbell page trap again.
        doorbells_unmap_refused,
    }
}

/// Counters of a device. The adapter and the interrupts have their own.
#[derive(Debug, Default)]
pub(crate) struct Stats {
    commands: [Count; COMMANDS],
    refused: [Count; COMMANDS],
    /// All counters except those of commands.
    pub(crate) counts: DeviceCounters,
}

impl Stats {
    /// Counts a command and its outcome.
    pub(crate) fn command(&self, opcode: Opcode, refused: bool) {
        let Some(index) = opcode.index() else {
            self.counts.commands_unknown.increment();
            return;
        };
        if let (Some(all), Some(bad)) = (self.commands.get(index), self.refused.get(index)) {
            all.increment();
            if refused {
                bad.increment();
            }
        }
    }

    /// Returns every command with its number of executions and refusals.
    pub(crate) fn commands(&self) -> Vec<CommandCount> {
        Opcode::names()
            .zip(self.commands.iter().zip(&self.refused))
            .map(|(name, (all, refused))| CommandCount { name, executed: all.get(), refused: refused.get() })
            .filter(|count| count.executed != 0)
            .collect()
    }
}

/// Phase of a device's life cycle (section 3.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// No driver is active.
    Reset,
    /// A driver has passed its shared region.
    Handshake,
    /// Commands are served.
    Active,
}

/// Recovery of a device from a crash of the process that served it. It ends when a driver resets the device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct RecoveryStatus {
    /// The driver that was active was told by the event DEVICE_FATAL, or none was active.
    pub told: bool,
    /// Reason why the driver was not told.
    pub problem: Option<String>,
}

/// Numbers of objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[expect(missing_docs, reason = "each is the number of objects of its name")]
pub struct ObjectCounts {
    pub contexts: u32,
    pub pds: u32,
    pub mrs: u32,
    pub cqs: u32,
    pub srqs: u32,
    pub qps: u32,
    /// Number of GID table entries. `None` while a command changes the table.
    #[serde(serialize_with = "count_or_busy")]
    pub gids: Option<u32>,
}

impl Default for ObjectCounts {
    /// Returns zero for every kind.
    fn default() -> Self {
        Self { contexts: 0, pds: 0, mrs: 0, cqs: 0, srqs: 0, qps: 0, gids: Some(0) }
    }
}

#[expect(clippy::ref_option, reason = "serde gives a reference")]
fn count_or_busy<S: Serializer>(count: &Option<u32>, serializer: S) -> Result<S::Ok, S::Error> {
    match count {
        Some(count) => serializer.serialize_u32(*count),
        None => serializer.serialize_str("busy"),
    }
}

/// Guest memory of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MemoryStatus {
    /// Mapped bytes.
    pub mapped_bytes: u64,
    /// Bytes locked in memory.
    pub pinned_bytes: u64,
}

/// Memory in bytes that a guest and its peers make this process allocate.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct KeptStatus {
    /// Bytes in use.
    pub used_bytes: u64,
    /// Limit.
    pub limit_bytes: u64,
    /// Objects with their page lists, and the minimum that each of them needs to make progress.
    pub objects_bytes: u64,
    /// Requests taken from their rings ahead of their turn.
    pub requests_bytes: u64,
    /// Packets of peers that wait for other packets.
    pub packets_bytes: u64,
    /// Batches of packets in transit, and transmit queues of links.
    pub queues_bytes: u64,
    /// Bookkeeping of locked guest pages and their users.
    pub pins_bytes: u64,
    /// Saved state on its way to or from a VMM, and the log of written pages.
    pub migration_bytes: u64,
    /// Number of refused allocations.
    pub refused: u64,
}

impl From<&MemoryBudget> for KeptStatus {
    fn from(budget: &MemoryBudget) -> Self {
        Self {
            used_bytes: budget.used(),
            limit_bytes: budget.limit(),
            objects_bytes: budget.used_for(Kept::Objects),
            requests_bytes: budget.used_for(Kept::Requests),
            packets_bytes: budget.used_for(Kept::Packets),
            queues_bytes: budget.used_for(Kept::Queues),
            pins_bytes: budget.used_for(Kept::Pins),
            migration_bytes: budget.used_for(Kept::Migration),
            refused: Kept::ALL.iter().map(|&kept| budget.refused(kept)).sum(),
        }
    }
}

impl KeptStatus {
    /// Returns the same values as metrics for export.
    pub(crate) fn counters(&self) -> Vec<Counter> {
        let Self { used_bytes, limit_bytes, objects_bytes, requests_bytes, packets_bytes, queues_bytes, .. } = *self;
        let bytes = |name, help, value| Counter::gauge(name, Unit::Bytes, help, value);
        vec![
            bytes(
                "kept_bytes",
                "Daemon memory in use for the guest and its peers, excluding guest memory.",
                used_bytes,
            ),
            bytes("kept_limit_bytes", "Maximum of `kept_bytes` (`max_memory`).", limit_bytes),
            bytes("kept_objects_bytes", "Part of `kept_bytes` for objects and their page lists.", objects_bytes),
            bytes("kept_requests_bytes", "Part of `kept_bytes` for prefetched requests.", requests_bytes),
            bytes(
                "kept_packets_bytes",
                "Part of `kept_bytes` for packets of peers that wait for others.",
                packets_bytes,
            ),
            bytes(
                "kept_queues_bytes",
                "Part of `kept_bytes` for packets in transit and queues in front of links.",
                queues_bytes,
            ),
            bytes("kept_pins_bytes", "Part of `kept_bytes` for the record of locked guest pages.", self.pins_bytes),
            bytes(
                "kept_migration_bytes",
                "Part of `kept_bytes` for a migration: saved state in transit, and the log of written pages.",
                self.migration_bytes,
            ),
            Counter::total(
                "kept_refused",
                Unit::None,
                "Requests that were refused because `kept_bytes` would exceed its maximum.",
                self.refused,
            ),
        ]
    }
}

/// Number of executions of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct CommandCount {
    /// Name.
    #[serde(skip)]
    pub name: &'static str,
    /// All executions.
    pub executed: u64,
    /// Executions that were refused.
    pub refused: u64,
}

fn commands_by_name<S: Serializer>(commands: &[CommandCount], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(commands.iter().map(|count| (count.name, count)))
}

/// Status of a device at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct DeviceStatus {
    /// Name.
    pub name: String,
    /// Ethernet address.
    pub mac: MacAddr,
    /// Interface version.
    pub version: u32,
    /// Encapsulation.
    pub roce: GidType,
    /// Phase of the life cycle.
    pub phase: Phase,
    /// The process that served the device has crashed, and no driver has started it again since. `None`: neither.
    pub recovery: Option<RecoveryStatus>,
    /// `true` if the guest has enabled bus mastering.
    pub bus_master: bool,
    /// Port attributes.
    pub port: PortAttributes,
    /// Numbers of existing objects.
    pub objects: ObjectCounts,
    /// Memory that the guest and its peers make this process allocate, beside the guest's own memory.
    pub kept: KeptStatus,
    /// Guest memory.
    pub memory: MemoryStatus,
    /// Commands that were executed at least once.
    #[serde(serialize_with = "commands_by_name")]
    pub commands: Vec<CommandCount>,
    /// The device's counters.
    #[serde(serialize_with = "Counter::by_name")]
    pub counters: Vec<Counter>,
    /// The adapter's counters.
    #[serde(serialize_with = "Counter::by_name")]
    pub adapter: Vec<Counter>,
}

/// Returns all counters of a device at zero, except for commands. Its adapter has its own.
pub fn all_counters() -> Vec<Counter> {
    [
        DeviceCounters::default().list(),
        InterruptCounters::default().list(),
        EventCounters::default().list(),
        InferCounters::default().list(),
        WindowCounters::default().list(),
        KeptStatus::default().counters(),
    ]
    .concat()
}
