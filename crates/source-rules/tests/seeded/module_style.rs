use source_rules::module_style;

use crate::{assert_one, crate_a};

#[test]
fn other_styles_are_found() {
    let check = |files: &[(&str, &str)]| module_style::check(&crate_a(files));
    let beside = [("crates/a/src/lib.rs", "mod x;\n"), ("crates/a/src/x.rs", "mod y;\n"), ("crates/a/src/x/y.rs", "")];
    assert_one(&check(&beside), &["crates/a/src/x.rs:1", "crates/a/src/x/mod.rs"]);
    let path = [("crates/a/src/lib.rs", "\n#[path = \"z.rs\"]\nmod x;\n"), ("crates/a/src/z.rs", "")];
    assert_one(&check(&path), &["crates/a/src/lib.rs:2", "#[path]"]);
    assert_one(&check(&[("crates/a/src/x_tests.rs", "")]), &["crates/a/src/x_tests.rs:1", "tests.rs"]);
}

#[test]
fn the_style_of_the_house_is_fine() {
    let workspace = crate_a(&[
        ("crates/a/src/lib.rs", "mod x;\n"),
        ("crates/a/src/x/mod.rs", "mod y;\n#[cfg(test)]\nmod tests;\n"),
        ("crates/a/src/x/tests.rs", ""),
        ("crates/a/src/x/y.rs", ""),
    ]);
    assert!(module_style::check(&workspace).is_empty());
}
