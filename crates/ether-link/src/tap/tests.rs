//! Tests with a real interface, as root.

use std::process::Command;

use pvrdma_base::Snapshot;
use pvrdma_link::RETRY;
use pvrdma_verbs::testing::skipped;

use super::*;

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status().unwrap();
    assert!(status.success(), "ip {arguments}");
}

/// Opens an interface with a unique name, which is deleted with the process.
fn open(purpose: &str) -> Option<(InterfaceName, TapLink)> {
    let name: InterfaceName = format!("t{purpose}{}", std::process::id()).parse().unwrap();
    match TapLink::open(name.clone()) {
        Ok(link) => Some((name, link)),
        Err(error @ (TapError::NotPermitted(_) | TapError::NoTun(_))) => {
            skipped(&error);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Waits for a frame that `wanted` accepts; the host also sends frames by itself.
fn receive(link: &TapLink, wanted: impl Fn(&[u8]) -> bool) -> Vec<u8> {
    loop {
        let mut frames = Frames::default();
        link.receive(&mut frames, 8);
        if let Some(frame) = frames.iter().find(|frame| wanted(frame)) {
            return frame.to_vec();
        }
        let readiness = link.readiness();
        let fd = readiness.readable.expect("attached");
        let mut fds = [rustix::event::PollFd::new(&*fd, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut fds, None).unwrap();
    }
}

#[test]
fn the_host_talks_through_the_interface() {
    let Some((name, link)) = open("a") else { return };
    ip(&format!("address add 192.168.231.1/24 dev {name}"));
    let mut frames = Frames::default();
    frames.push(&[0; 60]);
    assert_eq!((link.send(&frames, 0), link.lost()), (1, 1), "the interface is down");
    ip(&format!("link set {name} up"));
    // A request from the host arrives, and the reply to the test's own request.
    let question = |asked: u8| {
        let arp = [0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 9, 192, 168, 231, asked];
        [&[0xff; 6][..], &[2, 0, 0, 0, 0, 9, 8, 6], &arp[..14], &[192, 168, 231, 2], &[0; 6], &[192, 168, 231, asked]]
            .concat()
    };
    frames.clear();
    frames.push(&question(1));
    assert_eq!((link.send(&frames, 0), link.lost()), (1, 1));
    let answer = receive(&link, |frame| frame.get(12..14) == Some(&[8, 6]) && frame.get(21) == Some(&2));
    assert_eq!(answer.get(28..32), Some(&[192, 168, 231, 1][..]));
}

#[test]
fn an_absent_interface_returns() {
    let Some((name, link)) = open("b") else { return };
    assert!(matches!(TapLink::open(name.clone()), Err(TapError::Busy(_))), "the tap is in use by another descriptor");
    ip(&format!("link delete {name}"));
    let mut frames = Frames::default();
    link.receive(&mut frames, 1);
    let readiness = link.readiness();
    assert!(
        readiness.readable.is_none() && readiness.wait == Some(RETRY),
        "without an interface, only a timer retries"
    );
    frames.push(&[0; 60]);
    assert_eq!((link.send(&frames, 0), link.lost()), (1, 1));
    frames.clear();
    link.receive(&mut frames, 1);
    assert!(link.readiness().readable.is_some());
    ip(&format!("link set {name} up"));
}

#[test]
fn an_interface_that_is_no_tap_is_refused() {
    match TapLink::open("lo".parse().unwrap()) {
        Err(TapError::Other { name, .. }) => assert_eq!(name.as_str(), "lo"),
        Err(error @ (TapError::NotPermitted(_) | TapError::NoTun(_))) => skipped(&error),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_device_that_was_handed_over_has_no_successor() {
    let Some((name, link)) = open("c") else { return };
    let device = link.device().unwrap().try_clone().unwrap();
    drop(link);
    let link = TapLink::from_device(name.clone(), device, Arc::new(pvrdma_link::NoConnector));
    ip(&format!("link set {name} up"));
    let mut frames = Frames::default();
    frames.push(&[0; 60]);
    assert_eq!((link.send(&frames, 0), link.lost()), (1, 0));
    ip(&format!("link delete {name}"));
    for _ in 0..2 {
        link.receive(&mut frames, 8);
        assert_eq!(link.inspect().up, Snapshot::Taken(false));
    }
}
