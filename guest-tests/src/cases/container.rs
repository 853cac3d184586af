//! The container image of `pvrdma-lab`, loaded and run with podman by the commands of the document. Podman is installed
//! in a root directory of its own.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::case::{Case, skip};
use super::lab;
use super::recipe::recipe;
use crate::daemon::{self, workspace_manifest};
use crate::image::{GuestImage, HostRoot};

/// Document and marker of the commands.
pub(super) const RECIPE: (&str, &str) = ("docs/ci.md", "container");
const PACKAGES: [&str; 3] = ["podman", "crun", "netavark"];

/// The only test.
pub(crate) fn cases() -> Vec<Case> {
    const WHEN: &str = "installs podman; runs when asked for: --only slow/container";
    vec![Case::alone("slow/container", container).slow(WHEN)]
}

fn container(image: &GuestImage) -> Result<String> {
    if !rustix::process::geteuid().is_root() {
        return Err(skip("podman in a root directory of its own needs root"));
    }
    let root = HostRoot::build(image, "container", &PACKAGES)?;
    let directory = tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
    let folder = directory.path().join("work");
    for part in ["bin", "containers", "work"] {
        fs::create_dir_all(directory.path().join(part)).context("cannot create a directory")?;
    }
    build(image, &folder.join(format!("pvrdma-lab-container-{}.tar.gz", std::env::consts::ARCH)))?;
    lab::write_test(&folder)?;
    root.enter_in(&directory.path().join("bin"), "usr/bin/podman")?;
    let settings = directory.path().join("containers.conf");
    fs::write(&settings, SETTINGS).context("cannot write settings of podman")?;
    let (document, name) = RECIPE;
    let script = format!("{PLACE}\ncd work\n{}", recipe(document, name)?);
    let path = format!("{}:{}", directory.path().join("bin").display(), std::env::var("PATH").unwrap_or_default());
    let output = Command::new("unshare")
        .args(["--mount", "--pid", "--fork", "--kill-child", "bash", "-euc", &script, "container"])
        .args([&root.path(""), directory.path()])
        .env("PATH", path)
        .env("TMPDIR", directory.path())
        .env("CONTAINERS_CONF_OVERRIDE", settings)
        .current_dir(directory.path())
        .stdin(Stdio::null())
        .output()
        .context("cannot run unshare")?;
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    ensure!(output.status.success(), "{}: {said}", output.status);
    lab::ensure_played(&folder, &said)?;
    Ok(lab::up_after(&said))
}

/// Writes the container image with programs in the profile of this one. `slow/workflow` builds it with those of a
/// release.
fn build(image: &GuestImage, file: &Path) -> Result<()> {
    let script = workspace_manifest().context("the workspace this program was built from is gone")?;
    let script = script.with_file_name("lab/container/build");
    daemon::program()?;
    let programs = daemon::program_of("pvrdma-lab")?;
    let mut build = Command::new(script);
    build.arg(file).arg(programs.parent().context("this program is nowhere")?);
    let output = build.env("PVRDMA_BED_DIR", image.directory()).stdin(Stdio::null()).output();
    let output = output.context("cannot run the build of the container image")?;
    ensure!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Control groups are not under test, and some machines do not provide them inside a root directory.
const SETTINGS: &str = "[containers]\ncgroups = \"disabled\"\n";

/// Enters the root directory with this machine's devices and the files of the test mounted; nothing persists.
const PLACE: &str = r#"
root=${1%/} directory=$2
# To unpack an image changes the mount at its root, so there must be one.
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
# crun refuses hierarchies of both kinds side by side.
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs tmpfs "$root/run"
mkdir -p "$root/run/lock" "$root/var/lib/containers"
mount --bind "$directory/containers" "$root/var/lib/containers"
mount -t tmpfs tmpfs "$root/mnt"
mkdir -p "$root$directory"
mount --bind "$directory" "$root$directory"
"#;
