//! Runs all cases in two lanes, group by group.
//!
//! Two guests that communicate wait for each other much of the time: one pair alone keeps little more than one
//! processor busy.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::thread;

use super::case::Case;
use super::runner::{Tally, run_cases};
use crate::image::GuestImage;
use crate::pair::{LinkKind, PairOptions};

const LANES: usize = 2;

/// Groups that take longest. They start first, so that both lanes end at about the same time.
const LONG: [&str; 3] = ["kvm", Case::IN_PAIR, "interop"];

/// Runs all cases. Those of a group, which may share machines, run one after the other; `cases` creates all of them
/// anew for each lane, because machines are not shared between threads.
pub(crate) fn run_in_lanes(
    image: &GuestImage,
    options: &PairOptions,
    kind: LinkKind,
    cases: impl Fn() -> Vec<Case> + Sync,
) -> Tally {
    let groups = Mutex::new(groups(&cases()));
    let next = || groups.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    let lane = || {
        let (mut left, mut tally) = (cases(), Tally::default());
        while let Some(group) = next() {
            let (ours, others) = left.into_iter().partition(|case| case.group() == group);
            left = others;
            tally.add(run_cases(image, options, kind, ours));
        }
        tally
    };
    thread::scope(|scope| {
        let lanes: Vec<_> = (0..LANES).map(|_| scope.spawn(lane)).collect();
        let mut tally = Tally::default();
        for lane in lanes {
            // The results of a lane that panicked are lost.
            tally.add(lane.join().unwrap_or_else(|_| Tally {
                failed: 1,
                failures: vec!["a lane of guest tests panicked".to_owned()],
                ..Tally::default()
            }));
        }
        tally
    })
}

/// The groups of these cases, each once.
fn groups(cases: &[Case]) -> VecDeque<String> {
    let mut groups = VecDeque::new();
    let present = LONG.into_iter().filter(|name| cases.iter().any(|case| case.group() == *name));
    for name in present.chain(cases.iter().map(Case::group)) {
        if !groups.iter().any(|known| known == name) {
            groups.push_back(name.to_owned());
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::all;

    #[test]
    fn each_case_is_in_one_group() {
        let cases = all(LinkKind::Pvrdma);
        let groups = groups(&cases);
        let long: Vec<_> = groups.iter().take(LONG.len()).collect();
        assert_eq!(long, LONG);
        let of = |group: &String| cases.iter().filter(|case| case.group() == group).count();
        assert!(groups.iter().all(|group| of(group) > 0));
        assert_eq!(groups.iter().map(of).sum::<usize>(), cases.len());
    }
}
