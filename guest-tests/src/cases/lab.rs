//! `pvrdma-lab` as other projects use it. It is also available as a subcommand of this program.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::action::steps_of_action;
use super::case::Case;
use super::errors::FAULTS;
use super::recipe::recipe;
use crate::image::{GuestImage, executable};
use crate::lab::{LAB_FAILED, TIMED_OUT, VM_FAILED};

/// The tests.
pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::alone("lab/workflow", last_step),
        Case::alone("lab/without-root", without_root),
        Case::alone("lab/failed-guest", failed_guest),
        Case::alone("lab/failures", failures),
        Case::alone("lab/faults", faults)
            .slow("repeats errors/on-request with guests of the lab; runs when asked for: --only lab/faults"),
    ]
}

/// Returns the folder of a caller, with the program at the path that the action uses.
fn callers_folder() -> Result<tempfile::TempDir> {
    let folder = tempfile::tempdir().context("cannot create a directory")?;
    let own = std::env::current_exe().context("cannot find this program")?;
    let program = folder.path().join(LAB);
    executable(&program, &format!("#!/bin/sh\nexec '{}' lab \"$@\"\n", own.display()))?;
    Ok(folder)
}

/// Folder that stands for a runner's temporary one, in the caller's folder.
pub(super) const RUNNER_TEMP: &str = "runner";
/// Path of the program in the caller's folder, once the action has unpacked it.
const LAB: &str = "runner/pvrdma-lab/bin/pvrdma-lab";

fn write(path: &Path, text: &str) -> Result<()> {
    let parent = path.parent().context("a path without a directory")?;
    fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Runs a script in the caller's folder.
fn bash(image: &GuestImage, folder: &Path, script: &str) -> Result<Output> {
    let mut command = Command::new("bash");
    command.args(["-euc", script]).current_dir(folder).stdin(Stdio::null());
    // The job of another user would not find the image in its own cache.
    command.env("PVRDMA_BED_DIR", image.directory()).output().context("cannot run bash")
}

/// Returns the output and the exit status of a run.
pub(super) fn said(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    format!("{}\n{}{}", output.status, text(&output.stdout), text(&output.stderr))
}

pub(super) fn ensure_status(output: &Output, status: u8) -> Result<()> {
    ensure!(output.status.code() == Some(status.into()), "wanted status {status}: {}", said(output));
    Ok(())
}

/// Runs the last script of the action, with the inputs of the document's workflow and the document's test.
fn last_step(image: &GuestImage) -> Result<String> {
    let folder = callers_folder()?;
    write_test(folder.path())?;
    let step = steps_of_action(&[])?.pop().context("the action has no step")?;
    let mut script = format!("export RUNNER_TEMP=$PWD/{RUNNER_TEMP}\n");
    for (name, value) in &step.environment {
        script.push_str(&format!("export {name}='{value}'\n"));
    }
    script.push_str(&step.script.context("the action's last step calls another one")?);
    let output = bash(image, folder.path(), &script)?;
    ensure_status(&output, 0)?;
    let text = said(&output);
    ensure_played(folder.path(), &text)?;
    for file in ["rdma-logs/vm0.console", "rdma-logs/vm1.dmesg", "rdma-logs/vm1.output"] {
        ensure!(fs::metadata(folder.path().join(file)).is_ok_and(|file| file.len() > 0), "{file} is not there: {text}");
    }
    let status = fs::read_to_string(folder.path().join("rdma-logs/status.json")).context("no status")?;
    ensure!(status.contains("\"vm1\""), "not both devices are in the status: {status}");
    Ok(up_after(&text))
}

/// Puts the document's test into a folder.
pub(super) fn write_test(folder: &Path) -> Result<()> {
    let script = recipe("docs/ci.md", "ci: ci/rdma.sh")?;
    write(&folder.join("ci/rdma.sh"), &format!("{script}echo ended >> \"ended-$PVRDMA_LAB_NUMBER\"\n"))
}

/// Checks that the test ran in both guests, to its end.
pub(super) fn ensure_played(folder: &Path, text: &str) -> Result<()> {
    for line in ["vm0: link vmw_pvrdma0/1 state ACTIVE", "vm1: link vmw_pvrdma0/1 state ACTIVE"] {
        ensure!(text.contains(line), "no '{line}': {text}");
    }
    ensure!(text.lines().filter(|line| line.contains("iters in")).count() == 2, "no two results: {text}");
    for file in ["ended-0", "ended-1"] {
        ensure!(folder.join(file).exists(), "{file} is not there: {text}");
    }
    Ok(())
}

/// Returns the boot time of the guests that the lab reported.
pub(super) fn up_after(text: &str) -> String {
    let line = text.lines().find(|line| line.contains(" up after "));
    line.map_or_else(String::new, |line| line.trim_start_matches("pvrdma-lab: ").to_owned())
}

/// Runs as a user without privileges, without locked memory, and with the guest image of another user. The exit status
/// is the command's.
fn without_root(image: &GuestImage) -> Result<String> {
    let folder = tempfile::tempdir().context("cannot create a directory")?;
    let command = r#"test "$PVRDMA_LAB_PEERS" = "" && ibv_devinfo && echo "$SAID" > said; exit 7"#;
    let output = as_nobody(image, folder.path(), &format!("--vms 1 --env SAID=hello -- sh -c '{command}'"))?;
    ensure_status(&output, 7)?;
    let text = said(&output);
    ensure!(text.contains("hca_id:\tvmw_pvrdma0"), "no device: {text}");
    let file = folder.path().join("run/said");
    let (content, owner) = (fs::read_to_string(&file).context(text.clone())?, fs::metadata(&file)?);
    ensure!(content == "hello\n", "the file says {content}");
    ensure!(std::os::unix::fs::MetadataExt::uid(&owner) == 65534, "the file is of {owner:?}");
    Ok(up_after(&text))
}

/// Runs the lab with these arguments as the user `nobody`, in the folder `run` of `folder`. The image and the programs
/// are in folders that only root can enter, so they are bind-mounted for that user in a separate mount namespace.
pub(super) fn as_nobody(image: &GuestImage, folder: &Path, arguments: &str) -> Result<Output> {
    if !rustix::process::getuid().is_root() {
        return Err(super::case::skip("gives rights away, so it needs root"));
    }
    let own = std::env::current_exe().context("cannot find this program")?;
    let programs = own.parent().context("this program is nowhere")?;
    for name in ["bed", "programs", "run"] {
        fs::create_dir_all(folder.join(name)).context("cannot create a directory")?;
    }
    for path in [folder, &folder.join("run")] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o777)).context("cannot give a directory away")?;
    }
    let script = format!(
        "mount --bind '{}' bed; mount --bind '{}' programs
         cd run
         ulimit -l 8192
         exec setpriv --reuid=65534 --regid=65534 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all \
             env -i PATH=\"$PATH\" CARGO=/nonexistent PVRDMA_BED_DIR=\"$PWD/../bed\" TMPDIR=\"$PWD\" \
             ../programs/{} lab run {arguments}",
        image.directory().display(),
        programs.display(),
        own.file_name().unwrap_or_default().to_string_lossy(),
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "bash", "-euc", &script]).current_dir(folder).stdin(Stdio::null());
    command.output().context("cannot run unshare")
}

/// The kernel of a guest panics while the command runs.
fn failed_guest(image: &GuestImage) -> Result<String> {
    let folder = callers_folder()?;
    let output = bash(image, folder.path(), &format!("{LAB} run --vms 1 -- sh -c 'echo c > /proc/sysrq-trigger'"))?;
    ensure_status(&output, VM_FAILED)?;
    let text = said(&output);
    ensure!(text.contains("vm0: its kernel has panicked"), "it does not say how: {text}");
    let kept = text.lines().find_map(|line| line.strip_prefix("pvrdma-lab: logs are in ")).context(text.clone())?;
    let console = fs::read_to_string(Path::new(kept).join("vm0.console")).context("no console")?;
    fs::remove_dir_all(kept).context("cannot remove the logs")?;
    ensure!(console.contains("Kernel panic"), "the console says {console}");
    Ok("said so, and kept the console".to_owned())
}

/// Failures before a command has begun.
fn failures(image: &GuestImage) -> Result<String> {
    let folder = callers_folder()?;
    for (arguments, status, word) in [
        ("run --vms 1 --timeout 1 --logs logs -- sleep 600", TIMED_OUT, "the 1 s of --timeout are up"),
        ("run --folder /usr -- true", LAB_FAILED, "one of the guest's own folders"),
        ("run --folder nowhere -- true", LAB_FAILED, "nowhere"),
        ("run --env NOT_SET_ANYWHERE -- true", LAB_FAILED, "not set here"),
        ("run --suite /usr/bin", LAB_FAILED, "guests see only"),
        ("run --rootfs runner/pvrdma-lab/bin/pvrdma-lab -- true", LAB_FAILED, "the archive is truncated"),
    ] {
        let output = bash(image, folder.path(), &format!("{LAB} {arguments}"))?;
        ensure_status(&output, status)?;
        if !said(&output).contains(word) {
            bail!("{arguments}: no '{word}': {}", said(&output));
        }
    }
    ensure!(folder.path().join("logs/pvrdmad.log").exists(), "no logs of a run without time");
    interrupted(image)
}

/// Runs with `--faults`: programs in both guests get every status and every event that a device can raise.
fn faults(image: &GuestImage) -> Result<String> {
    let folder = callers_folder()?;
    write(&folder.path().join("faults.txt"), FAULTS)?;
    write(&folder.path().join("faults.sh"), WITH_FAULTS)?;
    let output = bash(image, folder.path(), &format!("{LAB} run --faults faults.txt -- sh faults.sh"))?;
    ensure_status(&output, 0)?;
    let text = said(&output);
    ensure!(text.lines().filter(|line| line.contains("provoked 26 errors")).count() == 2, "not both ends: {text}");
    Ok(up_after(&text))
}

/// Test of a caller whose connections fail on request. The client is in the first guest.
const WITH_FAULTS: &str = r#"
set -eu
if [ "$PVRDMA_LAB_NUMBER" = 1 ]; then
    errors -f "$PVRDMA_LAB_DEVICE" "$PVRDMA_LAB_GID_INDEX"
else
    until errors -f "$PVRDMA_LAB_DEVICE" "$PVRDMA_LAB_GID_INDEX" "$PVRDMA_LAB_PEERS"; do sleep 0.2; done
fi
"#;

/// Ctrl-C while guests boot: the lab removes everything that it has created, and says so.
fn interrupted(image: &GuestImage) -> Result<String> {
    let folder = tempfile::tempdir().context("cannot create a directory")?;
    let own = std::env::current_exe().context("cannot find this program")?;
    let mut command = Command::new(own);
    command.args(["lab", "run", "--vms", "1", "--", "sleep", "600"]).current_dir(folder.path());
    command.env("TMPDIR", folder.path()).env("PVRDMA_BED_DIR", image.directory());
    let mut lab = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().context("cannot run the lab")?;
    let mut lines = BufReader::new(lab.stderr.take().context("no standard error")?).lines();
    let start = lines.find_map(|line| line.ok().filter(|line| line.contains("starting")));
    let start = start.context("the lab does not say that it starts")?;
    let place = Path::new(start.rsplit(' ').next().unwrap_or_default());
    let pid = i32::try_from(lab.id()).ok().and_then(rustix::process::Pid::from_raw).context("no process")?;
    rustix::process::kill_process(pid, rustix::process::Signal::INT).context("cannot interrupt the lab")?;
    let text: Vec<String> = lines.map_while(Result::ok).collect();
    let (status, text) = (lab.wait().context("cannot wait for the lab")?, text.join("\n"));
    ensure!(status.code() == Some(130), "{status}: {text}");
    ensure!(text.contains("removed") && text.contains(&place.display().to_string()), "it does not say so: {text}");
    let left = fs::read_dir(folder.path())?.count();
    ensure!(left == 0 && !place.exists(), "{left} files are left: {text}");
    Ok(String::new())
}
