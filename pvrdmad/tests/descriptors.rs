//! A client that uses up descriptors. This test runs alone in its process, because it changes the process's limit.

mod common;

use std::fs;
use std::os::fd::AsFd;

use common::{Served, memfd};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const RW: u32 = 3;
const PAGE: u64 = 4096;

/// C6: a client's descriptors leave room for other clients: for accepting a connection, and for another client's
/// memory.
#[test]
fn the_last_descriptors_are_not_for_clients() {
    let (attacked, neighbour) = (Served::new(), Served::new());
    let mut client = attacked.client();
    let file = memfd("memory", 16 * PAGE);
    client.map(0, PAGE, 0, RW, Some(&file)).ok();
    // The limit allows the descriptors that are open now, and the reserve.
    let open = u64::try_from(fs::read_dir("/proc/self/fd").unwrap().count()).unwrap();
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(open + 40), maximum }).unwrap();
    drop(client);
    let mut client = attacked.client();
    assert_eq!(client.map(0, PAGE, 0, RW, Some(&file)).errno(), 24);
    let event = common::eventfd();
    assert_eq!(client.set_irqs(2, 4 | 32, 0, 1, &[event.as_fd()]).errno(), 24);
    assert_eq!(neighbour.client().read(3, 0, 4), [0; 4]);
}
