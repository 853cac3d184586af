//! The verbs conformance suite: the same calls must have the same results with every adapter (feature `testing`).
//!
//! Each case creates its own devices, uses only the traits of this crate, and panics when an adapter behaves
//! incorrectly. [`cases`] lists them for programs; [`conformance_tests!`](crate::conformance_tests) generates a test
//! for each. No case depends on the speed of an adapter: expected events are awaited, and the absence of an event is
//! shown by a later event.
#![expect(clippy::unwrap_used, clippy::panic, reason = "for tests: a panic fails the test")]

mod atomics;
mod connected;
mod datagrams;
mod errors;
mod memory;
mod shared;
mod states;

use pvrdma_verbs_types::QpType;

use crate::hca::Backend;
use crate::testing::{End, Node};

/// Behaviour in which adapters may differ. The suite checks that an adapter behaves as its profile says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Profile {
    /// A responder that refuses a request raises an asynchronous event (required by `C11-40`; some adapters only send
    /// the NAK).
    pub responder_events: bool,
    /// A local error of a datagram QP stops only its send queue (SQE); otherwise it stops the whole QP (ERROR).
    pub send_queue_error: bool,
    /// Draining with notification raises the event.
    pub drained_event: bool,
    /// The first request in RTR raises "communication established".
    pub established_event: bool,
    /// Only solicited messages are reported as such; otherwise all messages are.
    pub exact_solicited: bool,
    /// If a receive cannot take its message, both the receive and the send complete with the specific status; otherwise
    /// with any error.
    pub receive_errors: bool,
    /// The peer's checks of a READ or an atomic come before the check of the local key of its result, as in hardware
    /// adapters; otherwise the local key is checked before the request is sent.
    pub peer_first: bool,
    /// Datagrams carry the network header of the GIDs that the guests know.
    pub guest_addresses: bool,
    /// A region filled by a fast registration is usable by every QP of its protection domain, not only by the one that
    /// filled it.
    pub fast_keys_for_all: bool,
}

impl Profile {
    /// Profile of an adapter without restrictions.
    pub const FULL: Self = Self {
        responder_events: true,
        send_queue_error: true,
        drained_event: true,
        established_event: true,
        exact_solicited: true,
        receive_errors: true,
        peer_first: true,
        guest_addresses: true,
        fast_keys_for_all: true,
    };
}

/// Backend to check.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a, B: Backend> {
    /// The backend.
    pub backend: &'a B,
    /// Its declared behaviour.
    pub profile: Profile,
}

impl<B: Backend> Subject<'_, B> {
    /// Creates a device.
    fn node(&self, number: u8) -> Node<B::Hca> {
        Node::new(self.backend, number)
    }

    /// Creates two devices with a connected QP each.
    fn pair(&self) -> Pair<B> {
        self.pair_with(|_| {}, |_| {})
    }

    /// As [`Self::pair`]; `left` and `right` change the attributes of the two QPs.
    fn pair_with(
        &self,
        left: impl FnOnce(&mut pvrdma_verbs_types::QpAttrs),
        right: impl FnOnce(&mut pvrdma_verbs_types::QpAttrs),
    ) -> Pair<B> {
        let (a, b) = (self.node(1), self.node(2));
        let pair = Pair { left: a.qp(QpType::Rc), right: b.qp(QpType::Rc), a, b };
        pair.left.connect(&pair.right, left);
        pair.right.connect(&pair.left, right);
        pair
    }
}

/// Two devices with a connected QP each. The ends are declared first, so that they are dropped before their devices.
struct Pair<B: Backend> {
    left: End<B::Hca>,
    right: End<B::Hca>,
    a: Node<B::Hca>,
    b: Node<B::Hca>,
}

macro_rules! cases {
    ($($module:ident { $($name:ident,)* })*) => {
        /// All cases: name and function.
        pub fn cases<B: Backend>() -> Vec<(&'static str, fn(&Subject<'_, B>))> {
            vec![$($((concat!(stringify!($module), "::", stringify!($name)), $module::$name::<B>),)*)*]
        }

        /// Makes a test of each case. The argument is called for each and gives a backend and its
        /// [`conformance::Profile`].
        ///
        /// [`conformance::Profile`]: crate::conformance::Profile
        #[macro_export]
        macro_rules! conformance_tests {
            ($backend:expr) => {
                $($(
                    #[test]
                    fn $name() {
                        let (backend, profile) = $backend();
                        let case = concat!(stringify!($module), "::", stringify!($name));
                        $crate::conformance::run(case, &$crate::conformance::Subject { backend: &backend, profile });
                    }
                )*)*
            };
        }
    };
}

cases! {
    connected {
        send_and_receive,
        only_signaled_requests_complete,
        immediate_data_and_solicited,
        write_and_read,
        empty_operations_look_at_no_key,
        a_qp_may_be_its_own_peer,
        requests_complete_in_order,
        more_requests_than_the_ring_holds,
        large_messages,
        a_receive_that_comes_late,
    }
    atomics {
        atomic_values,
        atomics_add_up,
    }
    memory {
        the_dma_key_names_bus_addresses_and_is_local,
        fast_registration_and_invalidation,
        a_destroyed_region_is_gone,
        unmapped_memory_is_not_reached,
        switched_off_memory_is_not_reached,
        keys_differ_and_can_be_made_again,
    }
    errors {
        local_errors,
        an_atomic_has_room_for_eight_bytes_and_no_more,
        the_peers_checks_come_before_the_key_of_a_result,
        a_write_with_immediate_to_a_bad_key_ends_its_receive,
        a_long_write_with_immediate_to_a_bad_key_takes_no_receive,
        remote_access_errors,
        operations_that_a_qp_does_not_enable_are_refused,
        receives_that_do_not_fit,
        a_receive_is_not_ready,
        a_peer_that_does_not_answer_exhausts_the_retries,
        requests_behind_an_error_are_flushed,
    }
    datagrams {
        a_datagram_brings_its_header,
        datagrams_without_a_receiver_are_dropped,
        a_datagram_that_does_not_fit_takes_no_receive,
        a_datagram_that_does_not_fit_ends_a_shared_receive,
        local_datagram_errors,
    }
    shared {
        several_qps_share_the_receives,
        the_limit_fires_once_for_each_arming,
        the_last_receive_is_announced,
    }
    states {
        transitions_follow_the_table,
        refused_changes_change_nothing,
        error_flushes_both_queues,
        reset_is_silent_and_starts_over,
        draining_finishes_what_was_started,
        attributes_are_those_that_were_set,
        a_destroyed_qp_publishes_nothing,
        the_first_request_establishes_the_communication,
    }
}

/// Runs a case by name.
///
/// # Panics
/// The case fails, or there is none of that name.
pub fn run<B: Backend>(name: &str, subject: &Subject<'_, B>) {
    let (_, case) = cases::<B>().into_iter().find(|(known, _)| *known == name).unwrap();
    case(subject);
}
