//! What the transport needs from the engine.
//!
//! Two kinds of errors: a [`Fault`] is an access that failed and nothing more; a [`NakReason`] comes from a method that has
//! already done to the consumer what it deserves (ended the receive, raised the event, moved the QP to its error state),
//! and only remains to be told to the peer.

use pvrdma_verbs::{Access, RemoteAddress, SendOp, SendWr, Sge, WcOpcode, WcStatus};

/// Memory that cannot be accessed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault;

/// How a responder answers a request that it does not execute.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NakReason {
    /// Not at all, as if the packet had been lost.
    Silence,
    /// No receive is posted: come back after the wait of this code.
    NotReady(u8),
    /// The request makes no sense or is not enabled.
    InvalidRequest,
    /// A key, a range or a right is wrong.
    RemoteAccess,
    /// The responder cannot go on for reasons of its own.
    RemoteOperation,
}

/// What the engine does for a requester.
pub trait RequesterOps {
    /// A request is about to start: checks it and its local memory, and executes the ones that stay local
    /// (fast registration and local invalidation).
    ///
    /// # Errors
    /// The status that the request ends with.
    fn begin(&mut self, work: &mut SendWr) -> Result<(), WcStatus>;

    /// Copies from `offset` bytes into the list.
    ///
    /// # Errors
    /// Some of it cannot be read.
    fn gather(&mut self, sges: &[Sge], offset: u64, out: &mut [u8]) -> Result<(), Fault>;

    /// Copies to `offset` bytes into the list.
    ///
    /// # Errors
    /// Some of it cannot be written.
    fn scatter(&mut self, sges: &[Sge], offset: u64, data: &[u8]) -> Result<(), Fault>;

    /// A request has ended: gives its slot back, then publishes its completion if it gets one. Called in posting order.
    fn finish(&mut self, work: &SendWr, status: WcStatus, byte_len: u32);

    /// A request has ended with an error and all later ones were flushed: the QP goes to its error state.
    fn failed(&mut self);
}

/// Change of an atomic operation.
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
    /// Bytes of the message.
    pub length: u32,
    /// Immediate data.
    pub immediate: Option<[u8; 4]>,
    /// Key that was invalidated.
    pub invalidated: Option<u32>,
    /// The sender asked for a solicited event.
    pub solicited: bool,
}

/// What the engine does for a responder. It has at most one receive in use.
pub trait ResponderOps {
    /// A request came in. The first one in RTR establishes the communication.
    fn request_arrived(&mut self);

    /// Has a receive in use, taking one from the queue if there is none yet.
    ///
    /// # Errors
    /// There is none, or it is malformed.
    fn take_receive(&mut self) -> Result<(), NakReason>;

    /// Copies to `offset` bytes into the receive in use.
    ///
    /// # Errors
    /// It is too short, or its memory cannot be written.
    fn fill_receive(&mut self, offset: u64, data: &[u8]) -> Result<(), NakReason>;

    /// Publishes the receive in use.
    ///
    /// # Errors
    /// The QP ended over it.
    fn complete_receive(&mut self, received: Received) -> Result<(), NakReason>;

    /// Invalidates a key for the peer. A failure ends the receive in use.
    ///
    /// # Errors
    /// The key is not valid.
    fn invalidate(&mut self, key: u32) -> Result<(), NakReason>;

    /// Whether the QP lets its peer do this at all.
    ///
    /// # Errors
    /// It does not.
    fn check_enabled(&mut self, need: Access) -> Result<(), NakReason>;

    /// Checks a key of this side for a range that is not empty.
    ///
    /// # Errors
    /// The key, the range or a right is wrong.
    fn check_remote(&mut self, remote: RemoteAddress, length: u64, need: Access) -> Result<(), NakReason>;

    /// Copies to memory that was checked before; it may be gone.
    ///
    /// # Errors
    /// Some of it cannot be written.
    fn write(&mut self, remote: RemoteAddress, data: &[u8]) -> Result<(), Fault>;

    /// Copies from memory that was checked before; it may be gone.
    ///
    /// # Errors
    /// Some of it cannot be read.
    fn read(&mut self, remote: RemoteAddress, out: &mut [u8]) -> Result<(), Fault>;

    /// Changes eight aligned bytes in one step and gives the value before.
    ///
    /// # Errors
    /// They cannot be accessed.
    fn update(&mut self, remote: RemoteAddress, change: AtomicChange) -> Result<u64, Fault>;

    /// The request is refused: raises the event and moves the QP to its error state.
    fn refuse(&mut self, refusal: NakReason);
}

/// Bytes that a list names.
#[inline]
pub fn total(sges: &[Sge]) -> u64 {
    sges.iter().map(|sge| u64::from(sge.length)).sum()
}

/// Whether a request never leaves this side.
pub(super) const fn is_local(op: &SendOp) -> bool {
    matches!(op, SendOp::LocalInvalidate(_) | SendOp::FastRegister(_) | SendOp::Unsupported { .. } | SendOp::Malformed)
}
