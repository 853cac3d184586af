use source_rules::config::{Deadlines, REPOSITORY};
use source_rules::deadlines;
use source_rules::workspace::{Tree, Workspace};

use crate::{A, ROOT, assert_one};

fn check(
    source: &str,
    exceptions: &'static [(&'static str, &'static str, &'static str)],
) -> Vec<source_rules::Problem> {
    let mut config = REPOSITORY;
    config.deadlines = Deadlines { folder: "crates/a/src/", exceptions, ..config.deadlines };
    deadlines::check(&Workspace::parse(Tree::of(&[ROOT, A, ("crates/a/src/lib.rs", source)]), config).unwrap())
}

#[test]
fn a_wait_without_a_deadline_is_found() {
    for call in ["child.wait()", "thread\n.join()", "receiver.recv()", "condvar.wait(&mut guard)"] {
        let name = call.split(['.', '(']).nth(1).unwrap();
        assert_one(&check(&format!("fn f() {{ {call}; }}\n"), &[]), &["crates/a/src/lib.rs", &format!("`{name}`")]);
    }
}

#[test]
fn calls_with_a_timeout_and_tests_may_wait() {
    let waits = "fn f() { receiver.recv_timeout(time); keeper.wait(pause); names.join(\", \"); }\n\
                 #[cfg(test)]\nmod tests { fn f() { child.wait(); } }\n";
    assert_eq!(check(waits, &[]), []);
}

#[test]
fn an_exception_is_a_method_of_a_file_and_has_to_be_needed() {
    let source = "fn f() { thread.join(); }\n";
    assert_eq!(check(source, &[("crates/a/src/lib.rs", "join", "a test")]), []);
    assert_one(&check("", &[("crates/a/src/lib.rs", "join", "a test")]), &["lib.rs:1", "not needed"]);
    assert_eq!(check(source, &[("crates/a/src/lib.rs", "wait", "a test")]).len(), 2);
}
