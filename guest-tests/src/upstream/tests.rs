//! The formats, and that the page is that of the stored results.

use std::collections::BTreeSet;

use super::formats::{Outcome, Outcomes, cunit, fabtests, gtest, tap, ubertest, unittest};
use super::*;

fn passed() -> Outcome {
    Outcome::Passed
}

fn failed(message: &str) -> Outcome {
    Outcome::Failed(message.to_owned())
}

fn skipped(reason: &str) -> Outcome {
    Outcome::Skipped(reason.to_owned())
}

fn outcomes<const N: usize>(list: [(&str, Outcome); N]) -> Outcomes {
    list.map(|(name, outcome)| (name.to_owned(), outcome)).into()
}

#[test]
fn unittest_with_documentation_warnings_and_a_crash() {
    let text = "\
test_a (tests.test_x.One.test_a) ... ok
test_b (tests.test_x.One.test_b)
Tests b. ... skipped 'No \"b\" here'
test_c (test_x.One.test_c) ... warning: c
FAIL
test_d (test_x.One.test_d) ... ERROR
test_e (test_x.One.test_e) ... 
======================================================================
FAIL: test_c (test_x.One.test_c)
----------------------------------------------------------------------
Traceback (most recent call last):
  File \"x.py\", line 1, in test_c
AssertionError: 1 != 2

======================================================================
ERROR: test_d (test_x.One.test_d)
----------------------------------------------------------------------
Traceback (most recent call last):
pyverbs.Error: d

Ran 5 tests in 1.0s
";
    let wanted = outcomes([
        ("test_x.One.test_a", passed()),
        ("test_x.One.test_b", skipped("No \"b\" here")),
        ("test_x.One.test_c", failed("AssertionError: 1 != 2")),
        ("test_x.One.test_d", failed("pyverbs.Error: d")),
        ("test_x.One.test_e", failed("the program ended")),
    ]);
    assert_eq!(unittest(text), wanted);
}

#[test]
fn gtest_with_a_failure_a_skip_and_a_crash() {
    let text = "\
[----------] 4 tests from rc/a
[ RUN      ] rc/a.one/0 <rc_verbs/dev:1>
[       OK ] rc/a.one/0 (12 ms)
[ RUN      ] rc/a.two/0
a.cc:1: Failure
Error: no memory
[  FAILED  ] rc/a.two/0, where GetParam() = 1 (1 ms)
[ RUN      ] rc/a.three/0
[     SKIP ] (no CUDA)
[       OK ] rc/a.three/0 (1 ms)
[ RUN      ] rc/a.four/0
a.cc:2: Skipped
[  SKIPPED ] rc/a.four/0 (0 ms)
[ RUN      ] rc/a.five/0
[1:2] a signal
";
    let wanted = outcomes([
        ("rc/a.one/0", passed()),
        ("rc/a.two/0", failed("a.cc:1: Failure")),
        ("rc/a.three/0", skipped("no CUDA")),
        ("rc/a.four/0", skipped("a.cc:2: Skipped")),
        ("rc/a.five/0", failed("[1:2] a signal")),
    ]);
    assert_eq!(gtest(text), wanted);
}

#[test]
fn ubertest_by_numbers() {
    let text = "\
List verbs/all
Starting test 1 / 3:
[verbs, latency, send--, FI_EP_MSG, more]
Ending test 1 / 3, result: Success
Starting test 2 / 3:
[verbs, latency, read--, FI_EP_MSG, more]
Ending test 2 / 3, result: No data available
Starting test 3 / 3:
x: error
Ending test 3 / 3, result: Bad
";
    let wanted = outcomes([
        ("verbs/all 001 verbs latency send--", passed()),
        ("verbs/all 002 verbs latency read--", skipped("No data available")),
        ("verbs/all 003 verbs latency read--", failed("Bad: x: error")),
    ]);
    assert_eq!(ubertest(text), wanted);
}

#[test]
fn fabtests_of_each_result() {
    let text = "\
Provider verbs
- name:   fi_msg -p \"verbs\"
  timestamp: 20261130-043355+0000
  result: Pass
  time:   3
- name:   fi_rdm -p \"verbs\"
  result: Excluded
  time:   0
- name:   fi_cm_data -p \"verbs\"
  result: Notrun
  time:   1
  server_stdout: |
    fi_getinfo: -61
- name:   fi_cq_data -p \"verbs\"
  result: Fail
  time:   1
  server_cmd: fi_cq_data
  server_stdout: |
    begun
    fi_cq_readerr: Input/output error
  client_stdout: |
# ---
";
    let wanted = outcomes([
        ("fi_msg -p verbs", passed()),
        ("fi_rdm -p verbs", skipped("excluded by the suite's list for the provider")),
        ("fi_cm_data -p verbs", skipped("not supported by the provider")),
        ("fi_cq_data -p verbs", failed("fi_cq_readerr: Input/output error")),
    ]);
    assert_eq!(fabtests(text), wanted);
}

#[test]
fn tap_with_messages() {
    let text = "1..3\nok 1 - a 2\nnot ok 2 - b 2\n# \n# no b\n# more\nok 3 - c # SKIP no c\n";
    assert_eq!(tap(text), outcomes([("a 2", passed()), ("b 2", failed("no b")), ("c", skipped("no c"))]));
}

#[test]
fn cunit_of_the_scsi_tests() {
    let text = "
Suite: Read10
  Test: Simple ...passed
  Test: Zero ...
    [SKIPPED] Needs more
passed
  Test: Beyond ...
    [FAILED] READ10 has succeeded
FAILED
    1. cu.c:1  - CU_ASSERT
Suite: Write10
  Test: Simple ...
";
    let wanted = outcomes([
        ("Read10.Simple", passed()),
        ("Read10.Zero", skipped("Needs more")),
        ("Read10.Beyond", failed("READ10 has succeeded")),
        ("Write10.Simple", failed("")),
    ]);
    assert_eq!(cunit(text), wanted);
}

fn stored() -> Stored {
    Stored::read(&crate::daemon::workspace_manifest().unwrap().with_file_name("docs")).unwrap()
}

#[test]
fn the_page_is_that_of_the_results() {
    let documents = crate::daemon::workspace_manifest().unwrap().with_file_name("docs");
    if std::env::var_os("WRITE_DOCUMENTS").is_some() {
        take(&documents, &[] as &[&Path]).unwrap();
    }
    let text = std::fs::read_to_string(documents.join("suites.md")).unwrap();
    assert!(page::with_results(&text, &stored()).unwrap() == text, "`guest-tests suites` writes the tables anew");
}

#[test]
fn each_failure_has_a_cause_and_each_cause_a_failure() {
    let stored = stored();
    let mut used = BTreeSet::new();
    for record in &stored.suites {
        assert_eq!(record.unexplained(), Vec::<&str>::new(), "{}", record.name);
        used.extend(record.failed.keys().filter_map(|case| reasons::of(&record.name, case)).map(|(at, _)| at));
    }
    assert_eq!(used.into_iter().collect::<Vec<_>>(), (0..reasons::REASONS.len()).collect::<Vec<_>>());
}

#[test]
fn the_origin_of_each_result_is_known() {
    for record in &stored().suites {
        let hash = record.commit.split('-').next().unwrap();
        assert!(hash.len() >= 8 && hash.bytes().all(|digit| digit.is_ascii_hexdigit()), "{}", record.commit);
        assert!(record.date.parse::<jiff::civil::Date>().is_ok() && !record.version.is_empty(), "{}", record.name);
    }
}

#[test]
fn a_case_that_no_longer_passes_is_found() {
    let record = |list: Outcomes| Record::new("none", "1", "c", "d", list);
    let before = record(outcomes([("a", passed()), ("b", passed()), ("c", skipped("x"))]));
    let now = record(outcomes([("a", passed()), ("b", failed("x")), ("c", failed("y"))]));
    assert_eq!(now.lost_since(&before), ["b"]);
    assert_eq!(now.unexplained(), ["b", "c"]);
    assert_eq!((now.executed(), before.executed()), (3, 2));
}
