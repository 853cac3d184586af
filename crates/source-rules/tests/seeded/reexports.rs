use source_rules::{Problem, reexports};

use crate::{assert_one, parse};

/// Checks a crate `a` with this root, beside a crate `b-c`.
fn check(root: &str) -> Vec<Problem> {
    let a = ("crates/a/Cargo.toml", "[package]\nname = \"a\"\n");
    let b = ("crates/b/Cargo.toml", "[package]\nname = \"b-c\"\n");
    let workspace = ("Cargo.toml", "[workspace]\nmembers = [\"crates/*\"]\n");
    reexports::check(&parse(&[workspace, a, b, ("crates/b/src/lib.rs", ""), ("crates/a/src/lib.rs", root)]))
}

#[test]
fn items_of_other_members_are_found() {
    assert_one(&check("\npub use b_c::{A, B};\n"), &["crates/a/src/lib.rs:2", "b_c"]);
    assert_one(&check("mod x {\n    pub use b_c as other;\n}\n"), &["crates/a/src/lib.rs:2", "b_c"]);
}

#[test]
fn other_imports_are_fine() {
    assert_eq!(check("pub use foreign::C;\npub(crate) use b_c::A;\nuse b_c::B;\nmod x;\npub use x::y;\n"), []);
}
