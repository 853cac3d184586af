//! Runs the workflow of a document as a CI runner does: its scripts run one after the other, in a Debian without
//! further packages or build results.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::case::{Case, skip};
use super::lab;
use super::recipe::workflow;
use crate::image::{GuestImage, HostRoot};
use crate::workflow::{Step, environment, steps};

/// The only test.
pub(crate) fn cases() -> Vec<Case> {
    const WHEN: &str = "installs and builds all that a runner needs; runs when asked for: --only slow/workflow";
    vec![Case::alone("slow/workflow", run).slow(WHEN)]
}

fn run(image: &GuestImage) -> Result<String> {
    if !rustix::process::geteuid().is_root() {
        return Err(skip("a root directory of its own needs root"));
    }
    let directory = tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
    let root = HostRoot::clean(image, directory.path().join("root"))?;
    let folder = root.path(FOLDER);
    check_out(&folder.join("pvrdma"))?;
    lab::write_test(&folder)?;
    copy_ca_certificates(&root)?;
    let text = workflow()?;
    let variables: Vec<_> = environment(&text).into_iter().map(|(name, value)| format!("{name}={value}")).collect();
    let (mut said, mut report) = (String::new(), Vec::new());
    for step in steps(&text) {
        let started = Instant::now();
        said = in_container(&root, &variables, &step)?;
        report.push(format!("{} {} s", step.name.unwrap_or_default(), started.elapsed().as_secs()));
    }
    lab::ensure_played(&folder, &said)?;
    ensure!(folder.join("rdma-logs/vm1.dmesg").exists(), "no logs to upload: {said}");
    Ok(format!("{}; {}", report.join(", "), lab::up_after(&said)))
}

/// Path of the sources on a runner, below the root directory.
const FOLDER: &str = "__w/test/test";

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Copies the current files of this repository, as `actions/checkout` does.
fn check_out(to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("cannot create {}", to.display()))?;
    let script =
        "git ls-files -z --cached --others --exclude-standard | tar -c --null --files-from - | tar -x -C \"$0\"";
    let copied =
        Command::new("bash").args(["-euo", "pipefail", "-c", script]).arg(to).current_dir(repository()).output();
    let copied = copied.context("cannot run bash")?;
    ensure!(copied.status.success(), "git and tar: {}", String::from_utf8_lossy(&copied.stderr));
    Ok(())
}

/// Copies this machine's CA certificates, because its network access may go through a proxy with a certificate of its
/// own.
fn copy_ca_certificates(root: &HostRoot) -> Result<()> {
    const CERTIFICATES: &str = "usr/local/share/ca-certificates";
    let own = Path::new("/").join(CERTIFICATES);
    if own.exists() {
        let parent = root.path(CERTIFICATES).parent().context("a path without a directory")?.to_owned();
        fs::create_dir_all(&parent).with_context(|| format!("cannot create {}", parent.display()))?;
        let copied = Command::new("cp").arg("-rL").arg(&own).arg(&parent).status();
        ensure!(copied.is_ok_and(|status| status.success()), "cannot copy {}", own.display());
    }
    Ok(())
}

/// Runs a step as a runner does in a privileged container. Returns its output.
fn in_container(root: &HostRoot, variables: &[String], step: &Step) -> Result<String> {
    let output = Command::new("unshare")
        .args(["--mount", "--pid", "--fork", "--kill-child", "bash", "-euc", PLACE])
        .args([root.path(""), FOLDER.into(), (&step.script).into()])
        .args(variables)
        .stdin(Stdio::null())
        .output()
        .context("cannot run unshare")?;
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    let end = said.char_indices().rev().nth(4000).map_or(0, |(at, _)| at);
    ensure!(
        output.status.success(),
        "{}: {}: {}",
        step.name.as_deref().unwrap_or("a step"),
        output.status,
        &said[end..]
    );
    Ok(said)
}

/// Enters the root directory with an empty environment.
const PLACE: &str = r#"
root=${0%/} folder=$1 script=$2
shift 2
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
exec chroot "$root" env -i --chdir="/$folder" "$@" HOME=/root CI=true \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin sh -ec "$script"
"#;
