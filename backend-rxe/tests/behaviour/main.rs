//! Tests of the adapter through the verbs traits, on virtual time unless a test needs threads. The conformance suite
//! (see `conformance.rs`) tests the behaviour of every adapter; these tests cover the particulars of this one:
//! counters, budgets, exact waits, ports and captures.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

/// Makes tests of this module run over a cable as well.
macro_rules! over_a_cable {
    ($($case:ident)*) => {
        mod over_a_cable {
            $(#[test]
            fn $case() {
                crate::world::on_the_wire(pvrdma_link::fault::Faults::default(), 1, super::$case);
            })*
        }
    };
}

/// Makes tests of this module run between devices with slow memory as well.
macro_rules! on_slow_memory {
    ($($case:ident)*) => {
        mod on_slow_memory {
            $(#[test]
            fn $case() {
                crate::world::on_slow_memory(super::$case);
            })*
        }
    };
}

mod addresses;
mod announcements;
mod at_once;
mod capture;
mod claims;
mod congestion;
mod errors;
mod faults;
mod flight;
mod flows;
mod gate;
mod guard;
mod hold;
mod integrity;
mod iwarp;
mod life;
mod link_state;
mod marks;
mod negotiation;
mod networks;
mod ops;
mod panics;
mod pass_through;
mod pause;
mod port;
mod port_security;
mod retry;
mod saved;
mod shares;
mod slow_memory;
mod srq;
mod stations;
mod takeover;
mod tap;
mod threads;
mod ud;
mod wire;
mod without_icrc;
mod world;
