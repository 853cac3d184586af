//! What is said about the mistakes that people make at the command line: what is wrong, where, and what would be right.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// Runs the program with these words. Gives its status and what it said on standard error.
fn said(arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_pvrdmad"))
        .args(arguments)
        .env("RUST_LOG", "off")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

/// Checks the status and that each of these texts is said, once.
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
    for (keys, text) in [
        ("sock=/x", "did you mean 'socket'?"),
        ("mac=xx", "'xx' is not a MAC address (six hexadecimal bytes with colons)"),
        ("mac=00:00:00:00:00:00", "'00:00:00:00:00:00' is no address of a device"),
        ("intx=maybe", "'maybe' is neither on nor off"),
        ("roce=v3", "'v3' is not one of v1, v2"),
    ] {
        assert_said(&["check", "--device", &format!("name=a,{keys}")], 2, &[text]);
    }
    for keys in ["mac=52-54-00-00-00-01", "mac=52:54:00:00:00:01,intx=on", "mac=52:54:00:00:00:01,intx=off"] {
        let (code, text) = said(&["check", "--device", &format!("name=a,socket=/nodir/a,{keys}")]);
        assert_eq!(code, Some(1), "{keys} is right, the folder is not: {text}");
    }
    let version = format!("name=a,socket=/nodir/a,{MAC},version=21");
    assert_said(&["--device", &version], 2, &["device a: version 21 is not one of 17 to 20"]);
    assert_said(&["capture", "--control", "/c", "--device", "a", "-w", "x", "--seconds", "0"], 2, &["1.."]);
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
    assert_said(&["--device", &device(&path(&"x".repeat(120)), "")], 1, &["too long for a socket", "107"]);
    let (a, vxlan) = (path("a"), ",uplink=vxlan:192.0.2.1,remote=192.0.2.2");
    assert_said(&["--device", &device(&a, vxlan)], 1, &["192.0.2.1 is not an address of this host"]);
    assert_said(&["--device", &device(&a, ",uplink=af_packet:nope0")], 1, &["nope0: no such interface"]);
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
    for (text, wanted) in [
        ("[device]\nname = \"a\"\n", "[[device]]"),
        ("[[device]]\nname = \"a\"\nspeed = 1\n", "line 3, column 1"),
        ("[[device]]\nname = 7\n", "line 2"),
        ("[[device\n", "line 1"),
        ("[[device]]\nname = \"a\"\nmac = \"52:54:00:00:00:01\"\n", "device a: "),
    ] {
        fs::write(&path, text).unwrap();
        let (code, said) = said(&["--config", &path]);
        assert_eq!(code, Some(2), "{text}: {said}");
        assert!(said.contains(wanted), "{text}: '{wanted}' in {said}");
        assert_eq!(said.matches("TOML parse error").count().saturating_sub(1), 0, "once: {said}");
    }
}
