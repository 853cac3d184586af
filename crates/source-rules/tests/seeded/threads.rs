use source_rules::config::REPOSITORY;
use source_rules::threads;
use source_rules::workspace::{Tree, Workspace};

use crate::{A, ROOT, assert_one, crate_a};

const SPAWN: &str = "fn f() { std::thread::spawn(|| {}); }\n";

#[test]
fn a_start_is_found_under_any_name() {
    let sources = [
        ("\nfn f() { std::thread::spawn(|| {}); }\n", "std::thread::spawn"),
        ("use std::thread;\nfn f() { thread::spawn(|| {}); }\n", "std::thread::spawn"),
        ("use std::thread as t;\nfn f() { t::Builder::new().spawn(|| {}); }\n", "std::thread::Builder::new"),
        ("use std::thread::*;\nfn f() { scope(|s| {}); }\n", "std::thread::scope"),
        ("\nuse std::thread::Builder as B;\n", "std::thread::Builder"),
        ("\nfn f() { unsafe { libc::pthread_create(a, b, c, d) }; }\n", "libc::pthread_create"),
    ];
    for (source, name) in sources {
        let manifest = ("crates/a/Cargo.toml", "[package]\nname = \"a\"\n[dependencies]\nlibc = \"0.2\"\n");
        let tree = [ROOT, manifest, ("crates/a/src/lib.rs", source)];
        let problems = threads::check(&crate::parse(&tree));
        assert_one(&problems, &["crates/a/src/lib.rs:2", &format!("`{name}`"), REPOSITORY.threads.home]);
    }
}

#[test]
fn waits_and_tests_may_name_threads() {
    let waits = "use std::thread::{self, JoinHandle};\nfn f() { thread::sleep(d); thread::park(); }\n\
                 #[cfg(test)]\nmod tests { fn f() { std::thread::spawn(|| {}); } }\n";
    let files = [("crates/a/src/lib.rs", waits), ("crates/a/tests/t.rs", SPAWN), ("crates/a/examples/e.rs", SPAWN)];
    assert_eq!(threads::check(&crate_a(&files)), []);
}

#[test]
fn the_one_place_and_the_exceptions_may_and_an_exception_has_to_be_needed() {
    let check = |home, exceptions: Vec<(&'static str, &'static str)>| {
        let mut config = REPOSITORY;
        config.threads.home = home;
        config.threads.exceptions = exceptions.leak();
        let files = [ROOT, A, ("crates/a/src/lib.rs", "mod b;\n"), ("crates/a/src/b.rs", SPAWN)];
        threads::check(&Workspace::parse(Tree::of(&files), config).unwrap())
    };
    assert_eq!(check("crates/a/src/b.rs", vec![]), []);
    assert_eq!(check("none", vec![("crates/a/src/b.rs", "a test")]), []);
    assert_eq!(check("none", vec![("crates/a/", "a test")]), []);
    assert_one(&check("none", vec![("crates/a/src/b", "a test"), ("crates/a/src/b.rs", "")]), &["not needed"]);
    assert_one(&check("crates/a/src/b.rs", vec![("crates/a/src/b.rs", "a test")]), &["b.rs:1", "not needed"]);
}
