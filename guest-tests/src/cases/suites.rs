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

/// Packages of all systems: those that the lab needs, and what the scripts use.
const PACKAGES: &str = "hostname ibverbs-providers ibverbs-utils iproute2 kmod openssh-client openssh-server procps \
    rdma-core rdmacm-utils";

/// Packages with which suites are built.
const COMPILERS: &str = "dpkg-dev g++ gcc libc6-dev make";

/// Begins the build of each suite.
const COMMON: &str = include_str!("../../suites/build/common");

/// A system in which suites run.
#[derive(Clone, Copy, Debug)]
struct System {
    /// Name of its directory.
    name: &'static str,
    /// Packages that it needs beside the common ones.
    packages: &'static [&'static str],
    /// Downloads and builds the suites.
    build: &'static str,
}

const ISCSI: System =
    System { name: "suites-iscsi", packages: &["libiscsi-bin tgt"], build: include_str!("../../suites/build/iscsi") };
const LIBFABRIC: System = System {
    name: "suites-libfabric",
    packages: &[COMPILERS, "autoconf automake libfabric-bin libfabric-dev libtool python3"],
    build: include_str!("../../suites/build/libfabric"),
};
const MPICH: System = System {
    name: "suites-mpich",
    packages: &[COMPILERS, "libmpich-dev mpich perl python3"],
    build: include_str!("../../suites/build/mpich"),
};
const PYVERBS: System = System {
    name: "suites-pyverbs",
    packages: &[COMPILERS, "python3-pyverbs"],
    build: include_str!("../../suites/build/pyverbs"),
};
const UCX: System = System {
    name: "suites-ucx",
    packages: &[
        COMPILERS,
        "autoconf automake libibverbs-dev libnl-3-dev libnl-route-3-dev libnuma-dev librdmacm-dev libtool pkg-config",
    ],
    build: include_str!("../../suites/build/ucx"),
};

/// A suite.
#[derive(Clone, Copy, Debug)]
struct Suite {
    /// Name of its script in `guest-tests/suites`.
    name: &'static str,
    /// Machines on which it runs.
    system: System,
    /// Number of guests.
    guests: u8,
    /// Reads its output.
    read: fn(&str) -> Outcomes,
}

const SUITES: [Suite; 9] = [
    Suite { name: "fabtests", system: LIBFABRIC, guests: 2, read: formats::fabtests },
    Suite { name: "iscsi", system: ISCSI, guests: 2, read: formats::cunit },
    Suite { name: "mpich", system: MPICH, guests: 2, read: formats::tap },
    Suite { name: "mpich-collective", system: MPICH, guests: 2, read: formats::tap },
    Suite { name: "mpich-one-sided", system: MPICH, guests: 2, read: formats::tap },
    Suite { name: "pyverbs", system: PYVERBS, guests: 1, read: formats::unittest },
    Suite { name: "ubertest", system: LIBFABRIC, guests: 2, read: formats::ubertest },
    Suite { name: "ucx", system: UCX, guests: 1, read: formats::gtest },
    Suite { name: "ucx-datagrams", system: UCX, guests: 1, read: formats::gtest },
];

/// The tests.
pub(crate) fn cases() -> Vec<Case> {
    let case = |suite: Suite| {
        Case::alone(format!("slow/suites/{}", suite.name), move |image| run(image, suite))
            .slow("builds and runs another project's tests, up to an hour; runs when asked for: --only slow/suites")
    };
    SUITES.map(case).into()
}

impl System {
    fn build(&self, image: &GuestImage) -> Result<HostRoot> {
        let packages: Vec<_> = [PACKAGES].iter().chain(self.packages).flat_map(|names| names.split(' ')).collect();
        HostRoot::build_with(image, self.name, &packages, &[COMMON, self.build].concat())
    }
}

fn run(image: &GuestImage, suite: Suite) -> Result<String> {
    let root = suite.system.build(image)?;
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

/// Returns the version of a suite, which its build has written. Parts of a suite have its name and one of their own.
fn version(versions: &Path, suite: &str) -> Result<String> {
    let text = fs::read_to_string(versions).with_context(|| format!("cannot read {}", versions.display()))?;
    let suite = suite.split_once('-').map_or(suite, |(whole, _)| whole);
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
