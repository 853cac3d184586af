//! The Wireshark profile names fields and opcodes that exist.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use pvrdma_verbs::testing::skipped;

/// Fields of Wireshark's dissector.
const FIELDS: [&str; 7] = [
    "infiniband.aeth.msn",
    "infiniband.aeth.syndrome.opcode",
    "infiniband.bth.destqp",
    "infiniband.bth.opcode",
    "infiniband.bth.psn",
    "infiniband.deth",
    "ip.dsfield.ecn",
];

fn profile() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/wireshark")
}

fn lines(file: &str) -> Vec<String> {
    fs::read_to_string(profile().join(file)).unwrap().lines().map(str::to_owned).collect()
}

/// Returns the display filters of the profile.
fn filters() -> Vec<String> {
    let colours = lines("colorfilters");
    let buttons = lines("dfilter_buttons");
    let colours = colours.iter().map(|line| {
        let [empty, _name, filter, colour] = line.split('@').collect::<Vec<_>>()[..] else { panic!("{line}") };
        assert!(empty.is_empty() && colour.matches(',').count() == 4, "{line}");
        filter.to_owned()
    });
    let buttons = buttons.iter().map(|line| {
        let [_shown, _label, filter, _comment] = line.split("\",\"").collect::<Vec<_>>()[..] else { panic!("{line}") };
        filter.to_owned()
    });
    colours.chain(buttons).collect()
}

#[test]
fn the_profile_names_fields_that_exist() {
    let columns = lines("preferences");
    let columns = columns.iter().filter_map(|line| line.split("%Cus:").nth(1)?.split(':').next());
    let filters = filters();
    let used = filters.iter().flat_map(|filter| filter.split([' ', '(', ')', '!']));
    let fields: Vec<_> =
        columns.chain(used).filter(|word| word.contains('.') && word.starts_with(char::is_alphabetic)).collect();
    assert!(fields.len() > 15, "{fields:?}");
    let unknown: Vec<_> = fields.into_iter().filter(|field| !FIELDS.contains(field)).collect();
    assert_eq!(unknown, [""; 0]);
}

/// `tshark` compiles each filter, and lists a capture with the profile.
#[test]
fn tshark_takes_the_profile() {
    let folder = tempfile::tempdir().unwrap();
    let own = folder.path().join("profiles/pvrdma");
    fs::create_dir_all(&own).unwrap();
    for file in ["preferences", "colorfilters", "dfilter_buttons"] {
        fs::copy(profile().join(file), own.join(file)).unwrap();
    }
    // The section header of an empty capture.
    let capture = folder.path().join("empty.pcapng");
    let header = [0x0a0d_0d0a_u32, 28, 0x1a2b_3c4d, 1 << 16, !0, !0, 28];
    fs::write(&capture, header.map(u32::to_be_bytes).as_flattened()).unwrap();
    for filter in filters() {
        let mut command = Command::new("tshark");
        command.env("WIRESHARK_CONFIG_DIR", folder.path()).args(["-C", "pvrdma", "-Y", &filter, "-r"]).arg(&capture);
        match command.output() {
            Err(error) => return skipped(&format_args!("tshark: {error}")),
            Ok(output) => assert!(output.status.success() && output.stderr.is_empty(), "{filter}: {output:?}"),
        }
    }
}
