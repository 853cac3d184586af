//! Every change of a saved state is refused, or a guest can observe it.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

use pvrdma_pci_function::PciFunction;
use pvrdma_saved_state::vmxnet3::{
    Counters, DataRing, Function, Interrupts, MulticastAddresses, ReceiveQueue, Ring, Rss, Session, Statistics,
    TransmitQueue, Vector,
};

use super::busy::Busy;
use super::{records, state_of};

/// A value with variants that differ from it in one place. Each has the path to that place.
trait Mutate: Sized {
    fn mutants(&self) -> Vec<(String, Self)>;
}

impl Mutate for bool {
    fn mutants(&self) -> Vec<(String, Self)> {
        vec![(" inverted".to_owned(), !self)]
    }
}

macro_rules! mutate_numbers {
    ($($number:ident),*) => {
        $(impl Mutate for $number {
            fn mutants(&self) -> Vec<(String, Self)> {
                // The last one keeps the alignment of a ring.
                let changed = [self.wrapping_add(1), self.wrapping_sub(1), self.wrapping_add(512)];
                changed.map(|number| (format!(" = {number:#x}"), number)).to_vec()
            }
        })*
    };
}
mutate_numbers!(u32, u64);

/// Bytes: one more, one less, and those that are not zero, and the first and the last one, with one bit changed.
impl Mutate for Vec<u8> {
    fn mutants(&self) -> Vec<(String, Self)> {
        let mut mutants = vec![
            (" longer".to_owned(), [&self[..], &[0]].concat()),
            (" shorter".to_owned(), self[..self.len().saturating_sub(1)].to_vec()),
        ];
        for (at, &byte) in self.iter().enumerate().filter(|(at, byte)| **byte != 0 || *at == 0 || at + 1 == self.len())
        {
            let mut bytes = self.clone();
            bytes[at] = if byte == 0 { 0x80 } else { byte & (byte - 1) };
            mutants.push((format!("[{at}]"), bytes));
        }
        mutants
    }
}

impl<T: Mutate + Clone + Default> Mutate for Vec<T> {
    fn mutants(&self) -> Vec<(String, Self)> {
        let last = self.last().cloned().unwrap_or_default();
        let mut mutants = vec![
            (" longer".to_owned(), [&self[..], &[last]].concat()),
            (" shorter".to_owned(), self[..self.len().saturating_sub(1)].to_vec()),
        ];
        for (at, item) in self.iter().enumerate() {
            mutants.extend(item.mutants().into_iter().map(|(path, item)| {
                let mut items = self.clone();
                items[at] = item;
                (format!("[{at}]{path}"), items)
            }));
        }
        mutants
    }
}

impl<T: Mutate + Clone + Default> Mutate for Option<T> {
    fn mutants(&self) -> Vec<(String, Self)> {
        match self {
            None => vec![(" present".to_owned(), Some(T::default()))],
            Some(value) => {
                let changed = value.mutants().into_iter().map(|(path, value)| (path, Some(value)));
                changed.chain([(" missing".to_owned(), None)]).collect()
            }
        }
    }
}

/// Implements [`Mutate`] for messages. A field that is not listed here does not compile.
macro_rules! mutate_messages {
    ($($message:ident { $($field:ident),* $(,)? })*) => {
        $(impl Mutate for $message {
            fn mutants(&self) -> Vec<(String, Self)> {
                let Self { $($field),* } = self;
                let mut mutants = Vec::new();
                $(mutants.extend($field.mutants().into_iter().map(|(path, value)| {
                    let mut changed = self.clone();
                    changed.$field = value;
                    (format!(".{}{path}", stringify!($field)), changed)
                }));)*
                mutants
            }
        })*
    };
}

mutate_messages! {
    Function {
        config_space, revision, shared, result, mac, coalesce, interrupts, transmit_statistics, receive_statistics,
        counters, session,
    }
    Interrupts { auto_mask, cause, vectors, delivered }
    Vector { masked, pending, in_round, rounds }
    Statistics { values }
    Counters {
        sent_frames, sent_bytes, received_frames, received_bytes, send_errors, send_discards, receive_no_buffers,
        receive_filtered, queue_errors, command_errors, activations, resets,
    }
    Session {
        shared, queue_descriptors, revision, mtu, event_vector, link_reported, features, receive_mode, vlans, rss,
        transmit, receive,
    }
    Rss { hash_types, key, table }
    Ring { base, entries, index, generation }
    TransmitQueue { ring, completions, vector, error }
    ReceiveQueue { first, second, completions, data, vector, max_buffers, doorbell_wanted, error, waits_since }
    DataRing { base, slot }
    MulticastAddresses { addresses }
}

/// Returns a function with each possible change.
pub(super) fn mutants(function: &Function) -> Vec<Function> {
    function.mutants().into_iter().map(|(_, function)| function).collect()
}

/// Changes that cannot be observed, with the reason.
fn is_equivalent(path: &str) -> bool {
    let vector = path.strip_prefix(".interrupts.vectors[").and_then(|rest| rest.split_once(']'));
    if let Some((number, field)) = vector {
        let number: u32 = number.parse().unwrap();
        return match field.split(' ').next().unwrap() {
            // Packets that leave at the end of the pause make these pending.
            ".pending" => number < 2,
            // Rounds matter to a receive queue that lacks buffers, and their number to one whose frame waits.
            ".in_round" => number >= 3,
            ".rounds" => number >= 1,
            _ => false,
        };
    }
    // A bit that a guest cannot change is not restored, see below.
    path.starts_with(".config_space[")
        // Statistics that are missing are zero.
        || path.ends_with("_statistics shorter")
        // The frame of queue 0 waits in this round, that of queue 1 in an earlier one, and none of queue 2.
        || path == ".session.receive[0].waits_since missing"
        || path.starts_with(".session.receive[1].waits_since =")
        || path == ".session.receive[2].waits_since present"
        // No hash depends on the last bit.
        || path == ".session.rss.key[39]"
        // The queue has stopped.
        || path.starts_with(".session.transmit[2]") && !path.contains(".error")
}

thread_local! {
    /// Panics of this thread are expected.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Returns `None` if `run` panics, and prints nothing.
fn quietly<T>(run: impl FnOnce() -> T) -> Option<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let loud = take_hook();
        set_hook(Box::new(move |info| {
            if !QUIET.get() {
                loud(info);
            }
        }));
    });
    QUIET.set(true);
    let result = catch_unwind(AssertUnwindSafe(run)).ok();
    QUIET.set(false);
    result
}

#[test]
fn every_change_of_a_state_is_refused_or_observed() {
    let busy = Busy::get();
    let (function, multicast) = records(&busy.state);
    let plain = busy.observe(&busy.state).unwrap();
    assert!(plain == busy.observe(&busy.state).unwrap(), "two observations of one state differ");
    let changed = function.mutants().into_iter().map(|(path, function)| (path, function, multicast.clone()));
    let filters = multicast[0].mutants().into_iter().map(|(path, list)| (path, function.clone(), vec![list]));
    let (mut refused, mut observed, mut unnoticed) = (0, 0, Vec::new());
    for (path, function, multicast) in changed.chain(filters).filter(|(path, ..)| !is_equivalent(path)) {
        let state = state_of(&busy.state, &function, &multicast);
        match quietly(|| busy.observe(&state)) {
            Some(Err(_)) => refused += 1,
            Some(Ok(seen)) if seen == plain => unnoticed.push(path),
            // A driver that panics has observed something.
            Some(Ok(_)) | None => observed += 1,
        }
    }
    assert!(unnoticed.is_empty(), "{unnoticed:#?}");
    assert!(refused > 100 && observed > 250, "{refused} refused, {observed} observed");
}

/// Each bit of configuration space that a guest can change is restored, and no other.
#[test]
fn the_bits_that_a_guest_can_change_are_restored() {
    let busy = Busy::get();
    let (function, multicast) = records(&busy.state);
    for bit in 0..256 * 8 {
        let (at, mask) = (bit / 8, 1 << (bit % 8));
        let read = |guest: &crate::testing::Guest| {
            let mut byte = [0];
            guest.device.config_read(at, &mut byte);
            byte[0] & mask
        };
        let (guest, _) = busy.fresh();
        let before = read(&guest);
        guest.device.config_write(at, &[before ^ mask]);
        let can_change = read(&guest) != before;
        guest.device.reset();
        let mut function = function.clone();
        function.config_space[at] ^= mask;
        let state = state_of(&busy.state, &function, &multicast);
        guest.device.restore_state(&mut &state[..]).unwrap();
        let expected = if can_change { function.config_space[at] & mask } else { before };
        assert_eq!(read(&guest), expected, "bit {bit}");
    }
}
