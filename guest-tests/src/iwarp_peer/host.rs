//! The owner of a queue pair: flat memory under one key, a receive queue, and lists of reported results.

use std::collections::VecDeque;
use std::ops::Range;

use pvrdma_verbs_types::{
    Access, AccessError, AtomicChange, NakReason, Received, RemoteAddress, RequesterOps, ResponderOps, SendWr, Sge,
    WcStatus,
};

/// The key of the memory, for the owner and for peers.
pub(crate) const KEY: u32 = 0x00c0_ff01;

#[derive(Debug, Default)]
pub(crate) struct Host {
    /// Addresses are offsets.
    pub(crate) memory: Vec<u8>,
    receives: VecDeque<Sge>,
    in_use: Option<Sge>,
    /// Results of requests that were not reported yet.
    pub(crate) finished: VecDeque<WcStatus>,
    /// Lengths of SENDs that have arrived and were not reported yet.
    pub(crate) received: VecDeque<u32>,
    /// A message of the peer was refused.
    pub(crate) refused: Option<NakReason>,
}

impl Host {
    pub(crate) fn new(memory: usize) -> Self {
        Self { memory: vec![0; memory], ..Self::default() }
    }

    pub(crate) fn post_receive(&mut self, sge: Sge) {
        self.receives.push_back(sge);
    }

    fn range(&self, key: u32, addr: u64, length: u64) -> Result<Range<usize>, AccessError> {
        let start = usize::try_from(addr).map_err(|_| AccessError)?;
        let length = usize::try_from(length).map_err(|_| AccessError)?;
        let end = start.checked_add(length).filter(|&end| end <= self.memory.len()).ok_or(AccessError)?;
        if key == KEY { Ok(start..end) } else { Err(AccessError) }
    }

    /// The memory of `length` bytes from `offset` on of a list with one element.
    fn part(&self, sges: &[Sge], offset: u64, length: usize) -> Result<Range<usize>, AccessError> {
        let [sge] = sges else { return Err(AccessError) };
        let end = offset.checked_add(length as u64).ok_or(AccessError)?;
        if end > sge.length.into() {
            return Err(AccessError);
        }
        self.range(sge.lkey, sge.addr.checked_add(offset).ok_or(AccessError)?, length as u64)
    }

    fn slice(&mut self, range: Range<usize>) -> Result<&mut [u8], AccessError> {
        self.memory.get_mut(range).ok_or(AccessError)
    }
}

impl RequesterOps for Host {
    fn begin(&mut self, _: &mut SendWr) -> Result<(), WcStatus> {
        Ok(())
    }

    fn gather(&mut self, sges: &[Sge], offset: u64, out: &mut [u8]) -> Result<(), AccessError> {
        let range = self.part(sges, offset, out.len())?;
        out.copy_from_slice(self.slice(range)?);
        Ok(())
    }

    fn scatter(&mut self, sges: &[Sge], offset: u64, data: &[u8]) -> Result<(), AccessError> {
        let range = self.part(sges, offset, data.len())?;
        self.slice(range)?.copy_from_slice(data);
        Ok(())
    }

    fn finish(&mut self, _: &SendWr, status: WcStatus, _: u32) {
        self.finished.push_back(status);
    }

    fn failed(&mut self) {}
}

impl ResponderOps for Host {
    fn request_arrived(&mut self) {}

    fn take_receive(&mut self) -> Result<(), NakReason> {
        if self.in_use.is_none() {
            self.in_use = Some(self.receives.pop_front().ok_or(NakReason::NotReady(0))?);
        }
        Ok(())
    }

    fn fill_receive(&mut self, offset: u64, data: &[u8]) -> Result<(), NakReason> {
        let sge = self.in_use.ok_or(NakReason::RemoteOperation)?;
        self.scatter(&[sge], offset, data).map_err(|_| NakReason::InvalidRequest)
    }

    fn complete_receive(&mut self, received: Received) -> Result<(), NakReason> {
        self.in_use = None;
        self.received.push_back(received.length);
        Ok(())
    }

    fn invalidate(&mut self, _: u32) -> Result<(), NakReason> {
        Err(NakReason::RemoteOperation)
    }

    fn check_enabled(&mut self, _: Access) -> Result<(), NakReason> {
        Ok(())
    }

    fn check_remote(&mut self, remote: RemoteAddress, length: u64, _: Access) -> Result<(), AccessError> {
        self.range(remote.rkey, remote.addr, length).map(drop)
    }

    fn write(&mut self, remote: RemoteAddress, data: &[u8]) -> Result<(), AccessError> {
        let range = self.range(remote.rkey, remote.addr, data.len() as u64)?;
        self.slice(range)?.copy_from_slice(data);
        Ok(())
    }

    fn read(&mut self, remote: RemoteAddress, out: &mut [u8]) -> Result<(), AccessError> {
        let range = self.range(remote.rkey, remote.addr, out.len() as u64)?;
        out.copy_from_slice(self.slice(range)?);
        Ok(())
    }

    fn update(&mut self, _: RemoteAddress, _: AtomicChange) -> Result<u64, AccessError> {
        Err(AccessError)
    }

    fn refuse(&mut self, reason: NakReason) {
        self.refused = Some(reason);
    }

    fn refuse_immediate(&mut self) {}
}
