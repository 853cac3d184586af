//! A minimal owner of a queue pair: flat memory under one key, a receive queue, and lists of reported results.

use std::collections::VecDeque;

use pvrdma_verbs_types::{
    Access, AccessError, NakReason, Received, RecvWr, RemoteAddress, RequesterOps, ResponderOps, SendOp, SendWr, Sge,
    WcStatus,
};

/// The key of all memory, for the owner and for peers.
pub(crate) const KEY: u32 = 0x1234_5600;

/// Result of a request or receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ended {
    pub(crate) wr_id: u64,
    pub(crate) status: WcStatus,
    pub(crate) byte_len: u32,
}

#[derive(Debug)]
pub(crate) struct Host {
    /// Addresses are offsets.
    pub(crate) memory: Vec<u8>,
    pub(crate) qp_access: Access,
    /// The memory has been deregistered.
    pub(crate) gone: bool,
    pub(crate) receives: VecDeque<RecvWr>,
    in_use: Option<RecvWr>,
    pub(crate) sent: Vec<Ended>,
    pub(crate) received: Vec<(Ended, Option<Received>)>,
    pub(crate) refused: Vec<NakReason>,
    /// Keys that were invalidated, and those that may be.
    pub(crate) invalidated: Vec<u32>,
    pub(crate) may_invalidate: bool,
    pub(crate) arrived: u32,
    pub(crate) failed: bool,
}

impl Host {
    pub(crate) fn new(memory: usize) -> Self {
        Self {
            memory: vec![0; memory],
            qp_access: Access::all(),
            gone: false,
            receives: VecDeque::new(),
            in_use: None,
            sent: Vec::new(),
            received: Vec::new(),
            refused: Vec::new(),
            invalidated: Vec::new(),
            may_invalidate: true,
            arrived: 0,
            failed: false,
        }
    }

    pub(crate) fn post_receive(&mut self, wr_id: u64, sges: Vec<Sge>) {
        self.receives.push_back(RecvWr { wr_id, sges, malformed: false });
    }

    pub(crate) fn statuses(&self) -> Vec<(u64, WcStatus)> {
        self.sent.iter().map(|ended| (ended.wr_id, ended.status)).collect()
    }

    fn range(&self, key: u32, addr: u64, length: u64) -> Result<std::ops::Range<usize>, AccessError> {
        let start = usize::try_from(addr).map_err(|_| AccessError)?;
        let end = usize::try_from(length).ok().and_then(|length| start.checked_add(length)).ok_or(AccessError)?;
        let valid = key == KEY && !self.gone && end <= self.memory.len();
        if valid { Ok(start..end) } else { Err(AccessError) }
    }

    /// The memory of `length` bytes from `offset` on of a list.
    fn pieces(
        &self,
        sges: &[Sge],
        mut offset: u64,
        mut length: u64,
    ) -> Result<Vec<std::ops::Range<usize>>, AccessError> {
        let mut pieces = Vec::new();
        for sge in sges {
            let size = u64::from(sge.length);
            let part = size.saturating_sub(offset).min(length);
            if part > 0 {
                pieces.push(self.range(sge.lkey, sge.addr + offset, part)?);
            }
            (offset, length) = (offset.saturating_sub(size), length - part);
        }
        if length == 0 { Ok(pieces) } else { Err(AccessError) }
    }

    fn fail_receive(&mut self, status: WcStatus, reason: NakReason) -> NakReason {
        if let Some(work) = self.in_use.take() {
            self.received.push((Ended { wr_id: work.wr_id, status, byte_len: 0 }, None));
        }
        self.failed = true;
        reason
    }
}

impl RequesterOps for Host {
    fn begin(&mut self, wr: &mut SendWr) -> Result<(), WcStatus> {
        match &wr.op {
            SendOp::Unsupported { .. } | SendOp::Malformed => Err(WcStatus::LocalQpOperation),
            SendOp::LocalInvalidate(invalidate) => {
                self.invalidated.push(invalidate.key);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn gather(&mut self, sges: &[Sge], offset: u64, out: &mut [u8]) -> Result<(), AccessError> {
        let mut rest = out;
        for piece in self.pieces(sges, offset, rest.len() as u64)? {
            let (now, after) = rest.split_at_mut(piece.len());
            now.copy_from_slice(&self.memory[piece]);
            rest = after;
        }
        Ok(())
    }

    fn scatter(&mut self, sges: &[Sge], offset: u64, mut data: &[u8]) -> Result<(), AccessError> {
        for piece in self.pieces(sges, offset, data.len() as u64)? {
            let (now, after) = data.split_at(piece.len());
            self.memory[piece].copy_from_slice(now);
            data = after;
        }
        Ok(())
    }

    fn finish(&mut self, wr: &SendWr, status: WcStatus, byte_len: u32) {
        self.sent.push(Ended { wr_id: wr.wr_id, status, byte_len });
    }

    fn failed(&mut self) {
        self.failed = true;
    }
}

impl ResponderOps for Host {
    fn request_arrived(&mut self) {
        self.arrived += 1;
    }

    fn take_receive(&mut self) -> Result<(), NakReason> {
        if self.in_use.is_none() {
            self.in_use = Some(self.receives.pop_front().ok_or(NakReason::NotReady(0))?);
        }
        Ok(())
    }

    fn fill_receive(&mut self, offset: u64, data: &[u8]) -> Result<(), NakReason> {
        let sges = self.in_use.as_ref().unwrap().sges.clone();
        if offset + data.len() as u64 > Sge::total_length(&sges) {
            return Err(self.fail_receive(WcStatus::LocalLength, NakReason::InvalidRequest));
        }
        let stored = self.scatter(&sges, offset, data);
        stored.map_err(|_| self.fail_receive(WcStatus::LocalProtection, NakReason::RemoteOperation))
    }

    fn complete_receive(&mut self, received: Received) -> Result<(), NakReason> {
        let work = self.in_use.take().unwrap();
        let ended = Ended { wr_id: work.wr_id, status: WcStatus::Success, byte_len: received.length };
        self.received.push((ended, Some(received)));
        Ok(())
    }

    fn invalidate(&mut self, key: u32) -> Result<(), NakReason> {
        if !self.may_invalidate {
            return Err(self.fail_receive(WcStatus::LocalProtection, NakReason::RemoteOperation));
        }
        self.invalidated.push(key);
        Ok(())
    }

    fn check_enabled(&mut self, need: Access) -> Result<(), NakReason> {
        if self.qp_access.contains(need) {
            return Ok(());
        }
        self.refuse(NakReason::InvalidRequest);
        Err(NakReason::InvalidRequest)
    }

    fn check_remote(&mut self, remote: RemoteAddress, length: u64, _: Access) -> Result<(), AccessError> {
        self.range(remote.rkey, remote.addr, length).map(|_| ())
    }

    fn write(&mut self, remote: RemoteAddress, data: &[u8]) -> Result<(), AccessError> {
        let range = self.range(remote.rkey, remote.addr, data.len() as u64)?;
        self.memory[range].copy_from_slice(data);
        Ok(())
    }

    fn read(&mut self, remote: RemoteAddress, out: &mut [u8]) -> Result<(), AccessError> {
        let range = self.range(remote.rkey, remote.addr, out.len() as u64)?;
        out.copy_from_slice(&self.memory[range]);
        Ok(())
    }

    fn update(&mut self, _: RemoteAddress, _: pvrdma_verbs_types::AtomicChange) -> Result<u64, AccessError> {
        Err(AccessError)
    }

    fn refuse(&mut self, reason: NakReason) {
        self.refused.push(reason);
        self.failed = true;
    }

    fn refuse_immediate(&mut self) {}
}
