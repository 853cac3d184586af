//! MSI-X: the table and the pending bits of a function (PCI Local Bus 3.0, section 6.8.2).

use std::fmt;
use std::io;

use log::debug;
use parking_lot::Mutex;
use pvrdma_pci_function::InterruptSink;

use crate::interrupts::{InterruptLine, Message};

/// State of a vector.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SavedVector {
    /// Number of the function in the slot.
    pub function: u8,
    /// Number of the vector.
    pub vector: u16,
    /// Address and data from the table.
    pub message: Message,
    /// Mask bit of the table.
    pub masked: bool,
    /// Pending bit.
    pub pending: bool,
}

/// Bytes of a table entry: address, data, vector control.
const ENTRY: u64 = 16;
const ENTRY_MASKED: u32 = 1;
const CONTROL_ENABLE: u16 = 1 << 15;
const CONTROL_MASKED: u16 = 1 << 14;

/// The vectors of a function: its table, its pending bits, and the interrupt lines. It is the function's
/// [`InterruptSink`].
#[derive(Default)]
pub struct MsixVectors {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    vectors: Vec<Vector>,
    enabled: bool,
    /// Function Mask is set: all vectors are masked.
    masked: bool,
    unrouted: u64,
}

struct Vector {
    message: Message,
    masked: bool,
    pending: bool,
    line: Option<Box<dyn InterruptLine>>,
    /// Message that the line was given last, if it accepted that.
    routed: Option<Message>,
}

impl Vector {
    /// Returns to the power-on state, but keeps the line.
    fn reset(&mut self) {
        *self = Self { line: self.line.take(), routed: self.routed, ..Self::default() };
    }
}

impl Default for Vector {
    fn default() -> Self {
        Self { message: Message::default(), masked: true, pending: false, line: None, routed: None }
    }
}

impl fmt::Debug for MsixVectors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.lock();
        f.debug_struct("MsixVectors")
            .field("vectors", &state.vectors.len())
            .field("enabled", &state.enabled)
            .field("masked", &state.masked)
            .field("unrouted", &state.unrouted)
            .finish_non_exhaustive()
    }
}

impl State {
    /// Sends the pending interrupt of one vector if it is not masked.
    fn deliver(&mut self, index: usize) {
        let open = self.enabled && !self.masked;
        let Some(vector) = self.vectors.get_mut(index).filter(|vector| open && !vector.masked) else { return };
        let Some(line) = &vector.line else { return };
        if vector.routed != Some(vector.message) {
            vector.routed = None;
            match line.route(vector.message) {
                Ok(()) => vector.routed = Some(vector.message),
                Err(error) => {
                    // Logged at debug level only, because a guest can cause any number of these.
                    debug!("vector {index}: {:x?}: {error}", vector.message);
                    self.unrouted = self.unrouted.saturating_add(1);
                }
            }
        }
        if std::mem::take(&mut vector.pending) && vector.routed.is_some() {
            line.trigger();
        }
    }

    fn deliver_all(&mut self) {
        (0..self.vectors.len()).for_each(|index| self.deliver(index));
    }

    /// Reads four bytes of the table.
    fn table_read(&self, offset: u64) -> u32 {
        let Some(vector) = index(offset, ENTRY).and_then(|index| self.vectors.get(index)) else { return 0 };
        let [low, high] = halves(vector.message.address);
        match offset % ENTRY {
            0 => low,
            4 => high,
            8 => vector.message.data,
            12 => u32::from(vector.masked),
            _ => 0,
        }
    }

    /// Writes four bytes of the table. The caller delivers pending interrupts.
    fn table_write(&mut self, offset: u64, value: u32) {
        let Some(vector) = index(offset, ENTRY).and_then(|index| self.vectors.get_mut(index)) else { return };
        let [low, high] = halves(vector.message.address);
        match offset % ENTRY {
            0 => vector.message.address = joined(value & !3, high),
            4 => vector.message.address = joined(low, value),
            8 => vector.message.data = value,
            12 => vector.masked = value & ENTRY_MASKED != 0,
            _ => {}
        }
    }

    /// Reads four bytes of the pending bits.
    fn pending_read(&self, offset: u64) -> u32 {
        let first = usize::try_from(offset).map_or(usize::MAX, |offset| offset.saturating_mul(8));
        let bits = self.vectors.iter().skip(first).take(32).enumerate();
        bits.fold(0, |all, (bit, vector)| all | u32::from(vector.pending) << bit)
    }
}

fn index(offset: u64, size: u64) -> Option<usize> {
    usize::try_from(offset / size).ok()
}

const fn halves(value: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])]
}

const fn joined(low: u32, high: u32) -> u64 {
    (high as u64) << 32 | low as u64
}

/// Bytes of the table for this number of vectors.
pub(crate) const fn table_size(vectors: u16) -> u64 {
    vectors as u64 * ENTRY
}

/// Bytes of the pending bits for this number of vectors.
pub(crate) const fn pending_size(vectors: u16) -> u64 {
    (vectors as u64).div_ceil(64) * 8
}

/// Splits an access into 32-bit words. `None` unless it has four or eight bytes and is naturally aligned.
fn words(offset: u64, len: usize) -> Option<impl Iterator<Item = u64>> {
    let fits = matches!(len, 4 | 8) && offset.is_multiple_of(len as u64);
    fits.then(|| (0..len as u64 / 4).map(move |word| offset + word * 4))
}

impl MsixVectors {
    /// Sets the number of vectors, all in their power-on state.
    pub(crate) fn set_count(&self, vectors: u16) {
        self.state.lock().vectors.resize_with(vectors.into(), Vector::default);
    }

    /// Gives every vector a line.
    pub(crate) fn connect<L: InterruptLine + 'static>(
        &self,
        line: &mut impl FnMut() -> io::Result<L>,
    ) -> io::Result<()> {
        for vector in &mut self.state.lock().vectors {
            vector.line = Some(Box::new(line()?));
            vector.routed = None;
        }
        Ok(())
    }

    /// Takes over the message control register.
    pub(crate) fn set_control(&self, control: u16) {
        let mut state = self.state.lock();
        state.enabled = control & CONTROL_ENABLE != 0;
        state.masked = control & CONTROL_MASKED != 0;
        state.deliver_all();
    }

    /// Returns to the power-on state.
    pub(crate) fn reset(&self) {
        let mut state = self.state.lock();
        (state.enabled, state.masked) = (false, false);
        state.vectors.iter_mut().for_each(Vector::reset);
    }

    /// Reads the table. An invalid access reads as zero.
    pub(crate) fn table_read(&self, offset: u64, data: &mut [u8]) {
        self.read(offset, data, State::table_read);
    }

    /// Reads the pending bits.
    pub(crate) fn pending_read(&self, offset: u64, data: &mut [u8]) {
        self.read(offset, data, State::pending_read);
    }

    fn read(&self, offset: u64, data: &mut [u8], word: fn(&State, u64) -> u32) {
        data.fill(0);
        let Some(words) = words(offset, data.len()) else { return };
        let state = self.state.lock();
        for (at, bytes) in words.zip(data.chunks_exact_mut(4)) {
            bytes.copy_from_slice(&word(&state, at).to_le_bytes());
        }
    }

    /// Writes to the table. An invalid access is ignored.
    pub(crate) fn table_write(&self, offset: u64, data: &[u8]) {
        let Some(words) = words(offset, data.len()) else { return };
        let mut state = self.state.lock();
        for (at, bytes) in words.zip(data.chunks_exact(4)) {
            state.table_write(at, bytes.try_into().map_or(0, u32::from_le_bytes));
        }
        if let Some(index) = index(offset, ENTRY) {
            state.deliver(index);
        }
    }

    /// Returns the table and the pending bits, as those of this function.
    pub(crate) fn save(&self, function: u8) -> Vec<SavedVector> {
        let state = self.state.lock();
        let save = |(vector, its): (u16, &Vector)| {
            let &Vector { message, masked, pending, line: _, routed: _ } = its;
            SavedVector { function, vector, message, masked, pending }
        };
        (0..).zip(&state.vectors).map(save).collect()
    }

    /// Restores the table and the pending bits. Nothing is sent before [`Self::set_control`].
    pub(crate) fn restore<'a>(&self, saved: impl Iterator<Item = &'a SavedVector>) {
        let mut state = self.state.lock();
        (state.enabled, state.masked) = (false, false);
        for &SavedVector { function: _, vector, message, masked, pending } in saved {
            if let Some(its) = state.vectors.get_mut(usize::from(vector)) {
                its.message = Message { address: message.address & !3, ..message };
                (its.masked, its.pending) = (masked, pending);
            }
        }
    }

    /// Number of interrupts lost because a line did not accept the guest's message.
    pub fn unrouted(&self) -> u64 {
        self.state.lock().unrouted
    }
}

impl InterruptSink for MsixVectors {
    fn msix(&self, vector: u16) {
        let mut state = self.state.lock();
        // While MSI-X is disabled, the function has no such interrupt. While it is masked, the pending bit remembers
        // it.
        if !state.enabled {
            return;
        }
        let index = usize::from(vector);
        if let Some(vector) = state.vectors.get_mut(index) {
            vector.pending = true;
            state.deliver(index);
        }
    }

    /// Does nothing: no pin is wired.
    fn intx(&self, _asserted: bool) {}
}

#[cfg(test)]
mod tests;
