use source_rules::config::{PurityException, REPOSITORY};
use source_rules::purity;
use source_rules::workspace::{Tree, Workspace};

use crate::{ROOT, assert_one, lines, parse};

const ROCE: (&str, &str) = ("crates/roce/Cargo.toml", "[package]\nname = \"roce\"\n");

/// The pure crate with this library.
fn roce(text: &str) -> Workspace {
    parse(&[ROOT, ROCE, ("crates/roce/src/lib.rs", text)])
}

#[test]
fn a_clock_is_found_under_any_name() {
    let sources = [
        "use std::time::Instant as Moment;\nfn f() { Moment::now(); }\n",
        "use std::time;\nfn f() { time::Instant::now(); }\n",
        "use std::time::*;\nfn f() { Instant::now(); }\n",
        "use std as s;\nfn f() { s::time::Instant::now(); }\n",
        "extern crate std as s;\nfn f() { s::time::Instant::now(); }\n",
        "\nfn f() { ::std::time::Instant::now(); }\n",
        "\nfn f(given: Option<std::time::Instant>) { given.unwrap_or_else(std::time::Instant::now); }\n",
        "type Moment = std::time::Instant;\nfn f() { Moment::now(); }\n",
        "\nfn f() { <std::time::Instant>::now(); }\n",
        "use std::time::Instant;\nfn f() { log!(\"{:?}\", Instant::now()); }\n",
        "mod time { pub use std::time::Instant as Moment; }\nfn f() { time::Moment::now(); }\n",
        "\nfn f() { use std::time::Instant as M; M::now(); }\n",
    ];
    for source in sources {
        assert_one(&purity::check(&roce(source)), &["crates/roce/src/lib.rs:2: `std::time::Instant::now`"]);
    }
}

#[test]
fn a_clock_is_found_behind_another_crate() {
    let workspace = parse(&[
        ROOT,
        (
            "crates/roce/Cargo.toml",
            "[package]\nname = \"roce\"\n[dependencies]\npvrdma-verbs-types = { path = \"../verbs-types\" }\n",
        ),
        ("crates/roce/src/lib.rs", "use pvrdma_verbs_types::Moment;\nfn f() { Moment::now(); }\n"),
        ("crates/verbs-types/Cargo.toml", "[package]\nname = \"pvrdma-verbs-types\"\n"),
        ("crates/verbs-types/src/lib.rs", "pub use std::time::Instant as Moment;\n"),
    ]);
    assert_one(&purity::check(&workspace), &["lib.rs:2: `std::time::Instant::now` (as `Moment::now`)"]);
}

#[test]
fn sockets_files_threads_and_locks_are_found() {
    let sources = [
        ("use std::net::UdpSocket;\n", "std::net::UdpSocket"),
        ("use std::{fmt, io::{self, Read}};\n", "std::io"),
        ("use std::fs::*;\n", "std::fs"),
        ("fn f() { std::thread::spawn(|| {}); }\n", "std::thread::spawn"),
        ("use std::sync::{Arc, Mutex};\n", "std::sync::Mutex"),
        ("use std::time::SystemTime;\n", "std::time::SystemTime"),
        ("use core::net::*;\nfn f() { TcpStream::connect(); }\n", "std::net::TcpStream::connect"),
        ("fn f() { println!(); }\n", "println"),
        ("fn f(t: std::time::Instant) { t.elapsed(); }\n", "elapsed"),
        ("fn f(t: std::time::Instant) { log!(t.elapsed()); }\n", "elapsed"),
    ];
    for (source, name) in sources {
        let problems = lines(&purity::check(&roce(source)));
        assert!(problems.iter().any(|line| line.contains(&format!("`{name}"))), "{source}: {problems:?}");
    }
}

#[test]
fn each_protocol_is_checked() {
    let workspace = parse(&[
        ROOT,
        ROCE,
        ("crates/roce/src/lib.rs", ""),
        ("crates/iwarp/Cargo.toml", "[package]\nname = \"iwarp\"\n[dependencies]\nsocket2 = \"1\"\n"),
        ("crates/iwarp/src/lib.rs", "use std::net::TcpStream;\n"),
    ]);
    let problems = lines(&purity::check(&workspace));
    assert!(problems.len() == 2 && problems[0].contains("`socket2`") && problems[1].contains("in crates/iwarp"));
}

#[test]
fn values_of_time_and_addresses_are_fine() {
    let source = "use std::net::{IpAddr, Ipv4Addr};\nuse std::sync::Arc;\nuse std::time::{Duration, Instant};\n\
                  fn f(now: Instant, a: Arc<IpAddr>) -> Option<Instant> { now.checked_add(Duration::ZERO) }\n\
                  #[cfg(test)]\nmod tests { fn f() { std::time::Instant::now(); } }\n";
    assert!(purity::check(&roce(source)).is_empty());
}

#[test]
fn other_crates_and_tests_may_know_clocks() {
    let clock = "fn f() { std::time::Instant::now(); }\n";
    let workspace = parse(&[
        ROOT,
        ROCE,
        ("crates/roce/src/lib.rs", ""),
        ("crates/roce/tests/t.rs", clock),
        ("crates/a/Cargo.toml", "[package]\nname = \"a\"\n"),
        ("crates/a/src/lib.rs", clock),
    ]);
    assert!(purity::check(&workspace).is_empty());
}

#[test]
fn a_dependency_has_to_be_known_as_pure() {
    let manifest =
        "[package]\nname = \"roce\"\n[dependencies]\nserde = \"1\"\nsocket2 = \"1\"\n[dev-dependencies]\nnix = \"1\"\n";
    let workspace = parse(&[ROOT, ("crates/roce/Cargo.toml", manifest), ("crates/roce/src/lib.rs", "")]);
    assert_one(&purity::check(&workspace), &["crates/roce/Cargo.toml", "`socket2`"]);
}

#[test]
fn an_item_behind_a_dependency_has_to_be_pure_too() {
    let workspace = parse(&[
        ROOT,
        (
            "crates/roce/Cargo.toml",
            "[package]\nname = \"roce\"\n[dependencies]\npvrdma-verbs-types = { path = \"../verbs-types\" }\n",
        ),
        ("crates/roce/src/lib.rs", "use pvrdma_verbs_types::Link;\n"),
        (
            "crates/verbs-types/Cargo.toml",
            "[package]\nname = \"pvrdma-verbs-types\"\n[dependencies]\nlink = { path = \"../link\" }\n",
        ),
        ("crates/verbs-types/src/lib.rs", "pub use link::Link;\n"),
        ("crates/link/Cargo.toml", "[package]\nname = \"link\"\n"),
        ("crates/link/src/lib.rs", "pub struct Link;\n"),
    ]);
    assert_one(&purity::check(&workspace), &["lib.rs:1: `link::Link`"]);
}

#[test]
fn an_exception_holds_for_its_file_and_has_to_be_needed() {
    let exception = |file| PurityException { file, name: "std::time::Instant::now", reason: "a test" };
    let check = |exceptions: Vec<PurityException>| {
        let mut config = REPOSITORY;
        config.pure.exceptions = exceptions.leak();
        let source = ("crates/roce/src/lib.rs", "fn f() { std::time::Instant::now(); }\n");
        purity::check(&Workspace::parse(Tree::of(&[ROOT, ROCE, source]), config).unwrap())
    };
    assert!(check(vec![exception("crates/roce/src/lib.rs")]).is_empty());
    let problems = check(vec![exception("crates/roce/src/lib.rs"), exception("crates/roce/src/gone.rs")]);
    assert_one(&problems, &["gone.rs", "not needed"]);
}
