use source_rules::config::{ModuleLayer, ModuleLayers, REPOSITORY};
use source_rules::workspace::{Tree, Workspace};
use source_rules::{Problem, module_layers};

use crate::{A, ROOT, assert_one};

const fn layer(
    name: &'static str,
    modules: &'static [&'static str],
    apart_from: &'static [&'static str],
) -> ModuleLayer {
    ModuleLayer { name, modules, apart_from }
}

const LAYERS: &[ModuleLayer] = &[
    layer("values", &["config", "lib"], &[]),
    layer("server", &["server"], &[]),
    layer("tools", &["show", "top"], &["server"]),
];

/// The modules of a crate without a violation.
const FILES: [(&str, &str); 5] = [
    ("crates/a/src/lib.rs", "pub mod config;\npub mod server;\npub mod show;\npub mod top;\n"),
    ("crates/a/src/config/mod.rs", "mod key;\npub use key::Key;\n"),
    ("crates/a/src/config/key.rs", "pub struct Key;\n"),
    ("crates/a/src/server.rs", "use crate::config::Key;\npub fn serve(key: Key) {}\n"),
    ("crates/a/src/show.rs", "pub fn show(key: super::config::Key) { crate::top::top() }\n"),
];
const TOP: (&str, &str) = ("crates/a/src/top.rs", "pub fn top() {}\n");

fn check_with(layers: &'static [ModuleLayer], files: &[(&str, &str)]) -> Vec<Problem> {
    let mut config = REPOSITORY;
    config.module_layers = ModuleLayers { folder: "crates/a/src/", layers };
    module_layers::check(&Workspace::parse(Tree::of(&[&[ROOT, A, TOP], files].concat()), config).unwrap())
}

/// Checks the crate with another text of a file.
fn check(path: &str, text: &str) -> Vec<Problem> {
    let files = FILES.map(|(file, old)| (file, if file.ends_with(path) { text } else { old }));
    assert!(FILES.iter().any(|(file, _)| file.ends_with(path)));
    check_with(LAYERS, &files)
}

#[test]
fn an_import_goes_down() {
    assert_eq!(check_with(LAYERS, &FILES), []);
    let upwards = "`server` is above `values`";
    for text in [
        "use crate::server::serve;\npub struct Key;\n",
        "pub struct Key;\nfn f() { crate::server::serve(Key) }\n",
        "pub struct Key;\nfn f() { super::super::server::serve(Key) }\n",
        "use crate::server;\npub struct Key;\n",
    ] {
        assert_one(&check("config/key.rs", text), &["crates/a/src/config/key.rs", upwards]);
    }
    let test = "pub struct Key;\n#[cfg(test)]\nmod tests { fn f() { crate::server::serve() } }\n";
    assert_eq!(check("config/key.rs", test), []);
}

#[test]
fn a_facade_passes_nothing_up() {
    let text = "mod key;\npub use key::Key;\npub use crate::server::serve;\n";
    assert_one(&check("config/mod.rs", text), &["crates/a/src/config/mod.rs:3", "`server` is above `values`"]);
}

#[test]
fn methods_stay_in_the_layer_of_their_type() {
    let text = "use crate::config::Key;\nimpl Key { pub fn serve(&self) {} }\n";
    assert_one(
        &check("server.rs", text),
        &["crates/a/src/server.rs:2", "`Key`: the layer `values`", "inherent `impl`"],
    );
    let text = "use crate::config::Key;\npub trait Serve { fn serve(&self) {} }\nimpl Serve for Key {}\n";
    assert_eq!(check("server.rs", text), []);
}

#[test]
fn layers_may_be_kept_apart() {
    let text = "pub fn show() { crate::server::serve(crate::config::Key) }\n";
    assert_one(&check("show.rs", text), &["crates/a/src/show.rs:1", "`server` is kept apart from `tools`"]);
    const WRONG: &[ModuleLayer] = &[
        layer("values", &["config", "lib"], &["server"]),
        layer("server", &["server"], &[]),
        layer("tools", &["show", "top"], &[]),
    ];
    assert_one(&check_with(WRONG, &FILES), &["`server`, from which `values`", "no lower layer"]);
}

#[test]
fn each_module_is_in_one_layer() {
    const MISSING: &[ModuleLayer] = &[layer("all", &["config", "lib", "server", "show"], &[])];
    assert_one(&check_with(MISSING, &FILES), &["`top`", "0 times"]);
    const TWICE: &[ModuleLayer] =
        &[layer("low", &["config", "lib", "server"], &[]), layer("high", &["server", "show", "top"], &[])];
    assert_one(&check_with(TWICE, &FILES), &["`server`", "2 times"]);
    const GONE: &[ModuleLayer] = &[layer("all", &["config", "lib", "server", "show", "top", "gone"], &[])];
    assert_one(&check_with(GONE, &FILES), &["`gone`", "no module"]);
}
