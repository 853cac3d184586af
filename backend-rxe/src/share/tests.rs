use std::sync::atomic::Ordering::Relaxed;

use super::*;

const MS: Duration = Duration::from_millis(1);

fn share(weight: u32) -> Share {
    Share::new(ShareConfig { weight, ..ShareConfig::default() })
}

#[test]
fn a_cost_is_scaled_by_the_weight() {
    let scaled = [0, 1, 50, 100, 1000, u32::MAX].map(|weight| share(weight).scaled(1000));
    assert_eq!(scaled, [100_000, 100_000, 2000, 1000, 100, 100]);
    assert_eq!(share(1).scaled(u64::MAX), u64::MAX);
}

/// Work on a device's own threads counts while other devices are busy, or may wait for the same link.
#[test]
fn work_on_own_threads_counts_beside_busy_devices() {
    for (busy, own, wire, counts) in [
        (0, false, false, false),
        (0, false, true, true),
        (1, true, false, false),
        (1, true, true, true),
        (1, false, false, true),
        (2, true, false, true),
    ] {
        let (share, contention) = (share(50), Contention::default());
        contention.busy.store(busy, Relaxed);
        share.busy.store(own, Relaxed);
        share.ran_elsewhere(&contention, 7, wire);
        share.ran_elsewhere(&contention, 3, wire);
        let taken = [share.take_elsewhere(), share.take_elsewhere()];
        assert_eq!(taken, [if counts { 20 } else { 0 }, 0], "{busy} {own} {wire}");
    }
    let (share, contention) = (share(100), Contention::default());
    share.ran_elsewhere(&contention, MAX_DEBT + 1, true);
    assert_eq!(share.take_elsewhere(), MAX_DEBT);
}

#[test]
fn a_device_continues_on_own_threads_unless_it_is_ahead() {
    let (share, contention) = (share(100), Contention::default());
    share.set_finish(1 << 40);
    assert!(share.may_run_elsewhere(&contention), "no device is busy");
    contention.busy.store(1, Relaxed);
    assert!(!share.may_run_elsewhere(&contention));
    share.busy.store(true, Relaxed);
    assert!(share.may_run_elsewhere(&contention), "only this device is");
    contention.busy.store(2, Relaxed);
    assert!(!share.may_run_elsewhere(&contention));
    let now = (1 << 40) - SLACK;
    contention.virtual_time.store(now, Relaxed);
    assert!(share.may_run_elsewhere(&contention), "it is ahead by no more than that");
    contention.virtual_time.store(now - 1, Relaxed);
    assert!(!share.may_run_elsewhere(&contention));
    // Cost that is not in the tag yet counts as well.
    contention.virtual_time.store(now, Relaxed);
    share.ran_elsewhere(&contention, 1, false);
    assert!(!share.may_run_elsewhere(&contention));
}

#[test]
fn an_idle_device_begins_at_the_virtual_time() {
    let (share, contention) = (share(100), Contention::default());
    contention.busy.store(1, Relaxed);
    contention.virtual_time.store(1000, Relaxed);
    share.set_finish(900);
    share.ran_elsewhere(&contention, 99, false);
    assert!(share.may_run_elsewhere(&contention));
    assert_eq!((share.finish(), share.take_elsewhere()), (1000, 0));
    // At that virtual time the device keeps its debt.
    share.ran_elsewhere(&contention, 99, false);
    assert!(share.may_run_elsewhere(&contention));
    assert_eq!((share.finish(), share.take_elsewhere()), (1000, 99));
    // The same holds if the debt is exactly the difference.
    share.set_finish(901);
    share.ran_elsewhere(&contention, 99, false);
    assert!(share.may_run_elsewhere(&contention));
    assert_eq!((share.finish(), share.take_elsewhere()), (901, 99));
    // While the device has tasks, only the thread with the ready queue writes the finish time.
    share.set_finish(900);
    share.busy.store(true, Relaxed);
    contention.busy.store(2, Relaxed);
    assert!(share.may_run_elsewhere(&contention));
    assert_eq!(share.finish(), 900);
}

#[test]
fn rates_hold_back_and_change() {
    let limited = ShareConfig { max_rate: Some(1_000_000), burst: Some(1000), ..ShareConfig::default() };
    let share = Share::new(limited);
    assert_eq!((share.config(), share.throttled_until(|| MS)), (limited, None));
    assert_eq!(share.limit(Budget::new(5000, 9), || MS).bytes(), 1000);
    share.spend(2000, 0);
    assert!(share.throttled_until(|| MS).is_some());
    assert_eq!(share.limit(Budget::new(5000, 9), || MS).bytes(), 1, "a device that runs makes progress");
    // Limits that have not changed keep their state.
    share.set(ShareConfig { weight: 7, min_rate: Some(5), ..limited });
    assert!(share.throttled_until(|| MS).is_some() && share.scaled(7) == 100);
    share.set(ShareConfig { burst: Some(3000), ..limited });
    assert_eq!(share.limit(Budget::new(5000, 9), || MS).bytes(), 3000);
    share.set(ShareConfig { max_rate: Some(2_000_000), burst: Some(3000), ..limited });
    share.spend(4000, 0);
    share.set(ShareConfig { max_rate: None, ..limited });
    assert_eq!((share.throttled_until(|| MS), share.limit(Budget::new(5000, 9), || MS).bytes()), (None, 5000));
}

#[test]
fn a_promise_is_owed_until_it_is_used() {
    let share = share(100);
    assert!(!share.is_owed(MS));
    share.set(ShareConfig { min_rate: Some(1000), ..ShareConfig::default() });
    assert!(share.is_owed(MS));
    // Requests that move no bytes have a cost.
    share.spend(0, 1 << 30);
    assert!(!share.is_owed(MS));
    share.set(ShareConfig { min_rate: Some(1000), max_rate: Some(1), ..ShareConfig::default() });
    assert!(!share.is_owed(MS), "the same min-rate keeps the account");
    share.set(ShareConfig { min_rate: Some(1001), ..ShareConfig::default() });
    assert!(share.is_owed(MS));
}

#[test]
fn queue_pairs_learn_of_their_limit() {
    let share = share(100);
    assert!((share.qp_rates(), share.qp_limit().is_none()) == (0, true));
    share.set(ShareConfig { qp_max_rate: Some(100_000_000), ..ShareConfig::default() });
    assert_eq!(share.qp_rates(), 1);
    share.set(ShareConfig { qp_max_rate: Some(100_000_000), weight: 1, ..ShareConfig::default() });
    assert_eq!((share.qp_rates(), share.qp_limit().unwrap().available(MS)), (1, 1_000_000));
}

#[test]
fn usage_is_reported() {
    let share = share(100);
    share.add_worker_time(MS);
    share.add_port_time(2 * MS);
    share.count_throttled();
    assert_eq!(share.usage(), ShareUsage { worker_ns: 1_000_000, port_ns: 2_000_000, throttled: 1 });
}
