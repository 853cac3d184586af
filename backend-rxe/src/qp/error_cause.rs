//! Causes of the error state.

/// Cause of the error state of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ErrorCause {
    /// A modify command, which holds both halves. It can enter the error state even from RESET.
    Command,
    /// The requester: a request failed, or the send queue cannot be read. The thread of the requester flushes next.
    Requester,
    /// The responder: it refused a request, or failed a receive. Another thread may hold the requester.
    Responder,
    /// Overrun of a completion queue. Both halves may be held, even by the caller.
    CqOverrun,
}
