//! Callbacks of a connection that has no queue pair yet. The startup calls none of them.

use pvrdma_verbs_types::{
    Access, AccessError, AtomicChange, NakReason, Received, RemoteAddress, RequesterOps, ResponderOps, SendWr, Sge,
    WcStatus,
};

/// No queue pair.
pub(super) struct NoOps;

impl RequesterOps for NoOps {
    fn begin(&mut self, _: &mut SendWr) -> Result<(), WcStatus> {
        Err(WcStatus::General)
    }

    fn gather(&mut self, _: &[Sge], _: u64, _: &mut [u8]) -> Result<(), AccessError> {
        Err(AccessError)
    }

    fn scatter(&mut self, _: &[Sge], _: u64, _: &[u8]) -> Result<(), AccessError> {
        Err(AccessError)
    }

    fn finish(&mut self, _: &SendWr, _: WcStatus, _: u32) {}

    fn failed(&mut self) {}
}

impl ResponderOps for NoOps {
    fn request_arrived(&mut self) {}

    fn take_receive(&mut self) -> Result<(), NakReason> {
        Err(NakReason::RemoteOperation)
    }

    fn fill_receive(&mut self, _: u64, _: &[u8]) -> Result<(), NakReason> {
        Err(NakReason::RemoteOperation)
    }

    fn complete_receive(&mut self, _: Received) -> Result<(), NakReason> {
        Err(NakReason::RemoteOperation)
    }

    fn invalidate(&mut self, _: u32) -> Result<(), NakReason> {
        Err(NakReason::RemoteOperation)
    }

    fn check_enabled(&mut self, _: Access) -> Result<(), NakReason> {
        Err(NakReason::InvalidRequest)
    }

    fn check_remote(&mut self, _: RemoteAddress, _: u64, _: Access) -> Result<(), AccessError> {
        Err(AccessError)
    }

    fn write(&mut self, _: RemoteAddress, _: &[u8]) -> Result<(), AccessError> {
        Err(AccessError)
    }

    fn read(&mut self, _: RemoteAddress, _: &mut [u8]) -> Result<(), AccessError> {
        Err(AccessError)
    }

    fn update(&mut self, _: RemoteAddress, _: AtomicChange) -> Result<u64, AccessError> {
        Err(AccessError)
    }

    fn refuse(&mut self, _: NakReason) {}

    fn refuse_immediate(&mut self) {}
}
