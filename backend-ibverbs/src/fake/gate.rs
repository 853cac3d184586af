//! Gate for calls of the fake adapter: a test holds a call to run other code in the meantime.

/// A call that can be held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Call {
    PostSend,
    PostReceive,
    /// A change to the error state.
    Stop,
}

/// State of the gate.
#[derive(Default)]
pub(super) struct Gate {
    pub(super) held: Option<Call>,
    /// A caller is waiting in the held call.
    pub(super) came: bool,
}
