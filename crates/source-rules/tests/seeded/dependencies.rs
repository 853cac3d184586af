use source_rules::dependencies;

use crate::{assert_one, parse};

/// Checks a workspace with `[workspace.dependencies] log` and the crate `a`, with these lines in its manifest and this
/// library.
fn check(manifest: &str, library: &str, more: &[(&str, &str)]) -> Vec<source_rules::Problem> {
    let root = "[workspace]\nmembers = [\"crates/*\"]\n[workspace.dependencies]\nlog = { version = \"1\", features = [\"std\"] }\n";
    let used = "[package]\nname = \"user\"\n[dependencies]\nlog.workspace = true\n";
    let manifest = format!("[package]\nname = \"a\"\n{manifest}");
    let files = [
        ("Cargo.toml", root),
        ("crates/user/Cargo.toml", used),
        ("crates/user/src/lib.rs", "fn f() { log::info!(); }\n"),
        ("crates/a/Cargo.toml", &manifest),
        ("crates/a/src/lib.rs", library),
    ];
    dependencies::check(&parse(&[&files, more].concat()))
}

#[test]
fn an_unused_dependency_is_found() {
    let manifest = "[dependencies]\nthis-error = \"1\"\n";
    assert_one(
        &check(manifest, "// this_error::Error\nfn f(this_error: u8) {}\n", &[]),
        &["crates/a/Cargo.toml", "`this-error`"],
    );
    for used in [
        "use this_error::Error;\n",
        "use {core::fmt, this_error::Error};\n",
        "fn f() -> ::this_error::Error {}\n",
        "#[derive(this_error::Error)]\nstruct E;\n",
        "fn f() { run!(a, this_error::Error) }\n",
        "pub use this_error as error;\n",
        "#[cfg(feature = \"testing\")]\nuse this_error::Error;\n",
    ] {
        assert_eq!(check(manifest, used, &[]), [], "{used}");
    }
}

#[test]
fn a_dependency_of_tests_is_no_normal_one() {
    let tests = "#[cfg(test)]\nmod tests { use big::B; }\n";
    assert_one(&check("[dependencies]\nbig = \"1\"\n", tests, &[]), &["`big`", "belongs to [dev-dependencies]"]);
    assert_eq!(check("[dev-dependencies]\nbig = \"1\"\n", tests, &[]), []);
    assert_eq!(check("[dev-dependencies]\nbig = \"1\"\n", "", &[("crates/a/tests/t.rs", "use big::B;\n")]), []);
    assert_eq!(check("[dev-dependencies]\nbig = \"1\"\n", "//! ```\n//! use big::B;\n//! ```\n", &[]), []);
    assert_one(&check("[dev-dependencies]\nbig = \"1\"\n", "", &[]), &["`big` of [dev-dependencies]"]);
}

#[test]
fn a_dependency_that_is_declared_twice_is_found() {
    let used = "use big::B;\n#[cfg(test)]\nmod tests { use big::C; }\n";
    let twice = "[dependencies]\nbig = { version = \"1\", features = [\"x\"] }\n[dev-dependencies]\nbig = ";
    assert_one(&check(&format!("{twice}\"1\"\n"), used, &[]), &["`big` is declared twice"]);
    assert_one(&check(&format!("{twice}{{ version = \"1\", features = [\"x\"] }}\n"), used, &[]), &["declared twice"]);
    assert_eq!(check(&format!("{twice}{{ version = \"1\", features = [\"y\"] }}\n"), used, &[]), []);
    let inherited =
        "[dependencies]\nlog.workspace = true\n[dev-dependencies]\nlog = { workspace = true, features = [\"std\"] }\n";
    assert_one(&check(inherited, "use log::info;\n", &[]), &["`log` is declared twice"]);
}

#[test]
fn shared_dependencies_come_from_the_workspace() {
    assert_one(
        &check("[dependencies]\nlog = \"1\"\n", "use log::info;\n", &[]),
        &["crates/a/Cargo.toml", "[workspace.dependencies]"],
    );
    let root = "[workspace]\nmembers = []\n[workspace.dependencies]\nlog = \"1\"\n";
    let unused = dependencies::check(&parse(&[("Cargo.toml", root)]));
    assert_one(&unused, &["Cargo.toml", "`log` of [workspace.dependencies] is used by no member"]);
}

#[test]
fn fuzz_packages_are_checked_too() {
    let fuzz = "[package]\nname = \"a-fuzz\"\n[dependencies]\na = { path = \"..\" }\nbig = \"1\"\n";
    let target = ("crates/a/fuzz/fuzz_targets/t.rs", "use a::A;\n");
    assert_one(&check("", "", &[("crates/a/fuzz/Cargo.toml", fuzz), target]), &["crates/a/fuzz/Cargo.toml", "`big`"]);
}
