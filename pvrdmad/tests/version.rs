//! `--version` names the commit that the program was built from.

use std::fs;
use std::path::Path;
use std::process::Command;

fn printed(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn the_program_names_its_commit() {
    let version = printed(Command::new(env!("CARGO_BIN_EXE_pvrdmad")).arg("--version"));
    assert_eq!(version, format!("pvrdmad {}", pvrdmad::VERSION));
    let rest = pvrdmad::VERSION.strip_prefix(concat!(env!("CARGO_PKG_VERSION"), " (")).unwrap();
    // Development builds name no commit, because they are not rebuilt for each commit.
    let is_commit = rest.strip_prefix("commit ").is_some_and(|commit| commit.len() == 13);
    assert!(is_commit || rest == "unknown commit)", "{version}");
}

/// The build script as a program, with a folder to build in.
struct Script(tempfile::TempDir);

impl Script {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut compiler = Command::new(std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned()));
        compiler.args(["--edition", "2024", "-o"]).arg(folder.path().join("script"));
        compiler.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("build.rs")).env("CARGO_PKG_VERSION", "1.2.3");
        printed(&mut compiler);
        Self(folder)
    }

    /// Returns the version that the script gives a build of this tree with this profile.
    fn version(&self, tree: &Path, profile: &str, commit: &str) -> String {
        let mut script = Command::new(self.0.path().join("script"));
        script.env("CARGO_MANIFEST_DIR", tree).env("PROFILE", profile).env("PVRDMAD_COMMIT", commit);
        // Keeps git from finding a repository above the folder.
        script.env("GIT_CEILING_DIRECTORIES", self.0.path());
        let said = printed(&mut script);
        let version = said.lines().find_map(|line| line.strip_prefix("cargo::rustc-env=PVRDMAD_VERSION="));
        version.map_or_else(|| said.clone(), str::to_owned)
    }
}

#[test]
fn the_commit_is_that_of_the_tree() {
    let script = Script::new();
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let head = Command::new("git").arg("-C").arg(own).args(["rev-parse", "HEAD"]).output();
    if let Some(head) = head.ok().filter(|head| head.status.success()) {
        let head = String::from_utf8(head.stdout).unwrap();
        assert_eq!(script.version(own, "release", ""), format!("1.2.3 (commit {})", &head[..12]));
    }
    assert_eq!(script.version(own, "debug", ""), "1.2.3 (unknown commit)");

    // A source tree without history, and one from a package.
    let tree = script.0.path().join("tree");
    fs::create_dir(&tree).unwrap();
    assert_eq!(script.version(&tree, "release", ""), "1.2.3 (unknown commit)");
    assert_eq!(script.version(&tree, "release", "0123456789ab"), "1.2.3 (commit 0123456789ab)");
    let packaged = |text: &str| {
        fs::write(tree.join(".cargo_vcs_info.json"), text).unwrap();
        script.version(&tree, "release", "")
    };
    let written = "{\n  \"git\": {\n    \"sha1\": \"89abcdef0123456789abcdef0123456789abcdef\"\n  }\n}";
    assert_eq!(packaged(written), "1.2.3 (commit 89abcdef0123)");
    assert_eq!(packaged("{}"), "1.2.3 (unknown commit)");
    assert_eq!(packaged("{\"git\":{\"sha1\":\"not a commit; \"}}"), "1.2.3 (unknown commit)");
}
