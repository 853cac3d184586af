//! The rule for atomics that need a row in the table of atomics.

use source_rules::atomics;
use source_rules::config::REPOSITORY;

use crate::{assert_one, crate_a};

const FILE: &str = "crates/a/src/lib.rs";

#[test]
fn each_kind_of_word_is_found() {
    for (source, word) in [
        ("pub struct S { mark: AtomicBool }\n", "mark"),
        ("pub struct S { marks: Vec<(u8, std::sync::atomic::AtomicU8)> }\n", "marks"),
        ("pub struct Mark(Arc<AtomicU64>);\n", "Mark"),
        ("pub enum Way { Open { mark: AtomicBool } }\n", "mark"),
        ("static MARK: AtomicU64 = AtomicU64::new(0);\n", "MARK"),
        ("fn f() { static MARK: AtomicU64 = AtomicU64::new(0); }\n", "MARK"),
    ] {
        let workspace = crate_a(&[(FILE, source)]);
        assert_one(&atomics::check(&workspace, ""), &[FILE, &format!("`{word}`"), REPOSITORY.atomics.document]);
        let document = format!("| file | words | how |\n| --- | --- | --- |\n| `{FILE}` | `{word}` | a lock |\n");
        assert_eq!(atomics::check(&workspace, &document), []);
    }
}

#[test]
fn a_row_names_an_existing_atomic_of_its_file() {
    let workspace = crate_a(&[(FILE, "pub struct S { mark: AtomicBool }\n")]);
    let elsewhere = format!("| `{FILE}` | `mark` | |\n| `crates/a/src/b.rs` | `mark` | |\n");
    assert_one(&atomics::check(&workspace, &elsewhere), &[REPOSITORY.atomics.document, "`mark` of crates/a/src/b.rs"]);
    let gone = format!("| `{FILE}` | `mark`, `gone` | |\n");
    assert_one(&atomics::check(&workspace, &gone), &[REPOSITORY.atomics.document, "`gone` of crates/a/src/lib.rs"]);
}

#[test]
fn other_types_are_not_meant() {
    let source = "pub struct S { header: AtomicEth, config: Atomics, width: AtomicUnit }\n";
    assert_eq!(atomics::check(&crate_a(&[(FILE, source)]), ""), []);
}

#[test]
fn tests_and_protocols_are_not_checked() {
    let test = "#[cfg(test)]\nmod tests { struct S { mark: AtomicBool } }\npub struct S { mark: bool }\n";
    let protocol = "pub struct S { mark: AtomicBool }\n";
    let home = format!("{}src/lib.rs", REPOSITORY.atomics.home);
    let manifest = format!("{}Cargo.toml", REPOSITORY.atomics.home);
    let files = [(FILE, test), (&*home, protocol), (&*manifest, "[package]\nname = \"h\"\n")];
    assert_eq!(atomics::check(&crate_a(&files), ""), []);
}
