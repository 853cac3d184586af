use source_rules::words;

use crate::{assert_one, crate_a};

fn check(text: &str) -> Vec<source_rules::Problem> {
    words::check(&crate_a(&[("crates/a/src/lib.rs", text)]))
}

#[test]
fn words_of_our_own_are_found() {
    assert_one(&check("\n// One octet.\n"), &["crates/a/src/lib.rs:2: `octet`: say byte"]);
    assert_one(&check("/// What is Under way.\nfn f() {}\n"), &["`under way`"]);
    assert_one(&check("fn f() {}\n/* a\n   ghost */\n"), &["lib.rs:3: `ghost`"]);
    assert_one(&check("const MAX_OCTETS: u8 = 1;\n"), &["`MAX_OCTETS`: say bytes"]);
    assert_one(&check("struct GhostRing;\n"), &["`GhostRing`: say selective NAK"]);
    assert_one(&check("struct Ahead;\n"), &["`Ahead`: say ReorderBuffer"]);
}

#[test]
fn other_places_may_say_them() {
    for text in [
        "fn f(a: Ipv4Addr) { a.octets(); Ipv4Addr::octets(&a); }\n",
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
