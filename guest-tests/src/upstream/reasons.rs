//! Reasons for which cases fail, and the side that has the cause.

use std::fmt;

/// The side that has the cause of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// `vmw_pvrdma`, in the kernel or in rdma-core, or the device's interface that it defines.
    Driver,
    /// The suite, or the library that it tests.
    Suite,
    /// This project's device, daemon or lab.
    #[expect(dead_code, reason = "no failure in the stored results is this project's")]
    Us,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Driver => "driver",
            Self::Suite => "suite",
            Self::Us => "us",
        })
    }
}

/// The cause of some failures.
#[derive(Debug)]
pub(super) struct Reason {
    suite: &'static str,
    /// Parts of the names of its cases.
    cases: &'static [&'static str],
    pub(super) of: Side,
    pub(super) why: &'static str,
}

impl Reason {
    fn is_of(&self, suite: &str, case: &str) -> bool {
        self.suite == suite && self.cases.iter().any(|part| case.contains(part))
    }

    /// The parts of the names, for the page.
    pub(super) fn shown(&self) -> String {
        self.cases.join("`, `")
    }
}

/// Returns the cause of a failure, and its place among all causes.
pub(super) fn of(suite: &str, case: &str) -> Option<(usize, &'static Reason)> {
    REASONS.iter().enumerate().find(|(_, reason)| reason.is_of(suite, case))
}

/// All causes. The first that matches counts.
pub(super) const REASONS: [Reason; 8] = [
    Reason {
        suite: "iscsi",
        cases: &["ExtendedCopy.Simple"],
        of: Side::Suite,
        why: "the test begins with a write of 1 MiB; over iSER, `tgtd` closes the connection at more than its buffer's \
              512 KiB",
    },
    Reason {
        suite: "iscsi",
        cases: &["Reserve6.ITNexusLoss", "Reserve6.Logout"],
        of: Side::Suite,
        why: "over iSER, `tgtd` keeps the reservation of an initiator that logs out until the kernel reports the end of \
              the connection's time-wait state, and the test reserves at once; its leftover fails the next test, which \
              passes alone",
    },
    Reason {
        suite: "iscsi",
        cases: &["Inquiry.", "ModeSense6."],
        of: Side::Suite,
        why: "libiscsi's iSER transport takes the length of the buffer for that of the data, without the residual count; \
              the cases pass over TCP",
    },
    Reason {
        suite: "iscsi",
        cases: &["GetLBAStatus.BeyondEol", "PrinServiceactionRange.Range", "ProutReserve.Ownership", "Reserve6."],
        of: Side::Suite,
        why: "answers of the target `tgtd`; the same cases fail over TCP, without any RDMA",
    },
    Reason {
        suite: "mpich-collective",
        cases: &["coll/oplxor"],
        of: Side::Suite,
        why: "the test applies `MPI_LXOR` to floating-point types, which the library, of a later release, refuses",
    },
    Reason {
        suite: "pyverbs",
        cases: &["QPTest.test_query_rc_qp", "QPTest.test_query_ud_qp"],
        of: Side::Driver,
        why: "`pvrdma_query_qp` leaves out the sizes of the queues of a QP in RESET",
    },
    Reason {
        suite: "pyverbs",
        cases: &["illegal_caps_max_send_wr", "illegal_caps_max_recv_wr"],
        of: Side::Driver,
        why: "rdma-core's provider rounds the size of a queue up to a power of two in 32 bits: 2^32 - 1 becomes 0, \
              which is valid",
    },
    Reason {
        suite: "ucx",
        cases: &["test_uct_peer_failure_keepalive.killed"],
        of: Side::Suite,
        why: "without inline data, `rc_verbs` flushes by a message of its flow control, which the test has switched off; \
              the receiver asserts that it is on",
    },
];
