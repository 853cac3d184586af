//! Daemons with two devices, whose program a test may replace.
#![allow(clippy::allow_attributes, dead_code, unreachable_pub, reason = "each test uses a part")]

use super::daemon::TestDaemon;

/// Devices of the daemons here. Each has a network function, `nic1` and `nic2`.
pub const DEVICES: [&str; 2] = ["a1", "a2"];

/// Returns a daemon with both devices in the network `a`. `keys` are further keys of the devices, each with its comma.
pub fn one_network(keys: &str) -> TestDaemon {
    let daemon = TestDaemon::new().own_program().network("a", "");
    (1..).zip(DEVICES).fold(daemon, |daemon, (number, name)| {
        daemon.device(name, number, &format!("network=a,nic-socket=FOLDER/nic{number},seed={number}{keys}"))
    })
}

/// Returns a daemon with one device in network `a` and the other in `b`, which are connected by their uplinks.
pub fn two_networks() -> TestDaemon {
    let daemon = TestDaemon::new().own_program();
    (1..).zip(DEVICES).zip([("a", "left", "right"), ("b", "right", "left")]).fold(
        daemon,
        |daemon, ((number, name), (network, own, other))| {
            let uplink = format!("uplink=unix-dgram:FOLDER/{own}:FOLDER/{other},mtu=9000");
            let keys = format!("network={network},nic-socket=FOLDER/nic{number},seed={number}");
            daemon.network(network, &uplink).device(name, number, &keys)
        },
    )
}
