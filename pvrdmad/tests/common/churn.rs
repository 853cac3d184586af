//! Traffic between two guests whose daemon crashes.
#![allow(clippy::allow_attributes, dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test uses a part")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use pvrdma_dev::testing::{Driver, Path as Route, QpInit, SendWr, access};

/// Posts writes between two guests, without waiting for those that a crash loses, until `stop`.
fn churn([left, right]: [&Driver; 2], stop: &AtomicBool, rounds: &AtomicU64) {
    let mut ends = [(left, 1), (right, 2)].map(|(driver, number)| {
        driver.bind_gid(0, pvrdmad::testing::gid(number)).unwrap();
        let (pd, cq) = (driver.create_pd(None).unwrap(), driver.create_cq(None, 64).unwrap());
        let qp = driver.create_qp(&QpInit::rc(&pd, &cq)).unwrap();
        let (buffer, mr) = driver.registered_buffer(&pd, 100_001, access::ALL).unwrap();
        (qp, cq, buffer, mr)
    });
    let numbers = ends.each_ref().map(|(qp, ..)| qp.qpn);
    for (number, (qp, ..)) in (0..).zip(&mut ends) {
        let to = pvrdmad::testing::gid(2 - number);
        qp.connect(&Route::to(to, numbers[1 - usize::from(number)])).unwrap();
    }
    let [(qp, cq, from, mr), (_, _, to, remote)] = &mut ends;
    let (from, to) = ([from.sge(mr, 0, 100_001)], to.sge(remote, 0, 100_001));
    while !stop.load(Ordering::Acquire) {
        qp.post_send(&[SendWr::write(1, &from, to.addr, remote.rkey)]).unwrap();
        while cq.poll().is_none() {
            if stop.load(Ordering::Acquire) {
                return;
            }
            // A doorbell of its own, so that messages are under way when the worker is killed.
            cq.arm();
        }
        rounds.fetch_add(1, Ordering::Release);
    }
}

/// Runs `meanwhile` beside such traffic.
pub fn beside_churn(drivers: [&Driver; 2], meanwhile: impl FnOnce()) {
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let traffic = scope.spawn(|| churn(drivers, &stop, &rounds));
        while rounds.load(Ordering::Acquire) < 3 && !traffic.is_finished() {
            thread::yield_now();
        }
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(meanwhile));
        stop.store(true, Ordering::Release);
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
    });
}
