//! What a command gives back: the bytes for the response slot, and what was created.

use crate::abi::cmd::{ACK, Opcode, RESPONSE_SIZE, RequestHeader, ResponseHeader};
use crate::abi::layout::GuestLayout;
use crate::error::CmdError;

/// An object that a command has created, in case its driver never learns of it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Created {
    Context(u32),
    Pd(u32),
    Mr(u32),
    Cq(u32),
    Srq(u32),
    Qp(u32),
}

/// The response to a command.
#[derive(Debug)]
pub(super) struct Response {
    bytes: [u8; RESPONSE_SIZE],
    size: usize,
    err: u8,
    created: Option<Created>,
}

impl Response {
    /// A response with a body.
    pub(super) fn new<T: GuestLayout>(body: &T) -> Self {
        let mut response = Self::header();
        body.encode(&mut response.bytes);
        response.size = T::SIZE.min(RESPONSE_SIZE);
        response
    }

    /// A response that is only a header; also for commands without a response.
    pub(super) const fn header() -> Self {
        Self { bytes: [0; RESPONSE_SIZE], size: ResponseHeader::SIZE, err: 0, created: None }
    }

    /// Says what was created.
    pub(super) const fn created(self, created: Created) -> Self {
        Self { created: Some(created), ..self }
    }

    /// Says what went wrong (MODIFY_QP only).
    pub(super) fn failure(error: &CmdError) -> Self {
        Self { err: error.code(), ..Self::header() }
    }

    /// What the command created.
    pub(super) const fn object(&self) -> Option<Created> {
        self.created
    }

    /// The bytes for the response slot, with the header that acknowledges `request`.
    pub(super) fn acknowledge(&mut self, request: RequestHeader) -> &[u8] {
        let Opcode(id) = request.opcode();
        let header = ResponseHeader { response: request.response, ack: ACK | id, err: self.err };
        header.encode(&mut self.bytes);
        self.bytes.get(..self.size).unwrap_or(&self.bytes)
    }
}
