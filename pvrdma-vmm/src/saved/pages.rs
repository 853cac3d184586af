//! Guest memory in a stream: runs of pages.

use anyhow::{Context, Result, ensure};
use std::io::Write;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use super::dirty::{Dirty, PAGE};
use super::frames::{Kind, MAX_BODY, Sender};

/// Maximum number of pages in a frame.
const RUN: usize = (MAX_BODY - 8) / PAGE;

/// Sends all memory except pages of zeros, which the receiver has already. Returns the number of pages sent.
pub(crate) fn send_all(memory: &GuestMemoryMmap, to: &mut Sender<impl Write>) -> Result<u64> {
    let mut sent = 0;
    for region in memory.iter() {
        let mut piece = vec![0; RUN * PAGE];
        for start in (0..region.len()).step_by(RUN * PAGE) {
            let address = region.start_addr().0.saturating_add(start);
            let len = usize::try_from(region.len() - start)?.min(piece.len());
            let bytes = piece.get_mut(..len).context("a piece of memory")?;
            memory.read_slice(bytes, GuestAddress(address))?;
            sent += send_nonzero(address, bytes, to)?;
        }
    }
    Ok(sent)
}

/// Sends the runs of pages that have a byte that is not zero.
fn send_nonzero(start: u64, bytes: &[u8], to: &mut Sender<impl Write>) -> Result<u64> {
    let mut sent = 0;
    let pages: Vec<(u64, &[u8])> = (start..).step_by(PAGE).zip(bytes.chunks(PAGE)).collect();
    for run in pages.chunk_by(|(_, a), (_, b)| is_zero(a) == is_zero(b)) {
        let Some(&(address, first)) = run.first() else { continue };
        if !is_zero(first) {
            let parts: Vec<&[u8]> = run.iter().map(|(_, page)| *page).collect();
            to.frame(Kind::Pages, &[&address.to_le_bytes(), &parts.concat()])?;
            sent += run.len() as u64;
        }
    }
    Ok(sent)
}

/// Sends these pages, including pages of zeros. Returns their number.
pub(crate) fn send_written(memory: &GuestMemoryMmap, written: &Dirty, to: &mut Sender<impl Write>) -> Result<u64> {
    let mut piece = vec![0; RUN * PAGE];
    for (address, pages) in written.runs(RUN as u64) {
        let bytes = usize::try_from(pages).ok().and_then(|pages| piece.get_mut(..pages.checked_mul(PAGE)?));
        let bytes = bytes.context("a run of pages")?;
        memory.read_slice(bytes, GuestAddress(address))?;
        to.frame(Kind::Pages, &[&address.to_le_bytes(), bytes])?;
    }
    Ok(written.pages())
}

fn is_zero(page: &[u8]) -> bool {
    page.iter().all(|byte| *byte == 0)
}

/// Writes a frame of pages to memory.
///
/// # Errors
/// These are no whole pages, or the machine does not have them.
pub(crate) fn receive(memory: &GuestMemoryMmap, body: &[u8]) -> Result<()> {
    let (address, bytes) = body.split_first_chunk().context("a run of pages without an address")?;
    let address = u64::from_le_bytes(*address);
    let whole = bytes.len().is_multiple_of(PAGE) && address.is_multiple_of(PAGE as u64);
    ensure!(whole, "the state has {} bytes of memory at {address:#x}, which are no pages", bytes.len());
    memory.write_slice(bytes, GuestAddress(address)).with_context(|| {
        format!("the state has {} bytes of memory at {address:#x}, where the machine has none", bytes.len())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::saved::frames::Receiver;

    const HIGH: u64 = 1 << 32;

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 3 << 20), (GuestAddress(HIGH), 1 << 20)]).unwrap()
    }

    #[test]
    fn memory_arrives_without_pages_of_zeros() {
        let source = memory();
        let last = (3_u64 << 20) - 1;
        for address in [0, 4096, 3 * 4096 + 5, (1 << 20) - 1, 1 << 20, last, HIGH, HIGH + (1 << 20) - 1] {
            source.write_obj(0xa5_u8, GuestAddress(address)).unwrap();
        }
        let mut sender = Sender::new(Vec::new()).unwrap();
        assert_eq!(send_all(&source, &mut sender).unwrap(), 8);
        let stream = sender.finish().unwrap();
        assert!(stream.len() < 9 * PAGE, "{}", stream.len());

        let (target, mut receiver) = (memory(), Receiver::new(&stream[..]).unwrap());
        while let (Kind::Pages, body) = receiver.next().unwrap() {
            receive(&target, body).unwrap();
        }
        for (start, len) in [(0, 3 << 20), (HIGH, 1 << 20)] {
            let [mut a, mut b] = [vec![0; len], vec![0; len]];
            source.read_slice(&mut a, GuestAddress(start)).unwrap();
            target.read_slice(&mut b, GuestAddress(start)).unwrap();
            assert!(a == b);
        }
    }

    /// A page of zeros may have replaced another one.
    #[test]
    fn written_pages_arrive_with_their_zeros() {
        let (source, target) = (memory(), memory());
        let mut written = Dirty::none_of(&source);
        written.add_range(0, 2 << 20);
        written.add_range(HIGH, 1);
        source.write_obj(0xa5_u8, GuestAddress(4096)).unwrap();
        target.write_obj(0xa5_u8, GuestAddress(HIGH)).unwrap();
        let mut sender = Sender::new(Vec::new()).unwrap();
        assert_eq!(send_written(&source, &written, &mut sender).unwrap(), 513);
        let stream = sender.finish().unwrap();
        let mut receiver = Receiver::new(&stream[..]).unwrap();
        while let (Kind::Pages, body) = receiver.next().unwrap() {
            receive(&target, body).unwrap();
        }
        assert_eq!(target.read_obj::<u8>(GuestAddress(4096)).unwrap(), 0xa5);
        assert_eq!(target.read_obj::<u8>(GuestAddress(HIGH)).unwrap(), 0);
    }

    #[test]
    fn pages_that_the_machine_does_not_have_are_refused() {
        let memory = memory();
        let receive =
            |address: u64, len: usize| receive(&memory, &[&address.to_le_bytes()[..], &vec![1; len]].concat());
        for (address, len) in
            [(1, PAGE), (0, 1), (3 << 20, PAGE), ((3 << 20) - 4096, 2 * PAGE), (u64::MAX - 4095, PAGE)]
        {
            assert!(receive(address, len).is_err(), "{len} at {address:#x}");
        }
        assert!(super::receive(&memory, &[0; 7]).is_err());
        receive(HIGH, PAGE).unwrap();
    }
}
