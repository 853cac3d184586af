//! Finds the commit that `--version` names.

use std::path::Path;
use std::process::Command;
use std::{env, fs};

/// The commit, for builds of a tree without its history.
const COMMIT: &str = "PVRDMAD_COMMIT";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={COMMIT}");
    let of_environment = env::var(COMMIT).ok().filter(|commit| !commit.is_empty());
    // Development builds are not rebuilt for each commit, so they cannot name one.
    let is_release = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let folder = env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    let found = is_release.then(|| of_tree(Path::new(&folder))).flatten();
    let commit =
        of_environment.or(found).map_or_else(|| "unknown commit".to_owned(), |commit| format!("commit {commit}"));
    println!("cargo::rustc-env=PVRDMAD_VERSION={} ({commit})", env!("CARGO_PKG_VERSION"));
}

/// Returns the commit of a source tree: from the file that a registry's package contains, or from git.
fn of_tree(folder: &Path) -> Option<String> {
    let packaged = folder.join(".cargo_vcs_info.json");
    if packaged.exists() {
        println!("cargo::rerun-if-changed={}", packaged.display());
        let text = fs::read_to_string(packaged).ok()?;
        let (_, rest) = text.split_once("\"sha1\"")?;
        return rest.split('"').nth(1).and_then(short);
    }
    // A tree that is unpacked inside another repository must not report that repository's commit.
    git(folder, &["ls-files", "--error-unmatch", "build.rs"])?;
    // The commit changes when HEAD names another branch, or its branch another commit.
    let head = git(folder, &["rev-parse", "--symbolic-full-name", "HEAD"])?;
    for name in ["HEAD", head.as_str(), "packed-refs"] {
        let path = git(folder, &["rev-parse", "--path-format=absolute", "--git-path", name])?;
        if Path::new(&path).exists() {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    short(&git(folder, &["rev-parse", "HEAD"])?)
}

/// The first twelve digits of a commit, whatever a repository's settings are: the same tree gives the same program.
fn short(commit: &str) -> Option<String> {
    commit.get(..12).filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit())).map(str::to_owned)
}

/// Returns git's output, or `None` if there is no git or it fails.
fn git(folder: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").arg("-C").arg(folder).args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
