//! Callbacks of a connection for a queue pair: those of both halves.

use pvrdma_verbs_types::{
    Access, AccessError, AtomicChange, NakReason, Received, RemoteAddress, RequesterOps, ResponderOps, SendWr, Sge,
    WcStatus,
};

use crate::path::wire::hooks::{RequesterHooks, ResponderHooks};

/// Callbacks of both halves.
pub(super) struct StreamHooks<'a> {
    pub(super) requester: RequesterHooks<'a>,
    pub(super) responder: ResponderHooks<'a>,
}

impl RequesterOps for StreamHooks<'_> {
    fn begin(&mut self, work: &mut SendWr) -> Result<(), WcStatus> {
        self.requester.begin(work)
    }

    fn gather(&mut self, sges: &[Sge], offset: u64, out: &mut [u8]) -> Result<(), AccessError> {
        self.requester.gather(sges, offset, out)
    }

    fn scatter(&mut self, sges: &[Sge], offset: u64, data: &[u8]) -> Result<(), AccessError> {
        self.requester.scatter(sges, offset, data)
    }

    fn finish(&mut self, work: &SendWr, status: WcStatus, byte_len: u32) {
        self.requester.finish(work, status, byte_len);
    }

    fn failed(&mut self) {
        self.requester.failed();
    }
}

impl ResponderOps for StreamHooks<'_> {
    fn request_arrived(&mut self) {
        self.responder.request_arrived();
    }

    fn take_receive(&mut self) -> Result<(), NakReason> {
        self.responder.take_receive()
    }

    fn fill_receive(&mut self, offset: u64, data: &[u8]) -> Result<(), NakReason> {
        self.responder.fill_receive(offset, data)
    }

    fn complete_receive(&mut self, received: Received) -> Result<(), NakReason> {
        self.responder.complete_receive(received)
    }

    fn invalidate(&mut self, key: u32) -> Result<(), NakReason> {
        self.responder.invalidate(key)
    }

    fn check_enabled(&mut self, need: Access) -> Result<(), NakReason> {
        self.responder.check_enabled(need)
    }

    fn check_remote(&mut self, remote: RemoteAddress, length: u64, need: Access) -> Result<(), AccessError> {
        self.responder.check_remote(remote, length, need)
    }

    fn write(&mut self, remote: RemoteAddress, data: &[u8]) -> Result<(), AccessError> {
        self.responder.write(remote, data)
    }

    fn read(&mut self, remote: RemoteAddress, out: &mut [u8]) -> Result<(), AccessError> {
        self.responder.read(remote, out)
    }

    fn update(&mut self, remote: RemoteAddress, change: AtomicChange) -> Result<u64, AccessError> {
        self.responder.update(remote, change)
    }

    fn refuse(&mut self, reason: NakReason) {
        self.responder.refuse(reason);
    }

    fn refuse_immediate(&mut self) {
        self.responder.refuse_immediate();
    }
}
