use source_rules::config::REPOSITORY;
use source_rules::logs;
use source_rules::workspace::{Tree, Workspace};

use crate::{ROOT, assert_one};

const MANIFEST: (&str, &str) = ("crates/a/Cargo.toml", "[package]\nname = \"a\"\n[dependencies]\nlog = \"0.4\"\n");

fn check(source: &str) -> Vec<source_rules::Problem> {
    logs::check(&crate::parse(&[ROOT, MANIFEST, ("crates/a/src/lib.rs", source)]))
}

#[test]
fn a_line_without_a_limit_is_found_under_any_name() {
    for (source, name) in [
        ("\nfn f() { log::warn!(\"x\"); }\n", "log::warn"),
        ("use log::error;\nfn f() { error!(\"x\"); }\n", "log::error"),
        ("use log::info as say;\nfn f() { say!(\"x\"); }\n", "log::info"),
        ("\nfn f() { g(|e| log::log!(e, \"x\")); }\n", "log::log"),
    ] {
        assert_one(&check(source), &["crates/a/src/lib.rs:2", &format!("`{name}!`"), REPOSITORY.logs.home]);
    }
}

#[test]
fn a_line_may_have_a_reason() {
    assert_eq!(check("fn f() {\n    // Log: once, at the\n    // start.\n    log::info!(\"x\");\n}\n"), []);
    for none in ["// Log:", "// Log: elsewhere.\n", "// At the start."] {
        assert_eq!(check(&format!("fn f() {{\n{none}\n    log::info!(\"x\");\n}}\n")).len(), 1, "{none}");
    }
}

#[test]
fn disabled_levels_and_tests_are_not_limited() {
    let source = "fn f() { log::debug!(\"x\"); log::trace!(\"x\"); }\n\
                  #[cfg(test)]\nmod tests { fn f() { log::warn!(\"x\"); } }\n";
    assert_eq!(check(source), []);
    let mut config = REPOSITORY;
    config.logs.home = "crates/a/src/lib.rs";
    let warns = ("crates/a/src/lib.rs", "fn f() { log::warn!(\"x\"); }\n");
    let of = |config| logs::check(&Workspace::parse(Tree::of(&[ROOT, MANIFEST, warns]), config).unwrap());
    assert_eq!(of(config), []);
    config.logs.home = "none";
    assert_eq!(of(config).len(), 1);
    config.logs.exceptions = &[("crates/a/", "a test")];
    assert_eq!(of(config), []);
}
