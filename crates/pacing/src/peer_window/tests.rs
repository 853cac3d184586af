use std::sync::atomic::AtomicBool;
use std::thread;

use super::*;

struct Nothing;

impl Runner for Nothing {
    fn schedule(self: &Arc<Self>) {}
}

/// Creates a connection to the only peer.
fn share(windows: &PeerWindows<Nothing>, domain: u64) -> WindowShare<Nothing> {
    WindowShare::new(windows, Gid::default(), &Arc::new(Nothing), domain)
}

const SOON: Option<Duration> = Some(Duration::from_secs(1));

/// A connection that is dropped while it waits does not keep a turn.
#[test]
fn a_connection_that_leaves_while_it_waits_gives_everything_back() {
    let windows = PeerWindows::default();
    let window = windows.window(Gid::default());
    let mut full = share(&windows, 1);
    full.sent(1024);
    for in_flight in [0, 1] {
        let mut other = share(&windows, 2);
        let mut short = share(&windows, 2);
        // The reserved turn of the domain is in use.
        assert!(other.may_send(Duration::ZERO, || SOON));
        other.sent(5);
        short.sent(in_flight);
        short.pause(in_flight);
        assert!(!short.may_send(Duration::ZERO, || SOON) && window.in_flight.is_awaited());
        drop(other);
        drop(short);
        assert_eq!((window.in_flight.get(), window.in_flight.is_awaited()), (1024, false));
    }
}

/// No part of the window is lost, whatever connections do while others are granted their turns.
#[test]
fn a_turn_that_comes_while_somebody_asks_or_leaves_is_given_back() {
    let windows = PeerWindows::default();
    let window = windows.window(Gid::default());
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut full = share(&windows, 1);
            while !over.load(Ordering::Relaxed) {
                full.sent(1024);
                full.acked(0);
            }
        });
        for _ in 0..20_000 {
            let mut short = share(&windows, 2);
            // A connection with packets in flight does not get the reserved turn.
            short.sent(1);
            for _ in 0..10 {
                if short.may_send(Duration::ZERO, || SOON) {
                    short.pause(1);
                }
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    assert_eq!(window.in_flight.get(), 0);
}
