//! Callbacks of a transport protocol into the owner of a queue pair: memory, queues and the consumer.
//!
//! There are two kinds of errors. An [`AccessError`] only reports that an access failed. A [`NakReason`] comes from a
//! method that has already notified the consumer (completed the receive, raised the event, moved the QP to its error
//! state), so that only the peer remains to be told: RoCE sends a NAK, iWARP a Terminate.

use crate::types::Access;
use crate::work::{RemoteAddress, SendWr, Sge, WcOpcode, WcStatus};

/// The memory cannot be accessed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AccessError;

/// Reason why a responder does not execute a request, and the NAK that it sends (IBA 9.7.5.2, table 58).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NakReason {
    /// Nothing is sent, as if the request had been lost.
    Silence,
    /// No receive is posted: an RNR NAK with this timer code.
    NotReady(u8),
    /// The request is invalid, or not enabled.
    InvalidRequest,
    /// The key, range or access right is wrong.
    RemoteAccess,
    /// The responder has an internal error.
    RemoteOperation,
}

/// Callbacks of a requester.
pub trait RequesterOps {
    /// Starts a request: checks it and its local memory, and executes the request if it is local (fast registration and
    /// local invalidation).
    ///
    /// # Errors
    /// The status that the request completes with.
    fn begin(&mut self, wr: &mut SendWr) -> Result<(), WcStatus>;

    /// Copies into `out` from offset `offset` of the memory that the list names.
    ///
    /// # Errors
    /// Part of the memory cannot be read.
    fn gather(&mut self, sges: &[Sge], offset: u64, out: &mut [u8]) -> Result<(), AccessError>;

    /// Copies `data` to offset `offset` of the memory that the list names.
    ///
    /// # Errors
    /// Part of the memory cannot be written.
    fn scatter(&mut self, sges: &[Sge], offset: u64, data: &[u8]) -> Result<(), AccessError>;

    /// Completes a request: releases its slot, then publishes its completion if it has one. Called in posting order.
    /// `byte_len` is the number of bytes that arrived in local memory.
    fn finish(&mut self, wr: &SendWr, status: WcStatus, byte_len: u32);

    /// Moves the QP to its error state: a request has completed with an error, and all later ones were flushed.
    fn failed(&mut self);
}

/// Modification by an atomic operation (IBA 9.4.5). Operands are numbers in host byte order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AtomicChange {
    /// Stores `swap` if the current value equals `compare`.
    CompareSwap {
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Adds with wrap-around.
    FetchAdd {
        /// Addend.
        add: u64,
    },
}

impl AtomicChange {
    /// Returns the new value, or `None` if the value does not change.
    pub const fn apply(self, old: u64) -> Option<u64> {
        match self {
            Self::CompareSwap { compare, swap } if old == compare => Some(swap),
            Self::CompareSwap { .. } => None,
            Self::FetchAdd { add } => Some(old.wrapping_add(add)),
        }
    }
}

/// A message that completes a receive request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Received {
    /// [`WcOpcode::Recv`] or [`WcOpcode::RecvRdmaWithImmediate`].
    pub opcode: WcOpcode,
    /// Length of the message in bytes.
    pub length: u32,
    /// Immediate data, in memory byte order.
    pub immediate: Option<[u8; 4]>,
    /// Key that was invalidated.
    pub invalidated: Option<u32>,
    /// The sender asked for a solicited event.
    pub solicited: bool,
}

/// Callbacks of a responder, which has at most one receive in use.
pub trait ResponderOps {
    /// Reports a valid request. The first one in RTR establishes the communication.
    fn request_arrived(&mut self);

    /// Takes a receive from the queue, unless one is in use already.
    ///
    /// # Errors
    /// The queue is empty, or the receive is malformed.
    fn take_receive(&mut self) -> Result<(), NakReason>;

    /// Copies `data` to offset `offset` of the receive in use.
    ///
    /// # Errors
    /// The receive is too short, or its memory cannot be written.
    fn fill_receive(&mut self, offset: u64, data: &[u8]) -> Result<(), NakReason>;

    /// Completes the receive in use.
    ///
    /// # Errors
    /// Completing it moved the QP to its error state.
    fn complete_receive(&mut self, received: Received) -> Result<(), NakReason>;

    /// Invalidates a key on behalf of the peer. A failure completes the receive in use.
    ///
    /// # Errors
    /// The key is not valid.
    fn invalidate(&mut self, key: u32) -> Result<(), NakReason>;

    /// Checks that the QP grants its peer this kind of access at all.
    ///
    /// # Errors
    /// It does not.
    fn check_enabled(&mut self, need: Access) -> Result<(), NakReason>;

    /// Checks a local key for a range of `length` bytes, which is not 0. A failure has no side effect: the caller
    /// refuses the request.
    ///
    /// # Errors
    /// The key, the range or an access right is wrong.
    fn check_remote(&mut self, remote: RemoteAddress, length: u64, need: Access) -> Result<(), AccessError>;

    /// Copies to memory that was checked earlier; it may have been deregistered since.
    ///
    /// # Errors
    /// Part of the memory cannot be written.
    fn write(&mut self, remote: RemoteAddress, data: &[u8]) -> Result<(), AccessError>;

    /// Copies from memory that was checked earlier; it may have been deregistered since.
    ///
    /// # Errors
    /// Part of the memory cannot be read.
    fn read(&mut self, remote: RemoteAddress, out: &mut [u8]) -> Result<(), AccessError>;

    /// Modifies eight aligned bytes atomically and returns the previous value.
    ///
    /// # Errors
    /// The bytes cannot be accessed.
    fn update(&mut self, remote: RemoteAddress, change: AtomicChange) -> Result<u64, AccessError>;

    /// Refuses the request: raises the event and moves the QP to its error state.
    fn refuse(&mut self, reason: NakReason);

    /// Refuses an RDMA WRITE with immediate data that has taken a receive, but names memory that cannot be accessed:
    /// completes that receive with a local access error and moves the QP to its error state (IBA C9-222.1, 11.6.2).
    fn refuse_immediate(&mut self);
}
