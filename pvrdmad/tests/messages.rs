//! Output of the program: errors at the command line, and the log.

use std::fs;
use std::io::{BufRead, BufReader, Lines};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{ChildStderr, Command, Stdio};

use crate::common::process::Daemon;
use rustix::process::Signal;
use tempfile::TempDir;

/// Returns the program as a command, without the environment variables that name folders.
fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pvrdmad"));
    command.env_remove("XDG_RUNTIME_DIR").env_remove("RUNTIME_DIRECTORY").env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// Runs the program to its end. Returns its exit status and standard output.
fn ask(arguments: &[&str]) -> (Option<i32>, String) {
    let output = program().args(arguments).output().unwrap();
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
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

struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// Returns the description of a device.
    fn device(&self, name: &str, number: u8) -> String {
        format!("name={name},socket={},mac=52:54:00:00:00:0{number},pin=off", self.text(&format!("{name}.sock")))
    }

    /// Writes a configuration file.
    fn file(&self, text: &str) -> String {
        fs::write(self.path("pvrdmad.toml"), text).unwrap();
        self.text("pvrdmad.toml")
    }
}

/// A daemon that is ready, and its log.
struct Running {
    daemon: Daemon,
    log: Lines<BufReader<ChildStderr>>,
}

impl Running {
    fn start(command: &mut Command) -> Self {
        let mut daemon = Daemon::start(command.stderr(Stdio::piped()));
        let log = BufReader::new(daemon.errors()).lines();
        Self { daemon, log }
    }

    /// Returns the next line of the log that contains this word.
    fn log(&mut self, word: &str) -> String {
        self.log.by_ref().map(Result::unwrap).find(|line| line.contains(word)).unwrap()
    }
}

#[test]
fn mistakes_in_the_file() {
    let place = Place::new();
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
        let file = place.file(&text);
        let (status, said) = run(&["--config", &file]);
        for word in words {
            assert!(said.contains(word), "{text}: {said}");
        }
        assert_eq!((status, said.matches(words[0]).count()), (Some(2), 1), "{said}");
    }
}

#[test]
fn sockets_that_cannot_be_made() {
    let place = Place::new();
    let device = |socket: &str| format!("name=a,socket={socket},mac=52:54:00:00:00:01");
    let (status, said) = run(&["--device", &device(&place.text(&"x".repeat(107)))]);
    assert!(said.contains("too long for a socket") && said.contains("at most 107"), "{said}");
    assert_eq!(status, Some(1));
    let (status, said) = run(&["--device", &place.device("a", 1), "--control", "/nonexistent/control"]);
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
    let place = Place::new();
    let device = place.device("vm0", 1);
    for end in [Signal::TERM, Signal::INT] {
        let mut running = Running::start(program().args(["--device", &device, "--control", &place.text("control")]));
        let line = running.log("backend rxe");
        assert!(line.contains(env!("CARGO_PKG_VERSION")) && line.contains("devices vm0"), "{line}");
        running.daemon.signal(Signal::USR1);
        running.daemon.signal(Signal::USR2);
        running.daemon.signal(Signal::HUP);
        let line = running.log("SIGHUP");
        assert!(line.contains("nothing has changed"), "{line}");
        assert_eq!(run(&["status", "--control", &place.text("control")]).0, Some(0));
        running.daemon.signal(end);
        assert_eq!(running.daemon.wait(), Some(0));
        assert!(!place.path("vm0.sock").exists() && !place.path("control").exists());
    }
}

/// A second signal means impatience: the daemon may then end by either signal, and the files that it leaves behind do
/// not prevent the next start.
#[test]
fn a_second_signal() {
    let place = Place::new();
    let device = place.device("vm0", 1);
    for _ in 0..2 {
        let mut running = Running::start(program().args(["--device", &device, "--control", &place.text("control")]));
        running.daemon.signal(Signal::TERM);
        running.daemon.signal(Signal::TERM);
        let status = running.daemon.wait();
        assert!(matches!(status, Some(0 | 1)), "{status:?}");
    }
}

/// A daemon that cannot print its ready line serves nevertheless.
#[test]
fn a_daemon_that_cannot_print_its_ready_line_serves() {
    let full = || Stdio::from(fs::File::options().write(true).open("/dev/full").unwrap());
    let closed = || Stdio::from(std::io::pipe().unwrap().1);
    for silent in [full, closed] as [fn() -> Stdio; 2] {
        let place = Place::new();
        let (device, control) = (place.device("vm0", 1), place.text("control"));
        let mut command = program();
        command.args(["--device", &device, "--control", &control]).stdout(silent()).stderr(Stdio::piped());
        let mut daemon = Daemon::spawn(&mut command);
        let log = BufReader::new(daemon.errors()).lines();
        assert!(log.map_while(Result::ok).any(|line| line.contains("backend rxe")));
        assert_eq!(run(&["status", "--control", &control]).0, Some(0));
    }
}

#[test]
fn links_come_and_go() {
    let place = Place::new();
    let (nic, uplink) = (place.path("nic"), place.path("uplink"));
    let other = UnixListener::bind(&uplink).unwrap();
    let device = place.device("vm0", 1);
    let device = format!("{device},nic=unix:{}", nic.display());
    let network = format!("--network=name=default,uplink=unix-connect:{}", uplink.display());
    let control = place.text("control");
    let mut running = Running::start(program().args([&network, "--device", &device, "--control", &control]));
    let waits = |link: &Path| {
        let (status, said) = ask(&["status", "--control", &control]);
        assert_eq!(status, Some(0), "{said}");
        said.contains(&format!("{}: no peer is connected", link.display()))
    };
    // The status reports listening links without waiting for the thread that is working at the link.
    while !waits(&nic) {}
    let line = running.log("unix-connect:");
    assert!(line.contains(&format!("link unix-connect:{}: connected", uplink.display())), "{line}");
    let card = UnixStream::connect(&nic).unwrap();
    let line = running.log("link unix:");
    assert!(line.contains(&format!("link unix:{}: connected", nic.display())), "{line}");
    assert!(!waits(&uplink) && !waits(&nic));
    drop(card);
    let line = running.log("link unix:");
    assert!(line.contains("disconnected"), "{line}");
    while !waits(&nic) {}
    assert!(!waits(&uplink));
    drop(other);
}

#[test]
fn removed_sockets_are_reported() {
    let place = Place::new();
    let control = place.text("control");
    let device = format!("{},nic-socket={}", place.device("vm0", 1), place.text("nic-socket"));
    let network = format!("--network=name=default,uplink=unix:{}", place.text("uplink"));
    let running = Running::start(program().args([&network, "--device", &device, "--control", &control]));
    let removed = || {
        let (status, said) = ask(&["status", "--control", &control]);
        assert_eq!(status, Some(0), "{said}");
        let lost = said.lines().filter_map(|line| line.split_once(": the file of this socket was removed: "));
        lost.map(|(path, _)| path.to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(removed(), Vec::<String>::new());
    let paths = ["vm0.sock", "nic-socket", "uplink"].map(|name| place.text(name));
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
    let place = Place::new();
    let device = place.device("vm0", 1);
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
    for variable in ["XDG_RUNTIME_DIR", "RUNTIME_DIRECTORY"] {
        let place = Place::new();
        let ask = || program().arg("status").env(variable, place.0.path()).output().unwrap().status.code();
        assert_eq!(ask(), Some(1));
        let mut first = program();
        let running = Running::start(first.args(["--device", &place.device("vm0", 1)]).env(variable, place.0.path()));
        assert_eq!(ask(), Some(0));
        // The control socket was not requested explicitly, so a second daemon starts without one.
        let mut second = program();
        let mut other =
            Running::start(second.args(["--device", &place.device("vm1", 2)]).env(variable, place.0.path()));
        let line = other.log("no control socket");
        assert!(line.contains(&format!("another process (PID {}) is listening", running.daemon.id())), "{line}");
        drop(other);
        assert_eq!(ask(), Some(0));
        drop(running);
    }
}

/// Sockets and clients need descriptors for each device, more than the soft limit allows.
#[test]
fn many_devices_with_few_descriptors() {
    let place = Place::new();
    let mut command = program();
    command.args(["--control", &place.text("control")]);
    for number in 0..40 {
        command
            .args(["--device", &place.device(&format!("vm{number}"), 0).replace("00:00", &format!("00:{number:02x}"))]);
    }
    // The soft limit is low, and the daemon raises it.
    let words: Vec<_> = command.get_args().map(|word| word.to_str().unwrap()).collect();
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -Sn 32; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_pvrdmad")]).args(words);
    let _running = Running::start(shell.env_remove("RUST_LOG"));
    let (status, said) = ask(&["status", "--json", "--control", &place.text("control")]);
    assert_eq!(status, Some(0));
    assert!(said.contains("vm39"), "{said}");
}
