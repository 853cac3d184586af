//! Test suites of other projects, in guests of the lab. Each writes its record to `target/suites`, from which
//! `guest-tests suites` makes the stored results.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::case::Case;
use crate::bench::commit;
use crate::daemon::workspace_manifest;
use crate::image::{GuestImage, HostRoot};
use crate::lab::{LAB_FAILED, TIMED_OUT, VM_FAILED};
use crate::upstream::formats::{self, Outcomes};
use crate::upstream::{Record, Stored, write_json};

/// Packages of the system in which the suites are built and run.
const PACKAGES: [&str; 34] = [
    "autoconf",
    "automake",
    "dpkg-dev",
    "g++",
    "gcc",
    "hostname",
    "ibverbs-providers",
    "ibverbs-utils",
    "iproute2",
    "kmod",
    "libc6-dev",
    "libfabric-bin",
    "libfabric-dev",
    "libibverbs-dev",
    "libiscsi-bin",
    "libmpich-dev",
    "libnl-3-dev",
    "libnl-route-3-dev",
    "libnuma-dev",
    "librdmacm-dev",
    "libtool",
    "make",
    "mpich",
    "openssh-client",
    "openssh-server",
    "perl",
    "pkg-config",
    "procps",
    "python3",
    "python3-pyverbs",
    "rdma-core",
    "rdmacm-utils",
    "tgt",
    "ucx-utils",
];

/// Downloads and builds the suites.
const BUILD: &str = include_str!("../../suites/build");

/// A suite.
#[derive(Clone, Copy, Debug)]
struct Suite {
    /// Name of its script in `guest-tests/suites`.
    name: &'static str,
    /// Number of guests.
    guests: u8,
    /// Reads its output.
    read: fn(&str) -> Outcomes,
}

const SUITES: [Suite; 5] = [
    Suite { name: "iscsi", guests: 2, read: formats::cunit },
    Suite { name: "mpich", guests: 2, read: formats::tap },
    Suite { name: "pyverbs", guests: 1, read: formats::unittest },
    Suite { name: "ubertest", guests: 2, read: formats::ubertest },
    Suite { name: "ucx", guests: 1, read: formats::gtest },
];

/// The tests.
pub(crate) fn cases() -> Vec<Case> {
    let case = |suite: Suite| {
        Case::alone(format!("slow/suites/{}", suite.name), move |image| run(image, suite))
            .slow("builds and runs another project's tests, up to 40 minutes; runs when asked for: --only slow/suites")
    };
    SUITES.map(case).into()
}

fn run(image: &GuestImage, suite: Suite) -> Result<String> {
    let root = HostRoot::build_with(image, "suites", &PACKAGES, BUILD)?;
    let project = workspace_manifest().context("the workspace this program was built from is gone")?;
    let logs = tempfile::tempdir().context("cannot create a directory")?;
    let text = output(image, suite, &root.path(""), &project.with_file_name("guest-tests/suites"), logs.path())?;
    let outcomes = (suite.read)(&text);
    let version = version(&root.path("opt/suites/versions"), suite.name)?;
    let date = jiff::Timestamp::now().strftime("%F").to_string();
    let record = Record::new(suite.name, &version, &commit(), &date, outcomes);
    let written = store(&record, &text)?;
    let before = Stored::read(&project.with_file_name("docs"))?;
    check(&record, before.suite(suite.name)).with_context(|| format!("see {}", written.display()))?;
    let Record { passed, failed, skipped, .. } = &record;
    Ok(format!("{} passed, {} failed as known, {} skipped", passed.len(), failed.len(), skipped.len()))
}

/// Runs the script of a suite, and returns its output in guest 0.
fn output(image: &GuestImage, suite: Suite, root: &Path, scripts: &Path, logs: &Path) -> Result<String> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let mut lab = Command::new(program);
    lab.args([
        "lab",
        "run",
        "--read-only",
        "--timeout",
        "3300",
        "--memory",
        "1536",
        "--vms",
        &suite.guests.to_string(),
    ]);
    lab.arg("--rootfs").arg(root).arg("--folder").arg(scripts).arg("--logs").arg(logs);
    lab.arg("--").arg(scripts.join(suite.name)).env("PVRDMA_BED_DIR", image.directory());
    let said = lab.output().context("cannot run the lab")?;
    // Any other status is the suite's, which its output explains.
    let is_of_lab =
        [LAB_FAILED, TIMED_OUT, VM_FAILED].iter().any(|status| said.status.code() == Some((*status).into()));
    ensure!(!is_of_lab, "{}: {}", said.status, String::from_utf8_lossy(&said.stderr));
    let path = logs.join("vm0.output");
    let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Returns the version of a suite, which its build has written.
fn version(versions: &Path, suite: &str) -> Result<String> {
    let text = fs::read_to_string(versions).with_context(|| format!("cannot read {}", versions.display()))?;
    let found = text.lines().find_map(|line| line.strip_prefix(suite)?.strip_prefix('\t'));
    Ok(found.with_context(|| format!("{} does not have {suite}", versions.display()))?.to_owned())
}

/// Writes a record and the output that it was read from.
fn store(record: &Record, output: &str) -> Result<PathBuf> {
    let folder = Path::new("target/suites");
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let path = folder.join(format!("{}.json", record.name));
    write_json(&path, record)?;
    fs::write(path.with_extension("output"), output).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// Fails if a case fails for an unknown cause, or no longer passes.
fn check(record: &Record, before: Option<&Record>) -> Result<()> {
    let unexplained = record.unexplained();
    ensure!(unexplained.is_empty(), "{} failures without a cause: {unexplained:?}", unexplained.len());
    let lost = before.map(|before| record.lost_since(before)).unwrap_or_default();
    ensure!(lost.is_empty(), "{} cases passed before: {lost:?}", lost.len());
    ensure!(record.executed() > 0, "no case has run");
    Ok(())
}
