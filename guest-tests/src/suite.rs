//! `test`: runs the workspace's own tests, then those in guests, and prints one line with the totals.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

use crate::cases::{self, Case, Tally, run_cases, run_in_lanes};
use crate::cli::TestOptions;
use crate::daemon::{cargo, workspace_manifest};
use crate::image::GuestImage;
use crate::pair::{LinkKind, PairOptions};

/// Runs the requested tests; the exit code tells whether anything failed.
pub(crate) fn run(options: &TestOptions) -> Result<ExitCode> {
    check_names(&options.only, &cases::all(options.link.kind()).iter().map(|case| &*case.name).collect::<Vec<_>>())?;
    if options.list {
        for case in asked_for(options) {
            println!("{}", case.name);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let started = Instant::now();
    let mut tally = Tally::default();
    let image = thread::scope(|scope| {
        // The image step mostly downloads and unpacks, so it runs in parallel to the compiler.
        let image = (!options.no_vm).then(|| scope.spawn(GuestImage::build));
        if options.only.is_empty() {
            println!("== the workspace's tests");
            tally.add(workspace_tests()?);
            println!("== models of lock-free code");
            tally.add(models()?);
            println!("      {:.1} s", started.elapsed().as_secs_f64());
        }
        let joined = image.map(|image| image.join().unwrap_or_else(|_| Err(anyhow!("it panicked"))));
        anyhow::Ok(joined)
    })?;
    if let Some(image) = image {
        println!("== tests in two guests");
        tally.add(guest_tests(options, image));
    }
    print!("{}", tally.times.summary());
    println!("      {:.1} s in all", started.elapsed().as_secs_f64());
    // The end of a long log is often all that is kept of it.
    for failure in &tally.failures {
        println!("FAIL  {failure}");
    }
    print!("{} passed, {} failed", tally.passed, tally.failed);
    if tally.skipped > 0 {
        print!(", {} skipped", tally.skipped);
    }
    println!();
    Ok(if tally.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Fails if one of the patterns matches no name: a misspelt test must not count as a test that passed.
fn check_names(patterns: &[String], names: &[&str]) -> Result<()> {
    for pattern in patterns {
        if names.iter().any(|name| name.contains(&**pattern)) {
            continue;
        }
        let near = near(pattern, names);
        let hint = if near.is_empty() { String::new() } else { format!("; near are {}", near.join(", ")) };
        bail!("no guest test has {pattern:?} in its name{hint}; `test --list` prints all names");
    }
    Ok(())
}

/// Returns the names that are most similar to a pattern, the best one first: as a whole, or in one of their parts.
fn near<'a>(pattern: &str, names: &[&'a str]) -> Vec<&'a str> {
    const NEAR: f64 = 0.8;
    const MOST: usize = 3;
    let likeness = |name: &str| {
        let parts = std::iter::once(name).chain(name.split('/'));
        parts.map(|part| strsim::jaro_winkler(pattern, part)).fold(0.0, f64::max)
    };
    let mut near: Vec<_> = names.iter().map(|name| (likeness(name), *name)).filter(|(like, _)| *like >= NEAR).collect();
    near.sort_by(|one, other| other.0.total_cmp(&one.0));
    near.into_iter().map(|(_, name)| name).take(MOST).collect()
}

/// Returns the named cases, or all.
fn asked_for(options: &TestOptions) -> Vec<Case> {
    cases::all(options.link.kind())
        .into_iter()
        .filter(|case| options.only.is_empty() || options.only.iter().any(|part| case.name.contains(part)))
        .map(|case| if options.only.is_empty() { case.unasked() } else { case })
        .collect()
}

fn guest_tests(options: &TestOptions, image: Result<GuestImage>) -> Tally {
    let kind = options.link.kind();
    let image = match image {
        Ok(image) => image,
        Err(error) => {
            println!("FAIL  the guest image cannot be built: {}", cases::causes(&error));
            return Tally {
                failed: asked_for(options).len().max(1) as u64,
                failures: vec![format!("all guest tests: {:#}", error.root_cause())],
                ..Tally::default()
            };
        }
    };
    let pair = PairOptions { pvrdma: kind == LinkKind::Pvrdma, rxe: kind == LinkKind::Rxe, ..PairOptions::default() };
    if options.only.is_empty() {
        run_in_lanes(&image, &pair, kind, || asked_for(options))
    } else {
        // Named cases run one after the other, because the user watches them.
        run_cases(&image, &pair, kind, asked_for(options))
    }
}

fn workspace_tests() -> Result<Tally> {
    cargo_test(|test| test.arg("--workspace"))
}

/// Runs the models of `crates/handover`. They are built with other atomics than everything else, so they have a target
/// folder of their own.
fn models() -> Result<Tally> {
    let manifest = manifest()?;
    let target = manifest.with_file_name("target").join("loom");
    cargo_test(|test| {
        test.args(["-p", "pvrdma-handover", "--test", "models", "--target-dir"])
            .arg(target)
            .env("RUSTFLAGS", "--cfg loom")
    })
}

fn manifest() -> Result<PathBuf> {
    workspace_manifest().context("the workspace this program was built from is gone")
}

/// Runs `cargo test`, passes its output on and counts its result lines.
fn cargo_test(which: impl FnOnce(&mut Command) -> &mut Command) -> Result<Tally> {
    let mut test = Command::new(cargo());
    test.args(["test", "--no-fail-fast", "--manifest-path"]).arg(manifest()?);
    // Cargo names each test program in the other stream than the program's results.
    let (output, input) = std::io::pipe().context("cannot run cargo test")?;
    let errors = input.try_clone().context("cannot run cargo test")?;
    which(&mut test).stdin(Stdio::null()).stdout(input).stderr(errors);
    let mut child = test.spawn().context("cannot run cargo test")?;
    // The command has descriptors of the pipe, whose end would not be seen.
    drop(test);
    let started = Instant::now();
    let (mut tally, mut skips, mut program) = (Tally::default(), 0, String::new());
    for line in BufReader::new(output).lines() {
        let line = line.context("cannot read the output of cargo test")?;
        println!("{line}");
        if let Some(name) = test_program(&line) {
            if program.is_empty() {
                tally.times.push("cargo test/compilation", started.elapsed());
            }
            name.clone_into(&mut program);
        }
        if let Some(time) = run_time(&line) {
            tally.times.push(format!("cargo test/{program}"), time);
        }
        tally.add(result_line(&line));
        tally.failures.extend(failed_test(&line).map(str::to_owned));
        skips += u64::from(is_skip(&line));
    }
    // libtest counts skipped tests as passed.
    (tally.passed, tally.skipped) = (tally.passed.saturating_sub(skips), tally.skipped + skips);
    let status = child.wait().context("cannot wait for cargo test")?;
    // A test program that does not compile, or crashes, has no result line.
    if !status.success() && tally.failed == 0 {
        println!("FAIL  cargo test ended with {status}");
        tally.failed += 1;
        tally.failures.push(format!("cargo test: {status}"));
    }
    Ok(tally)
}

/// Returns `true` if a test reports that it cannot run on this machine (`pvrdma_verbs::testing::skipped`). With one
/// thread the name of the test precedes the report.
fn is_skip(line: &str) -> bool {
    line.starts_with("skipped: ") || line.contains(" ... skipped: ")
}

/// Returns the name in libtest's line about a test that failed.
fn failed_test(line: &str) -> Option<&str> {
    line.strip_prefix("test ")?.strip_suffix(" ... FAILED")
}

/// Returns the name in Cargo's line about a test program that it starts.
fn test_program(line: &str) -> Option<&str> {
    let line = line.trim_start();
    if let Some(package) = line.strip_prefix("Doc-tests ") {
        return Some(package);
    }
    let (_, path) = line.strip_prefix("Running ")?.strip_suffix(')')?.rsplit_once('(')?;
    let file = path.rsplit('/').next()?;
    Some(file.rsplit_once('-').map_or(file, |(name, _)| name))
}

/// Returns the time in a `test result:` line of libtest.
fn run_time(line: &str) -> Option<Duration> {
    let (_, time) = line.strip_prefix("test result: ")?.rsplit_once("finished in ")?;
    Duration::try_from_secs_f64(time.strip_suffix('s')?.parse().ok()?).ok()
}

/// Returns the counts of a `test result:` line of libtest; all zero for any other line.
fn result_line(line: &str) -> Tally {
    let Some((_, counts)) = line.strip_prefix("test result: ").and_then(|rest| rest.split_once(". ")) else {
        return Tally::default();
    };
    let count = |what: &str| {
        counts
            .split(';')
            .filter_map(|part| part.trim().split_once(' '))
            .find(|(_, word)| *word == what)
            .and_then(|(number, _)| number.parse().ok())
            .unwrap_or(0)
    };
    Tally { passed: count("passed"), failed: count("failed"), skipped: count("ignored"), ..Tally::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_no_test_has_is_an_error_with_the_near_ones() {
        let names: Vec<_> = cases::all(LinkKind::Pvrdma).into_iter().map(|case| case.name).collect();
        let names: Vec<&str> = names.iter().map(|name| &**name).collect();
        let check = |patterns: &[&str]| {
            let patterns: Vec<_> = patterns.iter().map(ToString::to_string).collect();
            check_names(&patterns, &names).map_err(|error| error.to_string())
        };
        assert_eq!(check(&[]), Ok(()));
        assert_eq!(check(&["slow/package", "pingpong/"]), Ok(()));
        let error = check(&["pingpong/", "slow/pakcage"]).unwrap_err();
        assert!(error.contains("slow/pakcage") && error.contains("near are slow/package"), "{error}");
        let error = check(&["nosuch/case"]).unwrap_err();
        assert!(error.contains("nosuch/case") && error.contains("--list"), "{error}");
    }

    #[test]
    fn libtest_results_are_counted() {
        let line = "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.02s";
        assert_eq!(result_line(line), Tally { passed: 12, failed: 3, skipped: 1, ..Tally::default() });
        assert_eq!(run_time(line), Some(Duration::from_millis(20)));
        assert_eq!(run_time("running 3 tests"), None);
        let program = "     Running tests/crash.rs (target/debug/deps/crash-f57bc9c1b53e2a18)";
        assert_eq!(test_program(program), Some("crash"));
        assert_eq!(test_program("   Doc-tests pvrdma_base"), Some("pvrdma_base"));
        assert_eq!(failed_test("test a::b ... FAILED"), Some("a::b"));
        assert_eq!(failed_test("test a::b ... ok"), None);
        assert_eq!(result_line("running 3 tests"), Tally::default());
        assert!(is_skip("skipped: no promtool") && is_skip("test it ... skipped: no promtool"));
        assert!(!is_skip("test what_is_skipped ... ok"));
    }
}
