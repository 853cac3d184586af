use source_rules::circles;
use source_rules::workspace::Workspace;

use crate::{A, ROOT, assert_one, crate_a, lines, parse};

/// Returns the dependencies as `from -> to: names`, with paths relative to `crates/`.
fn arrows(workspace: &Workspace) -> Vec<String> {
    let path = |file: usize| workspace.files[file].path.trim_start_matches("crates/").to_owned();
    let name = |(from, to): (usize, usize)| format!("{} -> {}", path(from), path(to));
    circles::arrows(workspace)
        .iter()
        .map(|(files, ties)| format!("{}: {}", name(*files), ties.keys().cloned().collect::<Vec<_>>().join(" ")))
        .collect()
}

#[test]
fn a_circle_of_three_over_super() {
    let mut files = vec![
        ("crates/a/src/lib.rs", "mod x;\nmod y;\nmod z;\n"),
        ("crates/a/src/x.rs", "use super::y::Y;\npub struct X(Y);\n"),
        ("crates/a/src/y.rs", "\npub struct Y(super::z::Z);\n"),
        ("crates/a/src/z.rs", "pub struct Z;\nimpl Z { fn f(x: &super::x::X) {} }\n"),
    ];
    let all = ["crates/a/src/x.rs", "crates/a/src/y.rs", "crates/a/src/z.rs"];
    let problems = circles::check(&crate_a(&files));
    assert_one(&problems, &all);
    assert_one(&problems, &["x.rs -> crates/a/src/y.rs: Y (line 1)", "y.rs -> crates/a/src/z.rs: Z (line 2)"]);
    assert_one(&problems, &["circle of 3 files", "z.rs -> crates/a/src/x.rs: X (line 2)"]);

    files[3].1 = "pub struct Z;\n";
    assert!(circles::check(&crate_a(&files)).is_empty());
}

#[test]
fn two_files_are_a_circle() {
    let workspace = crate_a(&[
        ("crates/a/src/lib.rs", "mod x;\nmod y;\n"),
        ("crates/a/src/x.rs", "pub struct X(crate::y::Y);\n"),
        ("crates/a/src/y.rs", "pub struct Y(Box<crate::x::X>);\n"),
    ]);
    assert_one(&circles::check(&workspace), &["circle of 2 files", "x.rs -> crates/a/src/y.rs: Y (line 1)"]);
}

#[test]
fn a_circle_through_reexports_leads_to_the_definition() {
    let workspace = crate_a(&[
        ("crates/a/src/lib.rs", "mod deep;\nmod x;\nmod y;\npub use deep::*;\n"),
        ("crates/a/src/deep/mod.rs", "mod z;\npub use z::Z as Renamed;\n"),
        ("crates/a/src/deep/z.rs", "pub struct Z;\nfn f() { crate::x::f() }\n"),
        ("crates/a/src/x.rs", "use crate::y::Y;\npub fn f() -> Y { Y }\n"),
        ("crates/a/src/y.rs", "use a::Renamed;\nuse a as me;\npub struct Y;\nimpl From<me::Renamed> for Y {}\n"),
    ]);
    assert_eq!(
        arrows(&workspace),
        ["a/src/deep/z.rs -> a/src/x.rs: f", "a/src/x.rs -> a/src/y.rs: Y", "a/src/y.rs -> a/src/deep/z.rs: Z"]
    );
    assert_one(&circles::check(&workspace), &["circle of 3 files", "y.rs -> crates/a/src/deep/z.rs: Z (line 1)"]);
}

#[test]
fn a_file_with_items_depends_on_its_reexports() {
    let mut files = vec![
        ("crates/a/src/lib.rs", "mod m;\n"),
        ("crates/a/src/m/mod.rs", "mod x;\nmod y;\npub use x::X;\npub use y::Y;\npub struct Error;\n"),
        ("crates/a/src/m/x.rs", "pub struct X;\nfn f() -> super::Error {}\n"),
        ("crates/a/src/m/y.rs", "pub struct Y;\nfn f() -> super::Error {}\n"),
    ];
    assert_one(&circles::check(&crate_a(&files)), &["circle of 3 files", "X (re-exported, line 3)"]);

    files[1].1 = "mod error;\nmod x;\nmod y;\npub use error::Error;\npub use x::X;\npub use y::Y;\n";
    files.push(("crates/a/src/m/error.rs", "pub struct Error;\n"));
    assert!(circles::check(&crate_a(&files)).is_empty());
}

#[test]
fn a_circle_through_bodies_of_macros() {
    let workspace = crate_a(&[
        ("crates/a/src/lib.rs", "mod x;\nmod y;\nmod z;\n"),
        ("crates/a/src/x.rs", "use super::y;\npub fn x() { println!(\"{}\", y::value()); }\n"),
        ("crates/a/src/y.rs", "pub fn value() -> u8 { assert_eq!(crate::z::Z.0, 1); 1 }\n"),
        ("crates/a/src/z.rs", "macro_rules! run { () => { $crate::x::x() } }\npub struct Z(pub u8);\n"),
    ]);
    assert_one(&circles::check(&workspace), &["circle of 3 files", "x.rs -> crates/a/src/y.rs: value (line 2)"]);
}

#[test]
fn a_called_macro_leads_to_its_definition() {
    let workspace = crate_a(&[
        ("crates/a/src/lib.rs", "#[macro_use]\nmod m;\nmod x;\n"),
        ("crates/a/src/m.rs", "macro_rules! make { ($name:ident) => { pub struct $name; pub struct Fixed; } }\n"),
        ("crates/a/src/x.rs", "make! { Made }\n"),
    ]);
    assert_eq!(arrows(&workspace), ["a/src/x.rs -> a/src/m.rs: make"]);
}

#[test]
fn names_are_found_wherever_they_stand() {
    let workspace = crate_a(&[
        ("crates/a/src/lib.rs", "mod all;\nmod x;\n"),
        (
            "crates/a/src/all.rs",
            "pub trait Bound {}\npub struct Field;\npub enum Choice { First, Second }\npub const LIMIT: u8 = 1;\npub fn call() {}\n\
             pub fn with() {}\npub struct Behind;\npub mod inline { pub struct Inside; }\npub struct Caster;\n",
        ),
        (
            "crates/a/src/x.rs",
            "use crate::all::{self as everything, Choice::*, inline::*};\nuse everything::*;\n\
             fn f<T: everything::Bound>(c: u8, t: T) -> Inside {\n    match c { LIMIT => call(), _ => {} }\n    let _: First;\n\
                 { use super::all::Behind as B; B; }\n    <everything::Caster>::cast();\n}\n\
             #[derive(Debug)]\nstruct S { #[serde(serialize_with = \"everything::with\")] f: super::all::Field }\n",
        ),
    ]);
    assert_eq!(
        arrows(&workspace),
        ["a/src/x.rs -> a/src/all.rs: Behind Bound Caster Choice Field Inside LIMIT call with"]
    );
}

#[test]
fn local_names_are_no_arrows() {
    let workspace = crate_a(&[
        ("crates/a/src/lib.rs", "mod x;\nmod y;\n"),
        ("crates/a/src/x.rs", "pub fn length() {}\npub struct T;\n"),
        ("crates/a/src/y.rs", "use crate::x::*;\nfn f<T>(length: u8, t: T) -> u8 { length + vec![1].length }\n"),
    ]);
    assert!(arrows(&workspace).is_empty(), "{:?}", arrows(&workspace));
}

#[test]
fn tests_and_testing_code_draw_no_arrows() {
    let user = "pub struct U;\nfn f(x: crate::x::X) {}\n";
    let workspace = crate_a(&[
        (
            "crates/a/src/lib.rs",
            "mod x;\n#[cfg(test)]\nmod checks;\n#[cfg(any(test, feature = \"testing\"))]\npub mod rig;\npub mod testing;\n\
             #[cfg(test)]\nmod tests { use crate::x::X; }\n",
        ),
        (
            "crates/a/src/x.rs",
            "pub struct X;\n#[cfg(test)]\nmod tests { use crate::rig::U; use crate::checks::U as V; }\n",
        ),
        ("crates/a/src/checks.rs", user),
        ("crates/a/src/rig.rs", user),
        ("crates/a/src/testing.rs", user),
        ("crates/a/tests/whole.rs", "use a::x::X;\n"),
    ]);
    assert!(arrows(&workspace).is_empty(), "{:?}", arrows(&workspace));
    assert_eq!(workspace.product().count(), 2);
}

#[test]
fn a_program_and_other_crates_lead_to_the_library() {
    let workspace = parse(&[
        ROOT,
        A,
        ("crates/a/src/lib.rs", "pub mod deep;\n"),
        ("crates/a/src/deep/mod.rs", "pub mod x;\n"),
        ("crates/a/src/deep/x.rs", "pub struct X;\n"),
        ("crates/a/src/main.rs", "fn main() { a::deep::x::X; }\n"),
        ("crates/b/Cargo.toml", "[package]\nname = \"b\"\n[dependencies]\na = { path = \"../a\" }\n"),
        ("crates/b/src/lib.rs", "pub use a::deep::x::X;\nfn f(x: X) {}\n"),
    ]);
    let expected = ["a/src/main.rs -> a/src/deep/x.rs: X", "b/src/lib.rs -> a/src/deep/x.rs: X"];
    assert_eq!(arrows(&workspace), expected);
}

#[test]
fn two_circles_that_share_a_file_are_one_and_cuts_open_it() {
    let workspace = crate_a(&[
        ("crates/a/src/lib.rs", "mod m;\nmod x;\nmod y;\n"),
        ("crates/a/src/m.rs", "pub struct M(crate::x::X, crate::y::Y);\n"),
        ("crates/a/src/x.rs", "pub struct X;\nfn f(m: crate::m::M) {}\n"),
        ("crates/a/src/y.rs", "pub struct Y;\nfn f(m: crate::m::M) {}\n"),
    ]);
    let mut arrows = circles::arrows(&workspace);
    let found = circles::circles(&workspace, &arrows);
    assert_eq!(found.iter().map(|circle| circle.files.len()).collect::<Vec<_>>(), [3]);
    for cut in circles::cuts(&arrows, &found[0]) {
        arrows.remove(&cut);
    }
    assert!(circles::circles(&workspace, &arrows).is_empty());
}

#[test]
fn a_path_that_leads_nowhere_is_reported() {
    let workspace = crate_a(&[("crates/a/src/lib.rs", "fn f() { crate::missing::f(); }\n")]);
    assert_eq!(
        lines(&circles::unresolved(&workspace)),
        ["crates/a/src/lib.rs:1: `crate::missing::f` is not found in the sources"]
    );
}
