//! Result of a command: the bytes for the response slot, and the object created.

use crate::abi::cmd::{ACK, Opcode, RESPONSE_SIZE, RequestHeader, ResponseHeader};
use crate::abi::layout::GuestLayout;
use crate::error::CmdError;

/// Object that a command has created. It is destroyed if the response does not reach the driver.
#[derive(Clone, Copy, Debug)]
pub(super) enum Created {
    Context(u32),
    Pd(u32),
    Mr(u32),
    Cq(u32),
    Srq(u32),
    Qp(u32),
}

/// Response to a command.
#[derive(Debug)]
pub(super) struct Response {
    bytes: [u8; RESPONSE_SIZE],
    size: usize,
    err: u8,
    created: Option<Created>,
}

impl Response {
    /// Creates a response with a body.
    pub(super) fn new<T: GuestLayout>(body: &T) -> Self {
        let mut response = Self::header();
        body.encode(&mut response.bytes);
        response.size = T::SIZE.min(RESPONSE_SIZE);
        response
    }

    /// Creates a response that is only a header; also used for commands without a response.
    pub(super) const fn header() -> Self {
        Self { bytes: [0; RESPONSE_SIZE], size: ResponseHeader::SIZE, err: 0, created: None }
    }

    /// Adds the object that the command created.
    pub(super) const fn created(self, created: Created) -> Self {
        Self { created: Some(created), ..self }
    }

    /// Creates a response that reports an error (MODIFY_QP only).
    pub(super) fn failure(error: &CmdError) -> Self {
        Self { err: error.code(), ..Self::header() }
    }

    /// Returns the object that the command created.
    pub(super) const fn object(&self) -> Option<Created> {
        self.created
    }

    /// Returns the bytes for the response slot, with the header that acknowledges `request`.
    pub(super) fn acknowledge(&mut self, request: RequestHeader) -> &[u8] {
        let Opcode(id) = request.opcode();
        let header = ResponseHeader { response: request.response, ack: ACK | id, err: self.err };
        header.encode(&mut self.bytes);
        self.bytes.get(..self.size).unwrap_or(&self.bytes)
    }
}
