//! Hand-overs follow each other under traffic: nothing is lost, doubled or reordered, which the traffic checks.

use std::collections::BTreeMap;
use std::fs;
use std::thread;
use std::time::Duration;

use crate::common::place::{DEVICES, one_network};
use crate::common::process::{children, role};
use pvrdma_dev::testing::wait_for;
use pvrdmad::testing::beside_traffic;

/// Time between the end of a hand-over and the beginning of the next one.
const PAUSE: Duration = Duration::from_millis(10);

/// Returns the number of hand-overs.
fn hand_overs() -> usize {
    std::env::var("HAND_OVERS").map_or(200, |count| count.parse().unwrap())
}

/// Returns the number of descriptors of the daemon's processes, by role.
fn descriptors(daemon: u32) -> BTreeMap<String, usize> {
    let count = |pid: &str| fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
    let mut found = BTreeMap::from([("daemon".to_owned(), count(&daemon.to_string()))]);
    for pid in children(daemon) {
        *found.entry(role(&pid)).or_default() += count(&pid);
    }
    found
}

#[test]
fn hand_overs_follow_each_other() {
    let mut host = one_network("").start();
    let mut pair = host.pair(DEVICES);
    let mut times = Vec::new();
    let mut hand_over = || {
        let upgraded = host.run("upgrade");
        let time = upgraded.trim().strip_prefix("network a: upgraded in ").unwrap_or_else(|| panic!("{upgraded}"));
        times.push(time.split(' ').next().unwrap().parse::<f64>().unwrap());
        thread::sleep(PAUSE);
    };
    let mut before = BTreeMap::new();
    beside_traffic(&mut pair, || {
        (0..10).for_each(|_| hand_over());
        before = descriptors(host.id());
        (10..hand_overs()).for_each(|_| hand_over());
    });
    times.sort_by(f64::total_cmp);
    // For people who compare releases.
    println!("{} hand-overs: median {} ms, longest {} ms", times.len(), times[times.len() / 2], times[times.len() - 1]);
    let network = host.network("a");
    assert_eq!((&network["restarts"], &network["lost_vms"]), (&0.into(), &serde_json::json!([])), "{network:#}");
    // The daemon may still be closing the connection of the last command.
    wait_for("no more descriptors than before", || {
        let after = descriptors(host.id());
        after.iter().all(|(role, count)| before.get(role).is_some_and(|most| count <= most)).then_some(())
    });
    drop(pair);
    host.stop();
}
