//! Errors about mistakes at the command line: they name the problem, its place and the remedy.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

use crate::common::daemon::{PROGRAM, TestDaemon};
use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};
use serde_json::Value;

/// Runs the program with these arguments. Returns its exit status and standard error.
fn said(arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(PROGRAM).args(arguments).env("RUST_LOG", "off").stdin(Stdio::null()).output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

/// Checks the exit status, and that the error contains each of these texts once.
#[track_caller]
fn assert_said(arguments: &[&str], status: i32, texts: &[&str]) {
    let (code, text) = said(arguments);
    assert_eq!(code, Some(status), "{arguments:?}: {text}");
    for wanted in texts {
        assert_eq!(text.matches(wanted).count(), 1, "{arguments:?}: '{wanted}' in {text}");
    }
}

const MAC: &str = "mac=52:54:00:00:00:01";

#[test]
fn words_that_are_wrong() {
    assert_said(&[], 2, &["no device: give --device name=NAME", "try: pvrdmad --help"]);
    assert_said(&["--devic", "x"], 2, &["'--device'"]);
    assert_said(&["stauts"], 2, &["'status'"]);
    assert_said(&["--frob"], 2, &["unexpected argument '--frob'"]);
    for (keys, text) in [
        ("sock=/x", "did you mean 'socket'?"),
        ("uplink=tap:t", "'uplink' is a key of a network: write --network name=NAME,uplink=tap:t and, at the device"),
        ("speed=9", "unknown key 'speed'"),
        ("mac=52:54:00:00:00:1", "'52:54:00:00:00:1' is not a MAC address (six hexadecimal bytes with colons)"),
        ("mac=xx", "'xx' is not a MAC address (six hexadecimal bytes with colons)"),
        ("mac=00:00:00:00:00:00", "'00:00:00:00:00:00' is no address of a device"),
        ("intx=maybe", "'maybe' is neither on nor off"),
        ("roce=v3", "'v3' is not one of v1, v2"),
    ] {
        assert_said(&["check", "--device", &format!("name=a,{keys}")], 2, &[text]);
    }
    assert_said(&["--backend", "ibverbs,device=a,polls=1"], 2, &["did you mean 'poll'?"]);
    for keys in ["mac=52-54-00-00-00-01", "mac=52:54:00:00:00:01,intx=on", "mac=52:54:00:00:00:01,intx=off"] {
        let (code, text) = said(&["check", "--device", &format!("name=a,socket=/nodir/a,{keys}")]);
        assert_eq!(code, Some(1), "{keys} is right, the folder is not: {text}");
    }
    let version = format!("name=a,socket=/nodir/a,{MAC},version=21");
    assert_said(&["--device", &version], 2, &["device a: version 21 is not one of 17 to 20"]);
    assert_said(&["capture", "--control", "/c", "--device", "a", "-w", "x", "--seconds", "0"], 2, &["1.."]);
}

/// Runs `check --json`. Returns its exit status, and severity, subject, key, message and remedy of each finding.
fn findings(arguments: &[&str]) -> (Option<i32>, Vec<[String; 5]>) {
    let mut command = Command::new(PROGRAM);
    let output = command.args(["check", "--json"]).args(arguments).env("RUST_LOG", "off").output().unwrap();
    let object: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(object.as_object().unwrap().keys().collect::<Vec<_>>(), ["findings"]);
    let members = ["severity", "subject", "key", "message", "remedy"];
    let texts = |finding: &Value| {
        assert_eq!(finding.as_object().unwrap().len(), members.len(), "{finding}");
        members.map(|member| match &finding[member] {
            Value::Null => "-".to_owned(),
            text => text.as_str().unwrap().to_owned(),
        })
    };
    (output.status.code(), object["findings"].as_array().unwrap().iter().map(texts).collect())
}

/// `check --json` prints one object, and ends with the same status as without.
#[test]
fn findings_as_json() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().display();
    let device = |keys: &str| format!("name=a,socket={path}/{keys},{MAC}");
    assert_eq!(findings(&["--device", &device("a")]), (Some(0), Vec::new()));
    let begins = |found: &[String; 5], begin: &[&str]| begin.iter().zip(found).all(|(a, b)| b.starts_with(a));

    let network = ["--network", "name=default,uplink=af_packet:nope0"];
    let others = ["--device", &device("no/a"), "--control", &format!("{path}/no/c")];
    let (code, found) = findings(&[&network[..], &others].concat());
    assert_eq!(code, Some(1));
    for (found, begin) in found.iter().zip([
        ["error", "daemon", "control", &format!("{path}/no/c: the directory"), "create the directory"],
        ["error", "network default", "uplink", "there is no interface nope0 on this host", "use an interface"],
        ["error", "device a", "socket", &format!("{path}/no/a: the directory"), "create the directory"],
        ["warning", "device a", "address", "own on a network with an uplink", "list its addresses"],
    ]) {
        assert!(begins(found, &begin), "{begin:?}: {found:?}");
    }
    assert_eq!(found.len(), 4, "{found:?}");

    let (code, found) = findings(&["--device", &device("a,version=21")]);
    assert_eq!(code, Some(2));
    assert!(begins(&found[0], &["error", "device a", "-", "version 21 is not one of", "-"]), "{found:?}");
    let (code, found) = findings(&["--config", "/nodir/file.toml"]);
    assert_eq!(code, Some(2));
    assert!(begins(&found[0], &["error", "configuration file", "-", "/nodir/file.toml: No such"]), "{found:?}");

    // Findings about VMs are in the same object.
    let (code, found) = findings(&["--device", &device("a"), "--vms", "--qemu", "/nodir/qemu"]);
    assert_eq!(code, Some(1));
    assert!(found.iter().any(|found| begins(found, &["error", "QEMU", "-", "there is none"])), "{found:?}");
}

#[test]
fn places_that_are_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let device = |socket: &str, more: &str| format!("name=a,socket={socket},{MAC}{more}");
    let plain = path("plain");
    fs::write(&plain, "kept").unwrap();
    let missing = format!("{}/no/a.sock", folder.path().display());
    let no_folder = format!("{missing}: the directory {} does not exist", path("no"));
    assert_said(&["--device", &device(&missing, "")], 1, &[&no_folder]);
    assert_said(&["--device", &device(&plain, "")], 1, &["exists and is not a socket"]);
    let folder_itself = folder.path().display().to_string();
    assert_said(&["--device", &device(&folder_itself, "")], 1, &["exists and is not a socket"]);
    let a = path("a");
    let on_uplink = |uplink: &str, said: &str| {
        let network = format!("name=default,uplink={uplink}");
        assert_said(&["--network", &network, "--device", &device(&a, "")], 1, &[said]);
    };
    on_uplink("vxlan:192.0.2.1,remote=192.0.2.2", "192.0.2.1 is not an address of this host");
    // Without the privilege for raw sockets, the daemon reports that before it looks for the interface.
    let problem =
        if rustix::process::geteuid().is_root() { "no such interface" } else { "raw frames need CAP_NET_RAW" };
    on_uplink("af_packet:nope0", &format!("nope0: {problem}"));
    assert_said(&["--control", &a, "--device", &device(&a, "")], 2, &["is also the control socket"]);
    let other = format!("name=b,socket={},{MAC}", path("b"));
    let same = "device b: device a of the same network has the same MAC address 52:54:00:00:00:01";
    assert_said(&["--device", &device(&a, ""), "--device", &other], 2, &[same]);
    let control = path("control");
    assert_said(&["status", "--control", &control], 1, &["no daemon answers there (is it running, with --control?)"]);
    assert_eq!(fs::read_to_string(Path::new(&plain)).unwrap(), "kept");
}

#[test]
fn files_that_are_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c.toml").display().to_string();
    assert_said(&["--config", &path], 2, &[&path, "No such file or directory"]);
    // A folder cannot be read as a file, even by root.
    let unreadable = folder.path().display().to_string();
    assert_said(&["--config", &unreadable], 2, &[&unreadable, "Is a directory"]);
    for (text, wanted) in [
        ("[[device]]\nname = \"a\"\nmac = \"52:54:00:00:00:01\"\n", "line 1: device a: "),
        ("[[device]]\nname = \"a\"\n[device.limits]\nmax_qp = 0\n", "max_qp must be 3..=65535"),
    ] {
        fs::write(&path, text).unwrap();
        let (code, said) = said(&["--config", &path]);
        assert_eq!(code, Some(2), "{text}: {said}");
        assert!(said.contains(wanted), "{text}: '{wanted}' in {said}");
        assert_eq!(said.matches("TOML parse error").count().saturating_sub(1), 0, "once: {said}");
    }
}

/// The error names the missing capability, or a configuration that works without it.
#[test]
fn links_without_rights() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("a").display().to_string();
    let said = move |link: &str| {
        // Programs that this thread starts do not get these capabilities. An unprivileged user has none in any case.
        for capability in [CapabilitySet::NET_RAW, CapabilitySet::NET_ADMIN] {
            let _ = remove_capability_from_bounding_set(capability);
        }
        let network = format!("name=default,uplink={link}");
        said(&["--network", &network, "--device", &format!("name=a,socket={socket},{MAC}")])
    };
    let tun = OpenOptions::new().read(true).write(true).open("/dev/net/tun").is_ok();
    let interface = thread::spawn({
        let said = said.clone();
        move || said("af_packet:lo")
    });
    let (code, text) = interface.join().unwrap();
    assert_eq!((code, text.matches("lo: raw frames need CAP_NET_RAW").count()), (Some(1), 1), "{text}");
    // A machine without TAP devices reports that instead.
    let (code, text) = thread::spawn(move || said("tap:nope0")).join().unwrap();
    assert_eq!(code, Some(1), "{text}");
    assert!(!tun || text.contains("make it for this user with 'ip tuntap add dev nope0 mode tap"), "{text}");
}

#[test]
fn a_configuration_on_standard_input() {
    let folder = tempfile::tempdir().unwrap();
    let text = |name: &str| {
        format!("[[device]]\nname = \"{name}\"\nsocket = {:?}\nmac = \"52:54:00:00:00:01\"\n", folder.path().join(name))
    };
    let read = |command: &str, text: &str| {
        let mut program = Command::new(PROGRAM);
        program.args(command.split_whitespace()).args(["--config", "-"]).env("RUST_LOG", "off");
        let mut child = program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // The program may exit before it has read everything.
        let _ = child.stdin.take().unwrap().write_all(text.as_bytes());
        child.wait_with_output().unwrap()
    };
    let checked = read("check", &text("vm0"));
    assert!(checked.status.success() && String::from_utf8_lossy(&checked.stdout).contains("vm0"), "{checked:?}");
    for (text, wanted) in [("[[device\n", "-: TOML parse error at line 1"), ("", "no device")] {
        let wrong = read("check", text);
        let said = String::from_utf8_lossy(&wrong.stderr).into_owned();
        assert_eq!((wrong.status.code(), said.contains(wanted)), (Some(2), true), "{said}");
    }
    let huge = read("check", &"# more than anybody writes\n".repeat(700_000));
    assert!(String::from_utf8_lossy(&huge.stderr).contains("file too large"), "{huge:?}");
}

/// Errors about unknown devices and limits list the existing ones.
#[test]
fn names_that_are_wrong() {
    let daemon = TestDaemon::new().device("vm0", 1, "").start();
    let path = |name: &str| daemon.path(name).display().to_string();
    let control = path("control");
    let there_are = "there is no device 'vm9' (the devices are vm0)";
    let capture = path("capture");
    for words in [
        &["capture", "--device", "vm9", "-w", &capture][..],
        &["show", "qp", "--device", "vm9"],
        &["remove", "--device", "vm9"],
        &["link", "down", "--device", "vm9"],
        &["share", "--device", "vm9"],
        &["limits", "--device", "vm9"],
    ] {
        assert_said(&[words, &["--control", &control]].concat(), 1, &[there_are]);
    }
    assert_said(&["fault", "--network", "red", "off", "--control", &control], 1, &["(the networks are default)"]);
    let nowhere = path("no/capture");
    assert_said(
        &["capture", "--device", "vm0", "-w", &nowhere, "--control", &control],
        1,
        &[&nowhere, "No such file or directory"],
    );
    let device_socket = path("vm0");
    assert_said(&["status", "--control", &device_socket], 1, &["this is the socket of a device, for its VMM"]);
    assert_said(&["log-level", "loud"], 2, &["'loud' is not one of off, error, warn, info, debug, trace"]);
    for value in ["0", "99999999"] {
        let limit = format!("max_qp={value}");
        assert_said(&["limits", "--device", "vm0", &limit], 2, &["max_qp must be 3..=65535"]);
    }
}
