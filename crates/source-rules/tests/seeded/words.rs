use source_rules::words;

use crate::{assert_one, crate_a};

fn check(text: &str) -> Vec<source_rules::Problem> {
    words::check(&crate_a(&[("crates/a/src/lib.rs", text)]))
}

#[test]
fn words_of_our_own_are_found() {
    assert_one(&check("\n// One octet.\n"), &["crates/a/src/lib.rs:2: `octet`: say byte"]);
    assert_one(&check("/// A request is Under way.\nfn f() {}\n"), &["`under way`"]);
    assert_one(&check("fn f() {}\n/* a\n   ghost */\n"), &["lib.rs:3: `ghost`"]);
    assert_one(&check("const MAX_OCTETS: u8 = 1;\n"), &["`MAX_OCTETS`: say bytes"]);
    assert_one(&check("struct GhostRing;\n"), &["`GhostRing`: say selective NAK"]);
    assert_one(&check("struct Ahead;\n"), &["`Ahead`: say ReorderBuffer"]);
    assert_one(&check("fn f() {\n    print(\"nobody answers\");\n}\n"), &["lib.rs:2: `nobody`"]);
    assert_one(&check("/// Nobody answers.\nfn f() {}\n"), &["lib.rs:1: `nobody`"]);
}

#[test]
fn some_words_are_found_in_tests_as_well() {
    let in_tests = |line: &str| check(&format!("#[cfg(test)]\nmod tests {{\n    {line}\n}}\n"));
    assert_one(&in_tests("// Nobody answers."), &["lib.rs:3: `nobody`"]);
    assert_one(&in_tests("const TEXT: &str = \"nobody answers\";"), &["lib.rs:3: `nobody`"]);
    assert_eq!(in_tests("// One octet."), []);
}

#[test]
fn comments_begin_with_a_noun_or_a_verb() {
    assert_one(&check("/// Whether it is up.\nfn f() {}\n"), &["lib.rs:1: `Whether`: say the noun"]);
    assert_one(&check("fn f() {\n    // What it counts.\n}\n"), &["lib.rs:2: `What`"]);
    assert_eq!(check("// Tells whether it is up, and what it counts: Whether, What.\nfn f() {}\n"), []);
}

#[test]
fn words_in_documents_are_found() {
    let check = |text| words::check(&crate_a(&[("docs/a.md", text)]));
    assert_one(&check("# A\n\nOf a network\ncard.\nWhoever asks.\n"), &["docs/a.md:5: `whoever`: say the holder"]);
    assert_eq!(check("`nobody` and\n```text\nnobody\n```\n"), []);
}

#[test]
fn other_places_may_contain_them() {
    for text in [
        "fn f(a: Ipv4Addr) { a.octets(); Ipv4Addr::octets(&a); }\n",
        "/// Calls [`nobody`].\nfn f() {}\n",
        "// Too far ahead.\nfn ahead() { print(\"one octet // of octets\"); }\n",
        "#[cfg(test)]\nmod tests {\n    // One octet.\n    fn octets() {}\n}\n",
    ] {
        assert_eq!(check(text), [], "{text}");
    }
}

#[test]
fn wide_comments_are_found() {
    let comment = format!("// {}\n", "x".repeat(117));
    assert_eq!(check(&comment), []);
    assert_one(&check(&comment.replacen('x', "xx", 1)), &["lib.rs:1", "column 120"]);
    assert_eq!(check(&format!("const A: &str = \"{}\";\n", comment.trim())), []);
}
