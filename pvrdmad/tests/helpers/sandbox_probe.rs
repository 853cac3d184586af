//! A sandboxed process for `tests/sandbox.rs`, called as `sandbox-probe WHAT PROFILE MODE`.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::io::Read;
use std::sync::mpsc;

use clap::ValueEnum;
use pvrdma_base::threads::{self, ThreadKind};
use pvrdmad::sandbox::{self, Mismatch, Profile, SandboxReport, probe};

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, what, profile, mode] = arguments.as_slice() else { panic!("WHAT PROFILE MODE") };
    let profile = Profile::from_str(profile, false).unwrap();
    let mut report = None;
    match mode.as_str() {
        "on" => sandbox::enter(profile, Mismatch::Refuse),
        "strict" => sandbox::enter(profile, Mismatch::Kill),
        "off" => {}
        "landlock" => report = Some(probe::only_landlock(profile)),
        mode => panic!("mode {mode}"),
    }
    sandbox::confine_main();
    let report = report.or_else(sandbox::report);
    match what.as_str() {
        "attempts" => print(&report, &probe::all(c"/run/pvrdmad/control").unwrap()),
        "files" => print(&report, &probe::reads()),
        "hold" => hold(&report),
        "panic" => {
            // Without the usual hook, a panic does not end the process, so that all kinds of threads run.
            threads::set_panic_hook(|_, _| ()).unwrap();
            in_kinds(|| panic!("a bug"));
        }
        "torn" => in_kinds(|| panic!("a bug")),
        "overstep" => in_kinds(|| drop(std::net::UdpSocket::bind("127.0.0.1:0"))),
        what => panic!("{what}?"),
    }
}

fn print(report: &Option<SandboxReport>, found: &impl serde::Serialize) {
    println!("{}", serde_json::to_string(&(report, found)).unwrap());
}

/// Keeps a thread of each kind running until standard input ends.
fn hold(report: &Option<SandboxReport>) {
    let (started, all) = mpsc::channel();
    for kind in kinds() {
        let started = started.clone();
        let hold = move || {
            started.send(()).unwrap();
            loop {
                std::thread::park();
            }
        };
        drop(threads::spawn(kind, kind.name(), hold).unwrap());
    }
    all.iter().take(kinds().count()).for_each(drop);
    print(report, &());
    let _ = std::io::stdin().read(&mut [0]);
}

/// Runs a function on a thread of each kind, one after the other, and prints the number of threads that ended without a
/// panic.
fn in_kinds(what: fn()) {
    let ends = kinds().map(|kind| threads::spawn(kind, kind.name(), what).unwrap().join());
    println!("{}", ends.filter(Result::is_ok).count());
}

fn kinds() -> impl Iterator<Item = ThreadKind> {
    ThreadKind::ALL.into_iter().filter(|kind| !matches!(kind, ThreadKind::Main | ThreadKind::Launcher))
}
