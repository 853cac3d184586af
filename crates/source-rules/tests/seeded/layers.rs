use source_rules::config::REPOSITORY;
use source_rules::workspace::{Tree, Workspace};
use source_rules::{Problem, layers};

use crate::assert_one;

const LAYERS: &[&[&str]] = &[&["a", "b"], &["c"]];

/// Checks a workspace with the crates `a`, `b` and `c`, with these lines in their manifests.
fn check(layers: &'static [&'static [&'static str]], [a, b, c]: [&str; 3]) -> Vec<Problem> {
    let manifest = |name: &str, rest: &str| format!("[package]\nname = \"{name}\"\n{rest}");
    let [a, b, c] = [manifest("a", a), manifest("b", b), manifest("c", c)];
    let root = "[workspace]\nmembers = [\"crates/*\"]\n";
    let files = [
        ("Cargo.toml", root),
        ("crates/a/Cargo.toml", a.as_str()),
        ("crates/b/Cargo.toml", b.as_str()),
        ("crates/c/Cargo.toml", c.as_str()),
    ];
    let mut config = REPOSITORY;
    config.layers = layers;
    layers::check(&Workspace::parse(Tree::of(&files), config).unwrap())
}

#[test]
fn a_dependency_goes_down() {
    let on = |section: &str, name: &str| format!("[{section}]\n{name}.workspace = true\n");
    assert_eq!(check(LAYERS, ["", "", &on("dependencies", "a")]), []);
    assert_eq!(check(LAYERS, [&on("dependencies", "log"), "", ""]), []);
    assert_one(&check(LAYERS, [&on("dependencies", "c"), "", ""]), &["crates/a/", "`c` is not on a lower layer"]);
    assert_one(&check(LAYERS, [&on("dependencies", "b"), "", ""]), &["crates/a/", "`b` is not on a lower layer"]);
    assert_one(&check(LAYERS, [&on("build-dependencies", "c"), "", ""]), &["crates/a/", "`c`"]);
    assert_eq!(check(LAYERS, [&on("dev-dependencies", "c"), "", ""]), []);
}

#[test]
fn each_member_is_on_one_layer() {
    assert_one(&check(&[&["a", "b"]], ["", "", ""]), &["crates/c/", "0 times"]);
    assert_one(&check(&[&["a", "b"], &["b", "c"]], ["", "", ""]), &["crates/b/", "2 times"]);
    assert_one(&check(&[&["a", "b"], &["c", "d"]], ["", "", ""]), &["Cargo.toml", "`d`", "no member"]);
}
