//! Tests of saving and restoring.

#![expect(clippy::cast_possible_truncation, reason = "numbers of queues, and random numbers below a limit")]

mod busy;
mod dump;
mod hostile;
mod kept;
mod mutate;
mod pause;
mod script;
mod value;

use std::sync::Arc;

use pvrdma_packet::MacAddr;
use pvrdma_pci_function::Migratable;
use pvrdma_saved_state::{Reader, Record, Writer, vmxnet3 as saved};

use super::stream::MAX_STATE;
use crate::testing::frames::GUEST_MAC;
use crate::testing::{Guest, Memory, RecordingPort};
use crate::{FramePort, Vmxnet3Config, Vmxnet3Device};

/// Configuration of the tests.
fn config() -> Vmxnet3Config {
    Vmxnet3Config::new("vm1", MacAddr(GUEST_MAC))
}

/// Pauses a device and returns its state.
fn save(device: &Vmxnet3Device) -> Vec<u8> {
    device.pause();
    let mut state = Vec::new();
    device.save(&mut state).unwrap();
    state
}

/// Creates another device for a guest with this memory.
fn another(guest: &Guest, memory: Arc<Memory>, port: &Arc<RecordingPort>) -> Guest {
    let port: Arc<dyn FramePort> = Arc::clone(port) as _;
    Guest::with_memory(config(), memory, Arc::clone(&guest.irqs), port)
}

/// Splits a state into its messages.
fn records(state: &[u8]) -> (saved::Function, Vec<saved::MulticastAddresses>) {
    let mut input = state;
    let mut reader = Reader::new(&mut input, MAX_STATE).unwrap();
    let function = reader.expect().unwrap();
    let mut multicast = Vec::new();
    while let Some(record) = reader.next().unwrap() {
        multicast.push(record.decode().unwrap());
    }
    (function, multicast)
}

/// Writes a state of any messages, with the header of another state.
fn state_of<R: Record>(like: &[u8], function: &saved::Function, others: &[R]) -> Vec<u8> {
    let mut input = like;
    let header = Reader::new(&mut input, MAX_STATE).unwrap().header().clone();
    let mut state = Vec::new();
    let mut writer = Writer::new(&mut state, &header, MAX_STATE).unwrap();
    writer.write(function).unwrap();
    others.iter().for_each(|record| writer.write(record).unwrap());
    writer.finish().unwrap();
    state
}
