//! Failed queue pairs: their causes, and the observers that are notified of them.

use std::fmt;
use std::sync::Arc;

use parking_lot::RwLock;
use pvrdma_verbs_types::{Gid, NakReason, Qpn, WcStatus};
use serde::{Deserialize, Serialize};

/// Cause of a failed queue pair. Failed requests are distinguished by their completion status (IBA 11.6.2), requests
/// of the peer that were refused by their NAK (IBA 9.7.5.2).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailureCause {
    /// A request is longer than allowed.
    LocalLength,
    /// A request is not permitted on the queue pair.
    LocalQpOperation,
    /// The memory of a request cannot be accessed.
    LocalProtection,
    /// A response cannot be stored.
    LocalAccess,
    /// The peer sent a response that does not match the request.
    BadResponse,
    /// The peer refused a request as invalid.
    RemoteInvalidRequest,
    /// The peer refused the key, range or access right of a request.
    RemoteAccess,
    /// The peer could not complete a request.
    RemoteOperation,
    /// The peer did not acknowledge a request in time, after all retries.
    RetryExceeded,
    /// No queue pair of this host accepts the requests, or no route leads to the peer.
    PeerAbsent,
    /// The peer had no receive posted, after all retries.
    RnrRetryExceeded,
    /// A request failed with another status.
    RequestFailed,
    /// A request of the peer was refused as invalid.
    RefusedRequest,
    /// The key, range or access right of a peer's request was refused.
    RefusedAccess,
    /// A request of the peer could not be completed, because the receive that it took cannot be used.
    RefusedOperation,
    /// A completion queue had no room.
    CqOverrun,
    /// The ring of the send queue is invalid.
    SendQueue,
    /// The ring of the receive queue is invalid.
    ReceiveQueue,
}

impl FailureCause {
    /// All causes.
    pub const ALL: [Self; 18] = [
        Self::LocalLength,
        Self::LocalQpOperation,
        Self::LocalProtection,
        Self::LocalAccess,
        Self::BadResponse,
        Self::RemoteInvalidRequest,
        Self::RemoteAccess,
        Self::RemoteOperation,
        Self::RetryExceeded,
        Self::PeerAbsent,
        Self::RnrRetryExceeded,
        Self::RequestFailed,
        Self::RefusedRequest,
        Self::RefusedAccess,
        Self::RefusedOperation,
        Self::CqOverrun,
        Self::SendQueue,
        Self::ReceiveQueue,
    ];

    /// Returns the cause in one word, for logs and labels.
    pub const fn word(self) -> &'static str {
        match self {
            Self::LocalLength => "local-length",
            Self::LocalQpOperation => "local-qp-operation",
            Self::LocalProtection => "local-protection",
            Self::LocalAccess => "local-access",
            Self::BadResponse => "bad-response",
            Self::RemoteInvalidRequest => "remote-invalid-request",
            Self::RemoteAccess => "remote-access",
            Self::RemoteOperation => "remote-operation",
            Self::RetryExceeded => "retry-exceeded",
            Self::PeerAbsent => "peer-absent",
            Self::RnrRetryExceeded => "rnr-retry-exceeded",
            Self::RequestFailed => "request-failed",
            Self::RefusedRequest => "refused-request",
            Self::RefusedAccess => "refused-access",
            Self::RefusedOperation => "refused-operation",
            Self::CqOverrun => "cq-overrun",
            Self::SendQueue => "send-queue",
            Self::ReceiveQueue => "receive-queue",
        }
    }

    /// Returns the cause of a request that ended with `status`.
    pub(crate) const fn of_request(status: WcStatus) -> Self {
        match status {
            WcStatus::LocalLength => Self::LocalLength,
            WcStatus::LocalQpOperation => Self::LocalQpOperation,
            WcStatus::LocalProtection => Self::LocalProtection,
            WcStatus::LocalAccess => Self::LocalAccess,
            WcStatus::BadResponse => Self::BadResponse,
            WcStatus::RemoteInvalidRequest => Self::RemoteInvalidRequest,
            WcStatus::RemoteAccess => Self::RemoteAccess,
            WcStatus::RemoteOperation => Self::RemoteOperation,
            WcStatus::RetryExceeded => Self::RetryExceeded,
            WcStatus::RnrRetryExceeded => Self::RnrRetryExceeded,
            WcStatus::Success
            | WcStatus::Flushed
            | WcStatus::MwBind
            | WcStatus::RemoteAborted
            | WcStatus::Fatal
            | WcStatus::ResponseTimeout
            | WcStatus::General => Self::RequestFailed,
        }
    }

    /// Returns the cause of a refused request.
    pub(crate) const fn of_refusal(nak: NakReason) -> Self {
        match nak {
            NakReason::RemoteAccess => Self::RefusedAccess,
            NakReason::RemoteOperation => Self::RefusedOperation,
            NakReason::InvalidRequest | NakReason::Silence | NakReason::NotReady(_) => Self::RefusedRequest,
        }
    }
}

/// A queue pair that has entered its error state, for a reason other than a command of its guest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct QpFailure {
    /// Number of the queue pair.
    pub qpn: Qpn,
    /// Address of its peer, if it is connected.
    pub peer: Gid,
    /// Cause.
    pub cause: FailureCause,
    /// The half that failed and preceding events, as text.
    pub history: String,
    /// The log has a line about it: the rate limit of the device's log did not suppress it.
    pub logged: bool,
}

type Observer = Box<dyn Fn(&QpFailure) + Send + Sync>;

/// Observer of a device, if there is one.
#[derive(Default)]
pub(crate) struct FailureObserver(RwLock<Option<Arc<Observer>>>);

impl fmt::Debug for FailureObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FailureObserver").finish_non_exhaustive()
    }
}

impl FailureObserver {
    pub(crate) fn tell(&self, failure: &QpFailure) {
        if let Some(observer) = &*self.0.read() {
            observer(failure);
        }
    }
}

/// Handle for an observer, which is removed on drop. A later observer of the same device replaces it.
pub struct ObservedFailures {
    of: Arc<FailureObserver>,
    observer: Arc<Observer>,
}

impl fmt::Debug for ObservedFailures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObservedFailures").finish_non_exhaustive()
    }
}

impl ObservedFailures {
    pub(crate) fn new(of: Arc<FailureObserver>, observer: Observer) -> Self {
        let observer = Arc::new(observer);
        *of.0.write() = Some(Arc::clone(&observer));
        Self { of, observer }
    }
}

impl Drop for ObservedFailures {
    fn drop(&mut self) {
        self.of.0.write().take_if(|current| Arc::ptr_eq(current, &self.observer));
    }
}
