//! Policy on virtual time.

use std::cell::Cell;

use proptest::prelude::*;

use super::policy::{Heat, Pacer, Step};
use super::*;

const MICROSECOND: u64 = 1_000;
const MILLISECOND: u64 = 1_000_000;

const fn processors(available: usize, virtual_processors: usize, watchers: usize) -> Processors {
    Processors { available, virtual_processors, watchers }
}

fn auto() -> WindowPolicy {
    WindowPolicy::choose(DoorbellMode::Auto, processors(2, 1, 1)).unwrap()
}

/// Rings `count` doorbells, one each `period`. Returns the number after which the page was hot.
fn ring(heat: &Heat, policy: &WindowPolicy, clock: &Cell<u64>, period: u64, count: u32) -> Option<u32> {
    (1..=count).find(|_| {
        clock.set(clock.get() + period);
        heat.heard(policy, false, || clock.get())
    })
}

#[test]
fn auto_needs_a_processor_for_the_watcher() {
    for (available, guests, watchers, mapped) in
        [(1, 1, 1, false), (2, 1, 1, true), (2, 2, 1, false), (3, 2, 2, false), (4, 2, 2, true), (64, 63, 1, true)]
    {
        let choice = WindowPolicy::choose(DoorbellMode::Auto, processors(available, guests, watchers));
        assert_eq!(choice.is_some(), mapped, "{available} for {guests} and {watchers}");
    }
    let huge = processors(usize::MAX, usize::MAX, 2);
    assert!(WindowPolicy::choose(DoorbellMode::Auto, huge).is_some());
    for available in [1, 2, 64] {
        assert_eq!(WindowPolicy::choose(DoorbellMode::Trapped, processors(available, 1, 1)), None);
        let forced = WindowPolicy::choose(DoorbellMode::Mapped, processors(available, 1, 1)).unwrap();
        let mut pacer = Pacer::new(&forced);
        pacer.mapped(0);
        assert_eq!(
            pacer.next(0, 1, true) == Step::Spin,
            available > 1,
            "it never spins while another thread waits for the processor"
        );
    }
}

#[test]
fn modes_have_names() {
    for (name, mode) in
        [("auto", DoorbellMode::Auto), ("trapped", DoorbellMode::Trapped), ("mapped", DoorbellMode::Mapped)]
    {
        assert_eq!(name.parse(), Ok(mode));
    }
    let error = "fast".parse::<DoorbellMode>().unwrap_err();
    assert_eq!(error.to_string(), "doorbells are auto, trapped or mapped, not 'fast'");
}

#[test]
fn a_page_is_hot_after_more_than_64_doorbells_in_a_millisecond() {
    let (policy, clock) = (auto(), Cell::new(7 * MILLISECOND));
    assert_eq!(ring(&Heat::default(), &policy, &clock, 10 * MICROSECOND, 1000), Some(65));
    assert_eq!(ring(&Heat::default(), &policy, &clock, 16 * MICROSECOND, 100_000), None);
    let heat = Heat::default();
    assert_eq!(ring(&heat, &policy, &clock, 16 * MICROSECOND, 64), None);
    assert_eq!(ring(&heat, &policy, &clock, 10 * MICROSECOND, 129), Some(66), "65 slow doorbells counted");
    let forced = WindowPolicy::choose(DoorbellMode::Mapped, processors(1, 1, 1)).unwrap();
    assert_eq!(ring(&Heat::default(), &forced, &clock, MILLISECOND, 1), Some(1));
}

#[test]
fn a_process_that_arms_is_left_alone_for_a_tenth_of_a_second() {
    let (policy, clock, heat) = (auto(), Cell::new(0), Heat::default());
    assert!(!heat.heard(&policy, true, || clock.get()));
    let armed = clock.get();
    while ring(&heat, &policy, &clock, 10 * MICROSECOND, 65).is_none() {}
    assert!((100 * MILLISECOND..101 * MILLISECOND).contains(&(clock.get() - armed)));
    // A forced mode maps at the first doorbell, but arming alone makes no page hot.
    let forced = WindowPolicy::choose(DoorbellMode::Mapped, processors(1, 1, 1)).unwrap();
    assert!(!heat.heard(&forced, true, || clock.get()));
    assert!(heat.heard(&forced, false, || clock.get()));
    // The next process has not armed anything.
    assert!(!heat.heard(&policy, true, || clock.get()));
    heat.forget();
    assert_eq!(ring(&heat, &policy, &clock, 10 * MICROSECOND, 65), Some(65));
}

/// Runs a watcher from a moment of work until it makes the pages trap. Returns the duration, the number of looks
/// without a pause, and the number of looks after a pause.
fn until_idle(pacer: &mut Pacer, now: &mut u64) -> (u64, u32, u64) {
    let (begin, mut spins, mut naps) = (*now, 0, 0);
    let mut moved = 1;
    loop {
        match pacer.next(*now, moved, true) {
            Step::Spin => {
                spins += 1;
                *now += MICROSECOND;
            }
            Step::Nap(time) => {
                naps += 1;
                assert!((20 * MICROSECOND..=50 * MICROSECOND).contains(&time));
                *now += time;
            }
            Step::Retire => return (*now - begin, spins, naps),
            Step::Sleep => panic!("pages are memory"),
        }
        moved = 0;
    }
}

#[test]
fn the_watcher_spins_naps_and_lets_go() {
    let mut now = MILLISECOND;
    let forced = WindowPolicy::choose(DoorbellMode::Mapped, processors(1, 1, 1)).unwrap();
    for (policy, spins, idle) in [(auto(), 50, 2 * MILLISECOND), (forced, 0, 100 * MILLISECOND)] {
        let mut pacer = Pacer::new(&policy);
        pacer.mapped(now);
        let (time, spun, naps) = until_idle(&mut pacer, &mut now);
        assert!((idle..=idle + 50 * MICROSECOND).contains(&time), "{time}");
        assert!(spun == spins && naps < 30 + idle / (50 * MICROSECOND), "{spun} {naps}");
        assert_eq!(pacer.next(now, 0, false), Step::Sleep);
    }
}

/// The page of a process that polls and finds nothing is revoked less and less often; after an absence this starts
/// over.
#[test]
fn a_page_that_is_touched_again_at_once_stays_longer() {
    let mut pacer = Pacer::new(&auto());
    let mut now = MILLISECOND;
    for wanted in [2, 4, 8, 16, 32, 64, 100, 100] {
        pacer.mapped(now);
        let (time, ..) = until_idle(&mut pacer, &mut now);
        assert_eq!(time / MILLISECOND, wanted);
        now += MILLISECOND;
    }
    now += 10 * MILLISECOND;
    pacer.mapped(now);
    assert_eq!(until_idle(&mut pacer, &mut now).0 / MILLISECOND, 2);
}

proptest! {
    /// Whatever it finds, a watcher sleeps only when no page is memory, and pages without activity trap again in
    /// bounded time.
    #[test]
    fn pages_do_not_stay_forever(steps in proptest::collection::vec((0..3u32, 0..200u64, any::<bool>()), 1..200)) {
        let mut pacer = Pacer::new(&auto());
        let (mut now, mut worked, mut mapped) = (0, 0, false);
        for (moved, time, map) in steps {
            if map && !mapped {
                mapped = true;
                worked = now;
                pacer.mapped(now);
            }
            now += time * MICROSECOND;
            if moved > 0 {
                worked = now;
            }
            match pacer.next(now, moved, mapped) {
                Step::Sleep => prop_assert!(!mapped),
                Step::Retire => {
                    prop_assert!(mapped && now - worked >= 2 * MILLISECOND);
                    mapped = false;
                }
                Step::Spin | Step::Nap(_) => prop_assert!(!mapped || now - worked < 101 * MILLISECOND),
            }
        }
    }
}
