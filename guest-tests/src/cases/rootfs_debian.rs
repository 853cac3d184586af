//! `pvrdma-lab run --rootfs` with trees of debootstrap that a project could use: Debian 12 and 13, with gcc, Python and
//! UCX. The suite compiles a program with the tree's compiler, runs pyverbs, and UCX between the guests.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::case::Case;
use super::lab::{ensure_status, said, up_after};
use crate::daemon::workspace_manifest;
use crate::image::{GuestImage, HostRoot};

/// Packages of the trees.
const PACKAGES: [&str; 11] = [
    "gcc",
    "hostname",
    "ibverbs-providers",
    "libc6-dev",
    "libibverbs-dev",
    "libucx-dev",
    "python3",
    "python3-pyverbs",
    "rdma-core",
    "rdmacm-utils",
    "ucx-utils",
];

/// Files of the suite.
const SUITE: [&str; 3] = ["10-gcc", "20-python", "30-ucx"];

/// The tests.
pub(super) fn cases() -> Vec<Case> {
    const WHEN: &str = "builds a Debian with compilers; runs when asked for: --only slow/rootfs";
    let case = |name: &str, release: &'static str| {
        Case::alone(format!("slow/rootfs/{name}"), move |image| run(image, release)).slow(WHEN)
    };
    vec![case("debian-12", "bookworm"), case("debian-13", "trixie")]
}

fn run(image: &GuestImage, release: &str) -> Result<String> {
    let root = HostRoot::build_release(image, &format!("rootfs-{release}"), release, &PACKAGES)?;
    let folder = tempfile::tempdir().context("cannot create a directory")?;
    let project = workspace_manifest().context("the workspace this program was built from is gone")?;
    let project = project.parent().context("a path without a directory")?;
    let files = SUITE.map(|name| project.join("guest-tests/suites/debian").join(name)).into_iter();
    let sources = ["integrity.c", "control.h"].map(|name| project.join("lab/guest").join(name));
    for file in files.chain(sources) {
        let name = file.file_name().context("a path without a name")?;
        fs::copy(&file, folder.path().join(name)).with_context(|| format!("cannot copy {}", file.display()))?;
    }
    let program = std::env::current_exe().context("cannot find this program")?;
    let mut lab = Command::new(program);
    lab.args(["lab", "run", "--read-only", "--suite", ".", "--rootfs"]).arg(root.path("")).current_dir(folder.path());
    let output = lab.env("PVRDMA_BED_DIR", image.directory()).output().context("cannot run the lab")?;
    ensure_status(&output, 0)?;
    let text = said(&output);
    for name in SUITE {
        let passed = text.lines().filter(|line| line.contains(&format!("{name} passed"))).count();
        ensure!(passed == 2, "{name} has passed in {passed} guests: {text}");
    }
    Ok(up_after(&text))
}
