use source_rules::sizes;

use crate::{assert_one, crate_a};

fn check(text: &str) -> Vec<source_rules::Problem> {
    sizes::check(&crate_a(&[("crates/a/src/lib.rs", text)]))
}

/// A function of this many lines.
fn function(lines: usize) -> String {
    format!("fn long() {{\n{}}}\n", "    step();\n".repeat(lines - 2))
}

#[test]
fn a_long_function_is_found() {
    assert!(check(&function(60)).is_empty());
    assert_one(&check(&function(61)), &["crates/a/src/lib.rs:1: `long` has 61 lines"]);
    assert_one(&check(&format!("impl S {{\n{}}}\n", function(61))), &["lib.rs:2"]);
    assert_one(&check(&format!("trait T {{\n{}}}\n", function(61))), &["lib.rs:2"]);
}

#[test]
fn a_long_function_may_have_a_reason() {
    for reason in
        ["// Long: one row per opcode.\n", "/// Parses.\n///\n/// Long: a table.\n", "// Long: a table.\n#[inline]\n"]
    {
        assert!(check(&format!("{reason}{}", function(61))).is_empty(), "{reason}");
    }
    for none in ["// Long:\n", "// Long: elsewhere.\n\n", "/// Is long.\n"] {
        assert_eq!(check(&format!("{none}{}", function(61))).len(), 1, "{none}");
    }
}

#[test]
fn a_long_file_is_found_unless_it_has_a_reason() {
    let text = "const A: u8 = 1;\n".repeat(501);
    assert_one(&check(&text), &["crates/a/src/lib.rs:1: 501 lines"]);
    assert!(check(&text[17..]).is_empty());
    assert!(check(&format!("//! Constants.\n//!\n//! Long: one line per constant.\n\n{text}")).is_empty());
}

#[test]
fn tests_do_not_count() {
    let tests = format!("#[cfg(test)]\nmod tests {{\n{}{}}}\n", function(61), "const A: u8 = 1;\n".repeat(400));
    assert!(check(&format!("{}{tests}", "const A: u8 = 1;\n".repeat(499))).is_empty());
}
