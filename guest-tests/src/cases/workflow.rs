//! Builds the lab's part of a release, and runs the workflow of the document with it as a CI runner does: in a Debian
//! with curl and nothing else, without a network, a compiler or build results.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::action::steps_of_action;
use super::case::{Case, skip};
use super::lab::{self, RUNNER_TEMP};
use crate::daemon::workspace_manifest;
use crate::image::{GuestImage, HostRoot};
use crate::workflow::Step;

/// The only test.
pub(crate) fn cases() -> Vec<Case> {
    const WHEN: &str = "builds static release programs; runs when asked for: --only slow/workflow";
    vec![Case::alone("slow/workflow", run).slow(WHEN)]
}

fn run(image: &GuestImage) -> Result<String> {
    if !rustix::process::geteuid().is_root() {
        return Err(skip("a root directory of its own needs root"));
    }
    let directory = tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
    let root = HostRoot::build(image, "runner", &["curl"])?;
    let release = directory.path().join("release");
    let started = Instant::now();
    build(image, &release)?;
    let mut report = vec![format!("release {} s", started.elapsed().as_secs())];
    ensure_listed(&release, directory.path())?;
    let folder = directory.path().join("work");
    fs::create_dir_all(folder.join(RUNNER_TEMP)).context("cannot create a directory")?;
    lab::write_test(&folder)?;
    let place = |path: &Path| -> Result<String> {
        let inside = path.strip_prefix(directory.path())?;
        Ok(format!("/mnt/{}", inside.display()))
    };
    let mut said = String::new();
    for step in steps_of_action(&[("release", &format!("file://{}", place(&release)?))])? {
        let started = Instant::now();
        said = in_container(&root, directory.path(), &place(&folder)?, &step)?;
        report.push(format!("{} {} s", step.name, started.elapsed().as_secs()));
    }
    lab::ensure_played(&folder, &said)?;
    ensure!(folder.join("rdma-logs/vm1.dmesg").exists(), "no logs to upload: {said}");
    Ok(format!("{}; {}", report.join(", "), lab::up_after(&said)))
}

/// Builds the lab's files of a release into a folder.
fn build(image: &GuestImage, release: &Path) -> Result<()> {
    let manifest = workspace_manifest().context("the workspace this program was built from is gone")?;
    let own = std::env::current_exe().context("cannot find this program")?;
    let target = own.ancestors().nth(2).context("this program lies in no target directory")?;
    let tools = Command::new("cargo").args(["auditable", "--version"]).stdin(Stdio::null()).output();
    if !tools.is_ok_and(|output| output.status.success()) {
        return Err(skip("there is no cargo-auditable: .ci/release installs it"));
    }
    let output = Command::new(manifest.with_file_name("pvrdmad/packaging/build"))
        .arg(release)
        .env("PARTS", "lab")
        .env("CARGO_TARGET_DIR", target)
        .env("PVRDMA_BED_DIR", image.directory())
        .stdin(Stdio::null())
        .output()
        .context("cannot run the build")?;
    ensure!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Checks the list of packages in the archive: each has a source and a file with its licence, and the kernel and QEMU
/// are listed.
fn ensure_listed(release: &Path, directory: &Path) -> Result<()> {
    let archive = release.join(format!("pvrdma-lab-{}.tar.gz", std::env::consts::ARCH));
    let to = directory.join("listed");
    fs::create_dir_all(&to).context("cannot create a directory")?;
    let mut tar = Command::new("tar");
    tar.arg("-xzf").arg(&archive).arg("-C").arg(&to);
    tar.args(["pvrdma-lab/bed/contents.json", "pvrdma-lab/bed/licences"]);
    ensure!(tar.status().is_ok_and(|status| status.success()), "cannot unpack {}", archive.display());
    let bed = to.join("pvrdma-lab/bed");
    let list: serde_json::Value = serde_json::from_slice(&fs::read(bed.join("contents.json"))?)?;
    let packages = list.as_array().context("no list")?;
    let text = |package: &serde_json::Value, key: &str| package[key].as_str().unwrap_or_default().to_owned();
    for package in packages {
        ensure!(text(package, "source_url").starts_with("https://snapshot.debian.org/package/"), "{package}");
        ensure!(bed.join(text(package, "licence_file")).is_file(), "no licence file: {package}");
    }
    for source in ["linux", "qemu", "busybox", "rdma-core", "glibc", "seabios"] {
        ensure!(packages.iter().any(|package| text(package, "source").starts_with(source)), "{source} is not listed");
    }
    Ok(())
}

/// Runs a step as a runner does, without a network. Returns its output.
fn in_container(root: &HostRoot, directory: &Path, folder: &str, step: &Step) -> Result<String> {
    let script = step.script.as_ref().context("the action calls another one")?;
    let output = Command::new("unshare")
        .args(["--mount", "--net", "--pid", "--fork", "--kill-child", "bash", "-euc", PLACE])
        .args([root.path("").as_os_str(), directory.as_os_str(), folder.as_ref(), script.as_ref()])
        .args(step.environment.iter().map(|(name, value)| format!("{name}={value}")))
        .stdin(Stdio::null())
        .output()
        .context("cannot run unshare")?;
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    let end = said.char_indices().rev().nth(4000).map_or(0, |(at, _)| at);
    ensure!(output.status.success(), "{}: {}: {}", step.name, output.status, &said[end..]);
    Ok(said)
}

/// Enters the root directory with an empty environment, and with the files of the test at `/mnt`.
const PLACE: &str = r#"
root=${0%/} directory=$1 folder=$2 script=$3
shift 3
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t tmpfs tmpfs "$root/tmp"
mount --bind "$directory" "$root/mnt"
exec chroot "$root" env -i --chdir="$folder" "$@" HOME=/root CI=true RUNNER_TEMP="$folder/runner" \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin bash -e -o pipefail -c "$script"
"#;
