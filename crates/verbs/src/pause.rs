//! Pausing an adapter.

use crate::hca::Hca;

/// An adapter that can be paused for any length of time, and resumes with all connections intact.
///
/// The owner of a device pauses it to save its state, to hand it over to another process, or because its VM is paused.
///
/// While an adapter is paused:
///
/// - No thread accesses the guest's memory on its behalf, and none changes its queue pairs and shared receive queues.
///   No completion and no event is reported.
/// - Notifications ([`QueuePair::notify_send`] and its like) do nothing. They are not counted or kept, because
///   [`Self::resume`] has the same effect as a notification of every queue.
/// - Requesters of other devices in the process whose peer is paused wait without a timer. They spend no retries.
///   Hosts beyond a link see a host that does not respond.
/// - Objects can be queried, inspected and destroyed, regions can be deregistered, GIDs can be bound and unbound, and
///   the link can be set up or down. [`QueuePair::modify`] fails.
///
/// Pauses do not nest: one [`Self::resume`] ends the pause, no matter how often [`Self::pause`] was called.
///
/// [`QueuePair::notify_send`]: crate::QueuePair::notify_send
/// [`QueuePair::modify`]: crate::QueuePair::modify
pub trait PauseHca: Hca {
    /// Pauses the adapter. When this returns, everything in the list above holds. It waits for the batches in progress,
    /// which are bounded, but never for the guest or for a peer. The caller must hold neither a view of the memory of
    /// any device nor a lock that a sink of this device takes.
    ///
    /// Returns `false` if the adapter is paused already.
    fn pause(&self) -> bool;

    /// Ends the pause. Deadlines of requests that passed meanwhile count as not passed, and all queues are looked at.
    ///
    /// Returns `false` if the adapter is not paused.
    fn resume(&self) -> bool;

    /// Returns `true` if the adapter is paused.
    fn is_paused(&self) -> bool;
}
