//! Access to the payload of a request while its packets are built.

use pvrdma_verbs_types::{Access, AccessError, RequesterOps, SendWr, Sge, WcStatus};

use super::Qp;
use crate::sg::{Memory, SgList};

/// Payload of a request that was checked before and is completed elsewhere. Sufficient for a datagram.
pub(crate) struct CheckedPayload<'a> {
    pub(crate) qp: &'a Qp,
    /// The sender's memory.
    pub(crate) memory: Memory<'a>,
}

impl RequesterOps for CheckedPayload<'_> {
    fn begin(&mut self, _work: &mut SendWr) -> Result<(), WcStatus> {
        Ok(())
    }

    fn gather(&mut self, sges: &[Sge], offset: u64, out: &mut [u8]) -> Result<(), AccessError> {
        SgList { memory: self.memory, sges, pd: self.qp.pd, need: Access::empty() }.read(offset, out)
    }

    fn scatter(&mut self, _sges: &[Sge], _offset: u64, _data: &[u8]) -> Result<(), AccessError> {
        Err(AccessError)
    }

    fn finish(&mut self, _work: &SendWr, _status: WcStatus, _byte_len: u32) {}

    fn failed(&mut self) {}
}
