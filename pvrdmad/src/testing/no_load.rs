//! Counters of a device that show more than load.

/// Counters of a device that do not change while its guest is well-behaved, whatever other guests do.
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
