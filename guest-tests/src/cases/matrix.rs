//! Support table in Markdown, generated from the names of the cases.

use crate::host_adapter::NESTED_PROGRAMS;

/// Transport between the programs: a title, and the prefixes of the case names.
const COLUMNS: [(&str, &[&str]); 7] = [
    ("one daemon", &["pingpong", "perftest", "cm", "nvme", "errors", "integrity"]),
    ("wire to `rdma_rxe`", &["interop"]),
    ("two daemons: VXLAN", &["vxlan"]),
    ("`af_packet`", &["af_packet"]),
    ("RoCE v1", &["roce-v1/untagged"]),
    ("RoCE v1, VLAN", &["roce-v1/tagged"]),
    ("host adapter", &["hca", "slow/nested"]),
];

/// Programs: a title, and the keys of all cases that it needs (see [`keys`]).
const ROWS: [(&str, &[&str]); 13] = [
    ("connections: `ibv_rc_pingpong`", &["rc-pingpong"]),
    ("datagrams: `ibv_ud_pingpong`", &["ud-pingpong"]),
    ("shared receive queue: `ibv_srq_pingpong`", &["srq-pingpong"]),
    ("`ib_send_bw`, `ib_write_bw`, `ib_read_bw`", &["send-bw", "write-bw", "read-bw"]),
    ("`ib_atomic_bw`", &["atomic-bw"]),
    (
        "`ib_send_lat`, `ib_write_lat`, `ib_read_lat`, `ib_atomic_lat`",
        &["send-lat", "write-lat", "read-lat", "atomic-lat"],
    ),
    ("`ib_send_bw`, `ib_send_lat` with datagrams", &["send-bw-ud", "send-lat-ud"]),
    ("`rdma_cm`: `rping`", &["rping"]),
    ("`rdma_cm`: `ucmatose`", &["ucmatose"]),
    ("`rdma_cm`: `udaddy`", &["udaddy"]),
    ("NVMe over RDMA, `fio` with verify", &["fio-verify"]),
    ("every operation, each byte compared", &["integrity"]),
    ("errors on purpose", &["errors"]),
];

/// Programs of cases whose names do not contain them.
const UNNAMED: [(&str, &[&str]); 5] = [
    ("hca/rdma_rxe", &["rc-pingpong", "integrity", "errors"]),
    ("hca/connection-manager", &["rping"]),
    ("hca/host-connections", &["rping"]),
    ("interop/beyond-region/ib_write_bw/a-to-b", &["errors"]),
    ("interop/beyond-region/ib_read_bw/a-to-b", &["errors"]),
];

/// Returns the table.
pub(crate) fn table(names: &[String]) -> String {
    let mut table = String::from("| |");
    for (title, _) in COLUMNS {
        table.push_str(&format!(" {title} |"));
    }
    table.push_str(&format!("\n| --- |{}\n", " :-: |".repeat(COLUMNS.len())));
    for (title, wanted) in ROWS {
        table.push_str(&format!("| {title} |"));
        for (_, groups) in COLUMNS {
            let keys: Vec<String> =
                names.iter().flat_map(|name| groups.iter().flat_map(|group| keys(group, name))).collect();
            let works = wanted.iter().all(|wanted| keys.iter().any(|key| is(key, wanted)));
            table.push_str(if works { " ✓ |" } else { " – |" });
        }
        table.push('\n');
    }
    table
}

/// Returns the programs of a case: words with dashes, without the group and the common prefix of the programs' names.
fn keys(group: &str, name: &str) -> Vec<String> {
    let in_group = name.strip_prefix(group).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    if !in_group {
        return Vec::new();
    }
    let program = |name: &str| {
        let words = name.replace(['_', '/'], "-");
        words.trim_start_matches("ibv-").trim_start_matches("ib-").to_owned()
    };
    let mut keys: Vec<String> = UNNAMED
        .iter()
        .filter(|(case, _)| *case == name)
        .flat_map(|(_, keys)| keys.iter().map(ToString::to_string))
        .collect();
    if group == "slow/nested" {
        keys.extend(NESTED_PROGRAMS.iter().map(|(name, ..)| program(name)));
    }
    let rest = name[group.len()..].trim_start_matches('/');
    match group {
        "pingpong" => keys.push(format!("{}-pingpong", rest.split(['/', '-']).next().unwrap_or(rest))),
        "errors" | "integrity" => keys.push(group.to_owned()),
        "perftest" | "cm" | "nvme" => keys.push(program(rest)),
        // Addresses and MTU precede the program.
        "interop" | "vxlan" | "af_packet" => keys.extend(rest.split_once('/').map(|(_, rest)| program(rest))),
        _ => keys.push(program(rest)),
    }
    keys
}

/// Returns `true` if a key is this program, possibly with options. Datagrams are a separate key.
fn is(key: &str, wanted: &str) -> bool {
    key.strip_prefix(wanted).is_some_and(|rest| rest.is_empty() || rest.starts_with('-') && !rest.starts_with("-ud"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_makes_a_tick_in_its_column() {
        let names = ["vxlan/ipv4/rc_pingpong-64K-events/a-to-b", "perftest/send-bw/ud", "cm/rping/a-to-b"];
        let table = table(&names.map(str::to_owned));
        let ticks = |row: &str| {
            let line = table.lines().find(|line| line.contains(row)).unwrap();
            line.split('|').skip(2).map(str::trim).filter(|cell| !cell.is_empty()).collect::<String>()
        };
        assert_eq!(ticks("ibv_rc_pingpong"), "––✓––––");
        assert_eq!(ticks("rping"), "✓––––––");
        // Cases without `ib_write_bw` do not cover all programs of the row.
        assert_eq!(ticks("ib_write_bw"), "–––––––");
    }

    #[test]
    fn cases_that_are_listed_by_hand_exist() {
        let names = crate::cases::names();
        for (case, _) in UNNAMED {
            assert!(names.iter().any(|name| name == case), "{case}");
        }
        for (title, groups) in COLUMNS {
            for group in groups {
                assert!(names.iter().any(|name| !keys(group, name).is_empty()), "{title}: {group}");
            }
        }
    }
}
