//! State of a device in transit between its function and its client.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::sync::Arc;

use pvrdma_guest_memory::{Charge, Kept, MemoryBudget, OverBudget};

/// Bytes that are allocated and charged at a time.
const CHUNK: usize = 64 << 10;

/// Bytes in transit, charged to the memory that the device may keep. Bytes that were read are freed.
#[derive(Debug)]
pub(super) struct StateData {
    chunks: VecDeque<Chunk>,
    /// Bytes of the first chunk that were read.
    done: usize,
    len: u64,
    budget: Arc<MemoryBudget>,
}

#[derive(Debug)]
struct Chunk {
    bytes: Vec<u8>,
    _charge: Charge,
}

impl StateData {
    pub(super) fn new(budget: &Arc<MemoryBudget>) -> Self {
        Self { chunks: VecDeque::new(), done: 0, len: 0, budget: Arc::clone(budget) }
    }

    /// Bytes that were not read yet.
    pub(super) const fn len(&self) -> u64 {
        self.len
    }

    /// Adds bytes at the end: all of them, or none.
    pub(super) fn append(&mut self, data: &[u8]) -> Result<(), OverBudget> {
        let room = self.chunks.back().map_or(0, |chunk| CHUNK - chunk.bytes.len().min(CHUNK));
        let (head, rest) = data.split_at(room.min(data.len()));
        let charge = |_: &[u8]| self.budget.charge(Kept::Migration, CHUNK as u64);
        let charges = rest.chunks(CHUNK).map(charge).collect::<Result<Vec<_>, _>>()?;
        if let Some(last) = self.chunks.back_mut() {
            last.bytes.extend(head);
        }
        for (part, charge) in rest.chunks(CHUNK).zip(charges) {
            let mut bytes = Vec::with_capacity(CHUNK);
            bytes.extend(part);
            self.chunks.push_back(Chunk { bytes, _charge: charge });
        }
        self.len += data.len() as u64;
        Ok(())
    }

    /// Moves at most `most` bytes from the beginning to the end of `out`. Returns their number.
    pub(super) fn drain_to(&mut self, most: usize, out: &mut Vec<u8>) -> usize {
        let mut taken = 0;
        while let Some(chunk) = self.chunks.front().filter(|_| taken < most) {
            let rest = chunk.bytes.get(self.done..).unwrap_or_default();
            let part = rest.get(..rest.len().min(most - taken)).unwrap_or_default();
            out.extend(part);
            let count = part.len();
            self.advance(count);
            taken += count;
        }
        taken
    }

    /// Drops `count` bytes of the first chunk, and the chunk if it is used up.
    fn advance(&mut self, count: usize) {
        self.done += count;
        self.len -= count as u64;
        if self.chunks.front().is_some_and(|chunk| chunk.bytes.len() <= self.done) {
            self.chunks.pop_front();
            self.done = 0;
        }
    }
}

/// Fails with [`io::ErrorKind::OutOfMemory`] if the device may not keep so much.
impl Write for StateData {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.append(data).map_err(|error| io::Error::new(io::ErrorKind::OutOfMemory, error))?;
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for StateData {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let Some(chunk) = self.chunks.front() else { return Ok(0) };
        let rest = chunk.bytes.get(self.done..).unwrap_or_default();
        let count = rest.len().min(buf.len());
        if let (Some(to), Some(from)) = (buf.get_mut(..count), rest.get(..count)) {
            to.copy_from_slice(from);
        }
        self.advance(count);
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|at| u8::try_from(at / 7 % 251).unwrap()).collect()
    }

    #[test]
    fn bytes_come_out_in_order_and_are_freed() {
        let budget = MemoryBudget::new(1 << 20);
        let mut data = StateData::new(&budget);
        let sent = pattern(3 * CHUNK + 5);
        let (a, rest) = sent.split_at(10);
        let (b, c) = rest.split_at(2 * CHUNK);
        for part in [a, &[], b, c] {
            data.append(part).unwrap();
        }
        assert_eq!((data.len(), budget.used_for(Kept::Migration)), (sent.len() as u64, 4 * CHUNK as u64));
        let mut received = Vec::new();
        assert_eq!(data.drain_to(CHUNK + 1, &mut received), CHUNK + 1);
        assert_eq!(budget.used(), 3 * CHUNK as u64);
        data.read_to_end(&mut received).unwrap();
        assert!(received == sent && data.len() == 0 && budget.used() == 0);
        assert_eq!((data.drain_to(1, &mut received), data.read(&mut [0; 4]).unwrap()), (0, 0));
    }

    #[test]
    fn data_that_does_not_fit_is_refused_as_a_whole() {
        let budget = MemoryBudget::new(2 * CHUNK as u64);
        let mut data = StateData::new(&budget);
        data.append(&pattern(10)).unwrap();
        assert!(data.append(&pattern(2 * CHUNK)).is_err());
        assert_eq!((data.len(), budget.used()), (10, CHUNK as u64));
        data.append(&pattern(2 * CHUNK - 10)).unwrap();
        assert_eq!(data.write(&[1]).unwrap_err().kind(), io::ErrorKind::OutOfMemory);
        drop(data);
        assert_eq!(budget.used(), 0);
    }
}
