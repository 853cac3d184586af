//! What a device counts that is more than load.

/// Counters of a device that stand still while its guest does nothing wrong, whatever others do.
pub const NO_LOAD: [&str; 11] = [
    "register_errors",
    "handshakes_refused",
    "commands_unknown",
    "modify_qp_refused",
    "doorbells_ignored",
    "events_dropped",
    "kept_refused",
    "request_errors",
    "refused_requests",
    "cq_overruns",
    "unanswered",
];
