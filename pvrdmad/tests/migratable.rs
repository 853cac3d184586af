//! `show migratable` lists the obstacles to a move of a device, and `show saved` prints a saved state.

use std::process::Stdio;

use crate::common::daemon::PROGRAM;
use crate::common::place::{DEVICES, one_network};

#[test]
fn a_connection_that_needs_an_uplink_is_shown() {
    let mut place = one_network("").start();
    let shown = |json: &str| place.run(&format!("show migratable --device a1 {json}"));
    assert_eq!(shown(""), "nothing keeps the device from moving\n");
    assert_eq!(shown("--json"), "[]\n");
    let mut pair = place.pair(DEVICES);
    pair.exchange();
    let text = shown("");
    assert!(text.contains("is connected to device a2 of this network, which has no uplink"), "{text}");
    drop(pair);
    place.stop();
}

/// The command needs no daemon, and refuses options that belong to another object.
#[test]
fn a_saved_state_is_shown_without_a_daemon() {
    let state = concat!(env!("CARGO_MANIFEST_DIR"), "/../pvrdma-dev/tests/data/saved/armed-queue.state");
    let run = |words: &[&str]| {
        let mut command = std::process::Command::new(PROGRAM);
        let output = command.args(words).stdin(Stdio::null()).output().unwrap();
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        if output.status.success() { Ok(text) } else { Err(text) }
    };
    let text = run(&["show", "saved", state]).unwrap();
    assert!(text.contains("device vm1 (pvrdma, mac 52:54:00:00:00:01)") && text.contains("\nQp "), "{text}");
    assert!(text.contains("\"sq_psn\":\"hidden\""), "{text}");
    let json: serde_json::Value = serde_json::from_str(&run(&["show", "saved", state, "--json"]).unwrap()).unwrap();
    let all: serde_json::Value =
        serde_json::from_str(&run(&["show", "saved", state, "--json", "--secrets"]).unwrap()).unwrap();
    assert_eq!(json["records"].as_array().unwrap().len(), all["records"].as_array().unwrap().len());
    assert!(!all.to_string().contains("hidden"));
    assert!(run(&["show", "saved"]).is_err());
    assert!(run(&["show", "saved", "/dev/null"]).unwrap_err().contains("truncated"));
    assert!(run(&["show", "saved", state, "--device", "vm1"]).unwrap_err().contains("running daemon"));
    assert!(run(&["show", "failures", state]).unwrap_err().contains("only `show saved`"));
    assert!(run(&["show", "failures", "--secrets"]).unwrap_err().contains("--secrets"));
}
