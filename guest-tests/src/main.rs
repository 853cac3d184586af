//! Builds the program that a command needs, and executes it in its own place.
//!
//! `cargo run` compiles every dependency of a package, and the demo should start minutes before all benchmarks and
//! tests could be compiled. So this program has no dependencies. The demo is built without link-time optimisation, in
//! the profile `demo`. The other commands are built in the profile of this program or, if they need assertions, in the
//! profile of the workspace's tests.

use std::env;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let arguments: Vec<_> = env::args_os().skip(1).collect();
    eprintln!("error: {}", become_program(&arguments));
    ExitCode::FAILURE
}

/// Builds the program and becomes it; returns only the reason if that fails.
fn become_program(arguments: &[OsString]) -> String {
    let own = match env::current_exe() {
        Ok(own) => own,
        Err(error) => return format!("cannot find this program: {error}"),
    };
    let Some((folder, target)) = own.parent().and_then(|folder| Some((folder, folder.parent()?))) else {
        return "this program lies in no target directory".to_owned();
    };
    let is_demo = arguments.first().is_some_and(|command| command == "demo");
    let (program, profile, packages): (_, _, &[&str]) = if is_demo {
        // Cargo resolves features for all named packages. The demo builds the daemon with the same names, so that both
        // programs share each crate that they have in common.
        ("guest-tests-demo", "demo", &["-p", "guest-tests", "-p", "pvrdmad", "--features", "demo"])
    } else if folder.ends_with("release") {
        ("guest-tests-suite", "release", &["-p", "guest-tests", "--features", "suite"])
    } else {
        // The suite runs `cargo test --workspace`. With the same packages, and with a test among the targets, Cargo
        // resolves the same features for this build, so that no crate is compiled twice.
        ("guest-tests-suite", "test", &["--workspace", "--features", "guest-tests/suite", "--test", "log_target"])
    };
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.toml");
    let mut build = Command::new(cargo);
    build.args(["build", "--profile", profile, "--bin", program]).args(packages);
    build.arg("--manifest-path").arg(manifest).arg("--target-dir").arg(target);
    match build.status() {
        Ok(status) if status.success() => {}
        Ok(status) => return format!("cannot build {program}: cargo ended with {status}"),
        Err(error) => return format!("cannot build {program}: cannot run cargo: {error}"),
    }
    // Cargo's name for the profiles dev and test is debug.
    let folder = target.join(if profile == "test" { "debug" } else { profile });
    let error = Command::new(folder.join(program)).args(arguments).exec();
    format!("cannot run {}: {error}", folder.join(program).display())
}
