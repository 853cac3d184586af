//! Output of the program: errors at the command line, and the log.

use std::fs::{self, File};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::daemon::{PROGRAM, Running, TestDaemon, describe};
use rustix::process::Signal;

/// Returns the program as a command, without the environment variables that name folders.
fn program() -> Command {
    let mut command = Command::new(PROGRAM);
    command.env_remove("XDG_RUNTIME_DIR").env_remove("RUNTIME_DIRECTORY").env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// Runs the program to its end. Returns its exit status and standard error, after a check that no cause is printed
/// twice.
#[track_caller]
fn run(arguments: &[&str]) -> (Option<i32>, String) {
    let output = program().args(arguments).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    for part in ["os error", "TOML parse error", "No such file"] {
        assert!(said.matches(part).count() <= 1, "said twice: {said}");
    }
    (output.status.code(), said)
}

/// Describes a daemon with the device `vm0`, whose log is read.
fn described() -> TestDaemon {
    TestDaemon::new().device("vm0", 1, "").read_log()
}

#[test]
fn mistakes_in_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let device = "[[device]]\nname = \"a\"\nmac = \"52:54:00:00:00:01\"\n";
    for (text, words) in [
        (
            format!("{device}sock = \"/a\"\n"),
            &["line 4, column 1", "unknown field `sock`", "did you mean `socket`?"][..],
        ),
        (device.replace("[[device]]", "[device]"), &["line 1", "[[device]], with double brackets"]),
        (device.replace("\"a\"", "7"), &["line 2"]),
        (format!("{device}version = \"x\"\n"), &["line 4, column 11"]),
        (format!("{device}mtu = 9000\n"), &["`mtu` is a key of a network", "line 4, column 1"]),
        ("[[device]\n".to_owned(), &["line 1"]),
        (device.to_owned(), &["device a: needs a socket"]),
        (format!("{device}socket = \"/a\"\nmac = 1\n"), &["duplicate key"]),
    ] {
        let file = folder.path().join("pvrdmad.toml");
        fs::write(&file, &text).unwrap();
        let (status, said) = run(&["--config", file.to_str().unwrap()]);
        for word in words {
            assert!(said.contains(word), "{text}: {said}");
        }
        assert_eq!((status, said.matches(words[0]).count()), (Some(2), 1), "{said}");
    }
}

#[test]
fn sockets_that_cannot_be_made() {
    let folder = tempfile::tempdir().unwrap();
    let device = |name: &str| describe(folder.path(), name, 1, "");
    let (status, said) = run(&["--device", &device("a").replace("/a,", &format!("/{},", "x".repeat(107)))]);
    assert!(said.contains("too long for a socket") && said.contains("at most 107"), "{said}");
    assert_eq!(status, Some(1));
    let (status, said) = run(&["--device", &device("a"), "--control", "/nonexistent/control"]);
    assert!(said.contains("control socket: /nonexistent/control: the directory /nonexistent"), "{said}");
    assert_eq!(status, Some(1));
}

#[test]
fn a_command_without_a_daemon_names_the_socket() {
    let (status, said) = run(&["status"]);
    assert!(said.contains("no control socket at /run/pvrdmad/control: give --control PATH"), "{said}");
    assert_eq!(status, Some(1));
}

#[test]
fn signals() {
    for end in [Signal::TERM, Signal::INT] {
        let mut running = described().start();
        let line = running.wait_log("backend rxe");
        assert!(line.contains(env!("CARGO_PKG_VERSION")) && line.contains("devices vm0"), "{line}");
        running.signal(Signal::USR1);
        running.signal(Signal::USR2);
        running.signal(Signal::HUP);
        let line = running.wait_log("SIGHUP");
        assert!(line.contains("nothing has changed"), "{line}");
        running.run("status");
        running.signal(end);
        assert_eq!(running.exit(), Some(0));
        assert!(!running.path("vm0").exists() && !running.path("control").exists());
    }
}

/// A second signal means impatience: the daemon may then end by either signal, and the files that it leaves behind do
/// not prevent the next start.
#[test]
fn a_second_signal() {
    let mut running = described().start();
    for start in [false, true] {
        if start {
            running.again();
        }
        running.signal(Signal::TERM);
        running.signal(Signal::TERM);
        let status = running.exit();
        assert!(matches!(status, Some(0 | 1)), "{status:?}");
    }
}

/// A daemon that cannot print its ready line serves nevertheless.
#[test]
fn a_daemon_that_cannot_print_its_ready_line_serves() {
    let full: fn() -> Stdio = || File::options().write(true).open("/dev/full").unwrap().into();
    let closed: fn() -> Stdio = || std::io::pipe().unwrap().1.into();
    for silent in [full, closed] {
        let mut running = described().stdout(silent).start();
        running.wait_log("backend rxe");
        running.run("status");
    }
}

#[test]
fn links_come_and_go() {
    let folder = tempfile::tempdir().unwrap();
    let uplink = folder.path().join("uplink");
    let other = UnixListener::bind(&uplink).unwrap();
    let daemon = TestDaemon::new().read_log().network("default", &format!("uplink=unix-connect:{}", uplink.display()));
    let mut running = daemon.device("vm0", 1, "nic=unix:FOLDER/nic").start();
    let nic = running.path("nic");
    let waits = |running: &Running, link: &Path| {
        running.run("status").contains(&format!("{}: no peer is connected", link.display()))
    };
    // The status reports listening links without waiting for the thread that is working at the link.
    while !waits(&running, &nic) {}
    let line = running.wait_log("unix-connect:");
    assert!(line.contains(&format!("link unix-connect:{}: connected", uplink.display())), "{line}");
    let card = UnixStream::connect(&nic).unwrap();
    let line = running.wait_log("link unix:");
    assert!(line.contains(&format!("link unix:{}: connected", nic.display())), "{line}");
    assert!(!waits(&running, &uplink) && !waits(&running, &nic));
    drop(card);
    let line = running.wait_log("link unix:");
    assert!(line.contains("disconnected"), "{line}");
    while !waits(&running, &nic) {}
    assert!(!waits(&running, &uplink));
    drop(other);
}

#[test]
fn removed_sockets_are_reported() {
    let daemon = TestDaemon::new().network("default", "uplink=unix:FOLDER/uplink");
    let running = daemon.device("vm0", 1, "nic-socket=FOLDER/nic").start();
    let removed = || {
        let said = running.run("status");
        let lost = said.lines().filter_map(|line| line.split_once(": the file of this socket was removed: "));
        lost.map(|(path, _)| path.to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(removed(), Vec::<String>::new());
    let paths = ["vm0", "nic", "uplink"].map(|name| running.path(name).display().to_string());
    for path in &paths {
        fs::remove_file(path).unwrap();
    }
    assert_eq!(removed(), paths);
    // The existing socket belongs to another process.
    let other = UnixListener::bind(&paths[0]).unwrap();
    assert_eq!(removed(), paths);
    drop(running);
    drop(other);
}

#[test]
fn a_level_that_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let device = describe(folder.path(), "vm0", 1, "");
    let check = |words: &str| {
        let mut command = program();
        let output = command.args(["check", "--device", &device]).env("RUST_LOG", words).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let said = check("bogus");
    assert!(said.contains("RUST_LOG: 'bogus' is no level (off, error, warn, info, debug, trace)"), "{said}");
    for words in ["", "off", "error,pvrdma_rxe=debug"] {
        assert_eq!(check(words), "", "{words}");
    }
}

#[test]
fn the_control_socket_has_a_default() {
    for (variable, other) in [("XDG_RUNTIME_DIR", "RUNTIME_DIRECTORY"), ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR")] {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().to_str().unwrap();
        let ask = || program().arg("status").env(variable, place).output().unwrap().status.code();
        assert_eq!(ask(), Some(1));
        let there = || TestDaemon::new().without_control().without(other).env(variable, place).read_log();
        let running = there().device("vm0", 1, "").start();
        assert_eq!(ask(), Some(0));
        // The control socket was not requested explicitly, so a second daemon starts without one.
        let mut second = there().device("vm1", 2, "").start();
        let line = second.wait_log("no control socket");
        assert!(line.contains(&format!("another process (PID {}) is listening", running.id())), "{line}");
        drop(second);
        assert_eq!(ask(), Some(0));
        drop(running);
    }
}

/// Sockets and clients need descriptors for each device, more than the soft limit allows.
#[test]
fn many_devices_with_few_descriptors() {
    // The soft limit is low, and the daemon raises it.
    let daemon = TestDaemon::new().through(&["sh", "-c", "ulimit -Sn 32; exec \"$0\" \"$@\""]);
    let running = (0..40).fold(daemon, |daemon, number| daemon.device(&format!("vm{number}"), number, "")).start();
    assert!(running.run("status --json").contains("vm39"));
}
