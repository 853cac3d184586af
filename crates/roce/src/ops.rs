//! What the transport needs from whoever runs it: memory, queues and the consumer.
//!
//! Two kinds of errors: an [`AccessError`] is an access that failed and nothing more; a [`NakReason`] comes from a
//! method that has already done to the consumer what it deserves (completed the receive, raised the event, moved the QP
//! to its error state), and only the NAK remains to be sent.

use pvrdma_verbs::{Access, RemoteAddress, SendOp, SendWr, Sge, WcOpcode, WcStatus};

/// Memory that cannot be accessed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AccessError;

/// Why a responder does not execute a request, and what it sends (IBA 9.7.5.2, table 58).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NakReason {
    /// Nothing is sent, as if the request had been lost.
    Silence,
    /// No receive is posted: an RNR NAK with this timer code ([`crate::wire::rnr_delay`]).
    NotReady(u8),
    /// The request makes no sense or is not enabled.
    InvalidRequest,
    /// A key, a range or a right is wrong.
    RemoteAccess,
    /// The responder cannot go on for reasons of its own.
    RemoteOperation,
}

/// What a requester needs.
pub trait RequesterOps {
    /// A request is about to start: checks it and its local memory, and executes the ones that stay local
    /// (fast registration and local invalidation).
    ///
    /// # Errors
    /// The status that the request completes with.
    fn begin(&mut self, wr: &mut SendWr) -> Result<(), WcStatus>;

    /// Copies into `out` from `offset` bytes on into the memory that the list names.
    ///
    /// # Errors
    /// Some of it cannot be read.
    fn gather(&mut self, sges: &[Sge], offset: u64, out: &mut [u8]) -> Result<(), AccessError>;

    /// Copies `data` to `offset` bytes into the memory that the list names.
    ///
    /// # Errors
    /// Some of it cannot be written.
    fn scatter(&mut self, sges: &[Sge], offset: u64, data: &[u8]) -> Result<(), AccessError>;

    /// A request has completed: gives its slot back, then publishes its completion if it gets one. Called in posting
    /// order. `byte_len` is what arrived in local memory, in bytes.
    fn finish(&mut self, wr: &SendWr, status: WcStatus, byte_len: u32);

    /// A request has completed with an error and all later ones were flushed: moves the QP to its error state.
    fn failed(&mut self);
}

/// Change of an atomic operation (IBA 9.4.5). Operands are numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AtomicChange {
    /// Stores `swap` if the value is `compare`.
    CompareSwap {
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Adds, wrapping.
    FetchAdd {
        /// Addend.
        add: u64,
    },
}

impl AtomicChange {
    /// The new value, if there is one.
    pub const fn apply(self, old: u64) -> Option<u64> {
        match self {
            Self::CompareSwap { compare, swap } if old == compare => Some(swap),
            Self::CompareSwap { .. } => None,
            Self::FetchAdd { add } => Some(old.wrapping_add(add)),
        }
    }
}

/// A message that completes a receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Received {
    /// [`WcOpcode::Recv`] or [`WcOpcode::RecvRdmaWithImmediate`].
    pub opcode: WcOpcode,
    /// Length of the message in bytes.
    pub length: u32,
    /// Immediate data, as in memory.
    pub immediate: Option<[u8; 4]>,
    /// The key that was invalidated.
    pub invalidated: Option<u32>,
    /// The sender asked for a solicited event.
    pub solicited: bool,
}

/// What a responder needs. It has at most one receive in use.
pub trait ResponderOps {
    /// A request came in. The first one in RTR establishes the communication.
    fn request_arrived(&mut self);

    /// Takes a receive from the queue, if none is in use.
    ///
    /// # Errors
    /// There is none, or it is malformed.
    fn take_receive(&mut self) -> Result<(), NakReason>;

    /// Copies `data` to `offset` bytes into the receive in use.
    ///
    /// # Errors
    /// It is too short, or its memory cannot be written.
    fn fill_receive(&mut self, offset: u64, data: &[u8]) -> Result<(), NakReason>;

    /// Completes the receive in use.
    ///
    /// # Errors
    /// The QP ended over it.
    fn complete_receive(&mut self, received: Received) -> Result<(), NakReason>;

    /// Invalidates a key for the peer. A failure completes the receive in use.
    ///
    /// # Errors
    /// The key is not valid.
    fn invalidate(&mut self, key: u32) -> Result<(), NakReason>;

    /// Checks that the QP lets its peer do this at all.
    ///
    /// # Errors
    /// It does not.
    fn check_enabled(&mut self, need: Access) -> Result<(), NakReason>;

    /// Checks a key of this side for a range of `length` bytes, not 0. A failure has no effect: the caller refuses the
    /// request.
    ///
    /// # Errors
    /// The key, the range or a right is wrong.
    fn check_remote(&mut self, remote: RemoteAddress, length: u64, need: Access) -> Result<(), AccessError>;

    /// Copies to memory that was checked before; it may be gone.
    ///
    /// # Errors
    /// Some of it cannot be written.
    fn write(&mut self, remote: RemoteAddress, data: &[u8]) -> Result<(), AccessError>;

    /// Copies from memory that was checked before; it may be gone.
    ///
    /// # Errors
    /// Some of it cannot be read.
    fn read(&mut self, remote: RemoteAddress, out: &mut [u8]) -> Result<(), AccessError>;

    /// Changes eight aligned bytes in one step and returns the value before.
    ///
    /// # Errors
    /// They cannot be accessed.
    fn update(&mut self, remote: RemoteAddress, change: AtomicChange) -> Result<u64, AccessError>;

    /// The request is refused: raises the event and moves the QP to its error state.
    fn refuse(&mut self, reason: NakReason);

    /// An RDMA WRITE with immediate data, which has taken a receive, names memory that cannot be accessed: completes
    /// that receive with a local access error and moves the QP to its error state (IBA C9-222.1, 11.6.2).
    fn refuse_immediate(&mut self);
}

/// Returns `true` if a request never leaves this side.
pub(super) const fn is_local(op: &SendOp) -> bool {
    matches!(op, SendOp::LocalInvalidate(_) | SendOp::FastRegister(_) | SendOp::Unsupported { .. } | SendOp::Malformed)
}
