//! Figures of a fabric of 256 hosts against their bounds.

use std::time::Duration;

use fabric_sim::{Experiment, Figures, Plan, Transport};

/// Four of the leaves, where a fault needs more time than the whole fabric leaves.
fn small() -> Plan {
    Plan { leaves: 4, ..Plan::full() }
}

fn run(what: &str, experiment: &Experiment) -> Figures {
    let figures = experiment.run();
    println!("{what}: {figures:.3?}");
    figures
}

/// With marks, 64 connections share a line fairly. Without, much of it is still used.
#[test]
fn an_incast_is_shared_with_marks_and_used_without() {
    for transport in [Transport::Selective, Transport::Multipath] {
        let marks = run("marks", &Experiment::incast(Plan::full(), transport, 64 << 10));
        assert!(marks.p99 <= 3.0 && marks.jain >= 0.95 && marks.goodput >= 0.85, "{transport:?}: {marks:.3?}");
        let drops = run("drops", &Experiment::incast(Plan::full().without_marks(), transport, 64 << 10));
        assert!(drops.goodput >= 0.6 * marks.goodput && drops.failed == 0, "{transport:?}: {drops:.3?}");
    }
}

/// Load balancing is nearly ideal, although the spines have no more than the rate of the hosts.
#[test]
fn a_permutation_uses_the_spines() {
    let of = |plan, transport| Experiment::permutation(plan, transport, 1);
    let ideal = run("ideal", &of(small().balanced(), Transport::Selective));
    let single = run("single", &of(small(), Transport::Selective));
    let multipath = run("multipath", &of(small(), Transport::Multipath));
    assert!(multipath.goodput >= 0.9 * ideal.goodput, "{:.3} of {:.3}", multipath.goodput, ideal.goodput);
    assert!(multipath.goodput >= single.goodput + 0.1 && multipath.jain >= 0.95, "{single:.3?} {multipath:.3?}");
}

/// A line that fails or loses frames ends no connection.
#[test]
fn a_faulty_line_ends_no_connection() {
    let experiment = Experiment {
        warm: Duration::from_millis(5),
        length: Duration::from_millis(20),
        patience: Duration::from_millis(200),
        ..Experiment::permutation(small(), Transport::Multipath, 1)
    };
    let failed = run("failed", &experiment.with_loss(10_000, None));
    assert!(failed.failed == 0 && failed.longest.is_some(), "{failed:.3?}");
    let lossy = run("lossy", &experiment.with_loss(100, None));
    assert!(lossy.failed == 0 && lossy.longest.is_some(), "{lossy:.3?}");
}

/// The seed decides about everything.
#[test]
fn a_seed_gives_the_same_figures_again() {
    let length = Duration::from_millis(3);
    let experiment = Experiment { warm: length, length, ..Experiment::all_to_all(small(), Transport::Multipath) };
    let experiment = experiment.with_loss(100, Some(Duration::from_millis(1)));
    let figures = experiment.run();
    assert!(figures.messages > 1000 && figures.switches.lost > 0, "{figures:.3?}");
    assert_eq!(figures, experiment.run());
    assert_ne!(figures, Experiment { seed: 2, ..experiment }.run());
}
