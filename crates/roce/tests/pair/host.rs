//! A small stand-in for the host of an engine: flat memory under one key, a receive queue, and lists of what was
//! reported.

use std::collections::{BTreeMap, VecDeque};

use pvrdma_verbs::QpEvent;
use pvrdma_verbs_types::{
    Access, AccessError, AtomicChange, NakReason, Received, RecvWr, RemoteAddress, RequesterOps, ResponderOps, SendOp,
    SendWr, Sge, WcStatus,
};

/// The key of all memory.
pub(crate) const KEY: u32 = 0x1234;
const PAGE: u64 = 4096;

/// Memory that stores only the pages that were written; all other bytes are zero.
#[derive(Debug, Default)]
pub(crate) struct Sparse(BTreeMap<u64, Box<[u8]>>);

/// Returns the offset of an address in its page, and how many of the `left` bytes lie in that page.
fn part(at: u64, left: usize) -> (usize, usize) {
    let begin = usize::try_from(at % PAGE).unwrap();
    (begin, left.min(usize::try_from(PAGE).unwrap() - begin))
}

impl Sparse {
    pub(crate) fn read(&self, addr: u64, out: &mut [u8]) {
        let mut at = addr;
        let mut rest = out;
        while !rest.is_empty() {
            let (begin, now) = part(at, rest.len());
            let (here, after) = rest.split_at_mut(now);
            match self.0.get(&(at / PAGE)) {
                Some(page) => here.copy_from_slice(&page[begin..begin + now]),
                None => here.fill(0),
            }
            (at, rest) = (at + now as u64, after);
        }
    }

    pub(crate) fn write(&mut self, addr: u64, data: &[u8]) {
        let (mut at, mut rest) = (addr, data);
        while !rest.is_empty() {
            let (begin, now) = part(at, rest.len());
            let (here, after) = rest.split_at(now);
            let page = self.0.entry(at / PAGE).or_insert_with(|| vec![0; usize::try_from(PAGE).unwrap()].into());
            page[begin..begin + now].copy_from_slice(here);
            (at, rest) = (at + now as u64, after);
        }
    }

    pub(crate) fn get(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.read(addr, &mut out);
        out
    }
}

/// Completion of a request or receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ended {
    pub(crate) wr_id: u64,
    pub(crate) status: WcStatus,
    pub(crate) byte_len: u32,
}

#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) memory: Sparse,
    /// Addresses from here on do not exist.
    pub(crate) memory_end: u64,
    pub(crate) key: u32,
    /// Every key names all memory.
    pub(crate) any_key: bool,
    pub(crate) qp_access: Access,
    pub(crate) mr_access: Access,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) rnr_timer: u8,
    pub(crate) receives: VecDeque<RecvWr>,
    in_use: Option<RecvWr>,
    pub(crate) sent: Vec<Ended>,
    pub(crate) received: Vec<(Ended, Option<Received>)>,
    pub(crate) events: Vec<QpEvent>,
    pub(crate) atomics: u32,
    pub(crate) invalidated: Vec<u32>,
    pub(crate) failed: bool,
    arrived: bool,
}

impl Host {
    pub(crate) fn new() -> Self {
        Self {
            memory: Sparse::default(),
            memory_end: u64::MAX,
            key: KEY,
            any_key: false,
            qp_access: Access::all(),
            mr_access: Access::all(),
            max_dest_rd_atomic: 16,
            rnr_timer: 12,
            receives: VecDeque::new(),
            in_use: None,
            sent: Vec::new(),
            received: Vec::new(),
            events: Vec::new(),
            atomics: 0,
            invalidated: Vec::new(),
            failed: false,
            arrived: false,
        }
    }

    pub(crate) fn post_receive(&mut self, wr_id: u64, addr: u64, length: u32) {
        let sges = vec![Sge { addr, length, lkey: self.key }];
        self.receives.push_back(RecvWr { wr_id, sges, malformed: false });
    }

    fn covers(&self, key: u32, addr: u64, len: u64) -> bool {
        let valid = (self.any_key || key == self.key) && !self.invalidated.contains(&key);
        valid && addr.checked_add(len).is_some_and(|end| end <= self.memory_end)
    }

    /// Splits an access to a list into addresses.
    fn pieces(&self, sges: &[Sge], mut offset: u64, mut len: u64) -> Result<Vec<(u64, u64)>, AccessError> {
        let mut pieces = Vec::new();
        for sge in sges {
            let size = u64::from(sge.length);
            if offset >= size {
                offset -= size;
                continue;
            }
            let part = (size - offset).min(len);
            if part > 0 {
                if !self.covers(sge.lkey, sge.addr, size) {
                    return Err(AccessError);
                }
                pieces.push((sge.addr + offset, part));
            }
            (offset, len) = (0, len - part);
        }
        if len == 0 { Ok(pieces) } else { Err(AccessError) }
    }

    fn write_list(&mut self, sges: &[Sge], offset: u64, mut data: &[u8]) -> Result<(), AccessError> {
        for (addr, len) in self.pieces(sges, offset, data.len() as u64)? {
            let (now, rest) = data.split_at(usize::try_from(len).unwrap());
            self.memory.write(addr, now);
            data = rest;
        }
        Ok(())
    }

    fn end(&mut self) {
        self.failed = true;
        let used = self.in_use.take();
        for work in used.into_iter().chain(std::mem::take(&mut self.receives)) {
            self.end_receive(&work, WcStatus::Flushed);
        }
    }

    fn end_receive(&mut self, work: &RecvWr, status: WcStatus) {
        self.received.push((Ended { wr_id: work.wr_id, status, byte_len: 0 }, None));
    }

    fn fail_receive(&mut self, status: WcStatus, refusal: NakReason) -> NakReason {
        if let Some(work) = self.in_use.take() {
            self.end_receive(&work, status);
        }
        self.end();
        refusal
    }
}

impl RequesterOps for Host {
    fn begin(&mut self, work: &mut SendWr) -> Result<(), WcStatus> {
        match &work.op {
            SendOp::Unsupported { .. } | SendOp::Malformed => return Err(WcStatus::LocalQpOperation),
            SendOp::LocalInvalidate(invalidate) => self.invalidated.push(invalidate.key),
            _ => {}
        }
        // The keys of results are checked when there is a result.
        let allowed = work.op.has_result()
            || work.sges.iter().all(|sge| sge.length == 0 || self.covers(sge.lkey, sge.addr, sge.length.into()));
        if allowed { Ok(()) } else { Err(WcStatus::LocalProtection) }
    }

    fn gather(&mut self, sges: &[Sge], offset: u64, mut out: &mut [u8]) -> Result<(), AccessError> {
        for (addr, len) in self.pieces(sges, offset, out.len() as u64)? {
            let (now, rest) = out.split_at_mut(usize::try_from(len).unwrap());
            self.memory.read(addr, now);
            out = rest;
        }
        Ok(())
    }

    fn scatter(&mut self, sges: &[Sge], offset: u64, data: &[u8]) -> Result<(), AccessError> {
        self.write_list(sges, offset, data)
    }

    fn finish(&mut self, work: &SendWr, status: WcStatus, byte_len: u32) {
        self.sent.push(Ended { wr_id: work.wr_id, status, byte_len });
    }

    fn failed(&mut self) {
        self.end();
    }
}

impl ResponderOps for Host {
    fn request_arrived(&mut self) {
        if !std::mem::replace(&mut self.arrived, true) {
            self.events.push(QpEvent::CommunicationEstablished);
        }
    }

    fn take_receive(&mut self) -> Result<(), NakReason> {
        if self.in_use.is_none() {
            self.in_use = Some(self.receives.pop_front().ok_or(NakReason::NotReady(self.rnr_timer))?);
        }
        if self.in_use.as_ref().unwrap().malformed {
            return Err(self.fail_receive(WcStatus::LocalQpOperation, NakReason::RemoteOperation));
        }
        Ok(())
    }

    fn fill_receive(&mut self, offset: u64, data: &[u8]) -> Result<(), NakReason> {
        let sges = self.in_use.as_ref().unwrap().sges.clone();
        let room: u64 = sges.iter().map(|sge| u64::from(sge.length)).sum();
        if offset + data.len() as u64 > room {
            return Err(self.fail_receive(WcStatus::LocalLength, NakReason::InvalidRequest));
        }
        match self.write_list(&sges, offset, data) {
            Ok(()) => Ok(()),
            Err(AccessError) => Err(self.fail_receive(WcStatus::LocalProtection, NakReason::RemoteOperation)),
        }
    }

    fn complete_receive(&mut self, received: Received) -> Result<(), NakReason> {
        let work = self.in_use.take().unwrap();
        let ended = Ended { wr_id: work.wr_id, status: WcStatus::Success, byte_len: received.length };
        self.received.push((ended, Some(received)));
        Ok(())
    }

    fn invalidate(&mut self, key: u32) -> Result<(), NakReason> {
        if key == self.key {
            return Err(self.fail_receive(WcStatus::RemoteInvalidRequest, NakReason::RemoteOperation));
        }
        self.invalidated.push(key);
        Ok(())
    }

    fn check_enabled(&mut self, need: Access) -> Result<(), NakReason> {
        let reads = need.intersects(Access::REMOTE_READ | Access::REMOTE_ATOMIC);
        if !self.qp_access.contains(need) || reads && self.max_dest_rd_atomic == 0 {
            self.refuse(NakReason::InvalidRequest);
            return Err(NakReason::InvalidRequest);
        }
        Ok(())
    }

    fn check_remote(&mut self, remote: RemoteAddress, length: u64, need: Access) -> Result<(), AccessError> {
        let allowed = self.covers(remote.rkey, remote.addr, length) && self.mr_access.contains(need);
        if allowed { Ok(()) } else { Err(AccessError) }
    }

    fn write(&mut self, remote: RemoteAddress, data: &[u8]) -> Result<(), AccessError> {
        self.memory.write(remote.addr, data);
        Ok(())
    }

    fn read(&mut self, remote: RemoteAddress, out: &mut [u8]) -> Result<(), AccessError> {
        if !out.is_empty() && !self.covers(remote.rkey, remote.addr, out.len() as u64) {
            return Err(AccessError);
        }
        self.memory.read(remote.addr, out);
        Ok(())
    }

    fn update(&mut self, remote: RemoteAddress, change: AtomicChange) -> Result<u64, AccessError> {
        self.atomics += 1;
        let mut bytes = [0; 8];
        self.memory.read(remote.addr, &mut bytes);
        let old = u64::from_le_bytes(bytes);
        if let Some(new) = change.apply(old) {
            self.memory.write(remote.addr, &new.to_le_bytes());
        }
        Ok(old)
    }

    fn refuse(&mut self, refusal: NakReason) {
        match refusal {
            NakReason::InvalidRequest => self.events.push(QpEvent::RequestError),
            NakReason::RemoteAccess => self.events.push(QpEvent::AccessError),
            _ => {}
        }
        self.end();
    }

    fn refuse_immediate(&mut self) {
        self.fail_receive(WcStatus::LocalAccess, NakReason::RemoteAccess);
    }
}
