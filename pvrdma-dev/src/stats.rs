//! Counters and what a status display shows.

use std::sync::atomic::{AtomicU64, Ordering};

use pvrdma_verbs::{Counter, GidType, MacAddr, PortAttributes};

use crate::abi::cmd::{COMMANDS, Opcode};

/// A number that only grows.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What a device counts. The adapter and the interrupts count for themselves.
#[derive(Debug, Default)]
pub(crate) struct Stats {
    commands: [Count; COMMANDS],
    refused: [Count; COMMANDS],
    pub(crate) modify_qp_refused: Count,
    pub(crate) commands_unknown: Count,
    pub(crate) register_errors: Count,
    pub(crate) handshakes: Count,
    pub(crate) handshakes_refused: Count,
    pub(crate) activations: Count,
    pub(crate) resets: Count,
    pub(crate) doorbells_send: Count,
    pub(crate) doorbells_recv: Count,
    pub(crate) doorbells_arm: Count,
    pub(crate) doorbells_poll: Count,
    pub(crate) doorbells_ignored: Count,
}

impl Stats {
    /// Counts a command and its outcome.
    pub(crate) fn command(&self, opcode: Opcode, refused: bool) {
        let Some(index) = opcode.index() else {
            self.commands_unknown.add();
            return;
        };
        if let (Some(all), Some(bad)) = (self.commands.get(index), self.refused.get(index)) {
            all.add();
            if refused {
                bad.add();
            }
        }
    }

    /// Every command with its number of executions and refusals.
    pub(crate) fn commands(&self) -> Vec<CommandCount> {
        Opcode::names()
            .zip(self.commands.iter().zip(&self.refused))
            .map(|(name, (all, refused))| CommandCount { name, executed: all.get(), refused: refused.get() })
            .filter(|count| count.executed != 0)
            .collect()
    }

    /// The other counters.
    pub(crate) fn counters(&self) -> Vec<Counter> {
        vec![
            ("handshakes", self.handshakes.get()),
            ("handshakes_refused", self.handshakes_refused.get()),
            ("activations", self.activations.get()),
            ("resets", self.resets.get()),
            ("register_errors", self.register_errors.get()),
            ("modify_qp_refused", self.modify_qp_refused.get()),
            ("commands_unknown", self.commands_unknown.get()),
            ("doorbells_send", self.doorbells_send.get()),
            ("doorbells_recv", self.doorbells_recv.get()),
            ("doorbells_arm", self.doorbells_arm.get()),
            ("doorbells_poll", self.doorbells_poll.get()),
            ("doorbells_ignored", self.doorbells_ignored.get()),
        ]
    }
}

/// Where a device is in its life (section 3.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// No driver.
    Reset,
    /// A driver has shown its shared region.
    Handshake,
    /// Commands are served.
    Active,
}

/// Numbers of objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[expect(missing_docs, reason = "each is the number of objects of its name")]
pub struct ObjectCounts {
    pub contexts: u32,
    pub pds: u32,
    pub mrs: u32,
    pub cqs: u32,
    pub srqs: u32,
    pub qps: u32,
    pub gids: u32,
}

/// How often a command came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CommandCount {
    /// Its name.
    pub name: &'static str,
    /// All of them.
    pub executed: u64,
    /// Those of them that were refused.
    pub refused: u64,
}

/// A device at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceStatus {
    /// Name.
    pub name: String,
    /// Ethernet address.
    pub mac: MacAddr,
    /// Interface version.
    pub version: u32,
    /// Encapsulation.
    pub roce: GidType,
    /// Life cycle.
    pub phase: Phase,
    /// Whether the guest lets the function reach memory.
    pub bus_master: bool,
    /// The port.
    pub port: PortAttributes,
    /// Live objects.
    pub objects: ObjectCounts,
    /// Extents of page lists held, 16 bytes each.
    pub page_list_extents: u64,
    /// Bytes of guest memory mapped.
    pub mapped_bytes: u64,
    /// Bytes of guest memory locked.
    pub pinned_bytes: u64,
    /// Commands that came at all.
    pub commands: Vec<CommandCount>,
    /// The device's counters.
    pub counters: Vec<Counter>,
    /// The adapter's counters.
    pub adapter: Vec<Counter>,
}
