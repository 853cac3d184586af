//! A process in the sandbox, for `tests/sandbox.rs`: `sandbox-probe WHAT PROFILE MODE`.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::io::Read;
use std::sync::mpsc;

use pvrdma_verbs::threads::{self, ThreadKind};
use pvrdmad::sandbox::{self, Mismatch, Profile, SandboxReport, probe};

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, what, profile, mode] = arguments.as_slice() else { panic!("WHAT PROFILE MODE") };
    let profile = match profile.as_str() {
        "rxe" => Profile::Rxe { addressed: false },
        "addressed" => Profile::Rxe { addressed: true },
        "ibverbs" => Profile::Ibverbs,
        profile => panic!("profile {profile}"),
    };
    let report = match mode.as_str() {
        "on" => Some(sandbox::enter(profile, Mismatch::Refuse)),
        "strict" => Some(sandbox::enter(profile, Mismatch::Kill)),
        "off" => None,
        "landlock" => Some(probe::only_landlock(profile)),
        mode => panic!("mode {mode}"),
    };
    sandbox::confine_main();
    match what.as_str() {
        "attempts" => print(&report, &probe::all(c"/run/pvrdmad/control").unwrap()),
        "files" => print(&report, &probe::reads()),
        "hold" => hold(&report),
        "panic" => in_kinds(|| panic!("a bug")),
        "overstep" => in_kinds(|| drop(std::net::UdpSocket::bind("127.0.0.1:0"))),
        what => panic!("{what}?"),
    }
}

fn print(report: &Option<SandboxReport>, found: &impl serde::Serialize) {
    println!("{}", serde_json::to_string(&(report, found)).unwrap());
}

/// Has a thread of each kind until standard input ends.
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

/// Runs something in threads that come after one another, and says how many ended well.
fn in_kinds(what: fn()) {
    let ends = kinds().map(|kind| threads::spawn(kind, kind.name(), what).unwrap().join());
    println!("{}", ends.filter(Result::is_ok).count());
}

fn kinds() -> impl Iterator<Item = ThreadKind> {
    ThreadKind::ALL.into_iter().filter(|kind| !matches!(kind, ThreadKind::Main | ThreadKind::Launcher))
}
