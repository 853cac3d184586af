//! The container image of `pvrdma-lab`: built from scratch with buildah, and run with podman by the commands of the
//! document. Both programs are installed in a root directory of their own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::case::{Case, skip};
use super::lab;
use super::recipe::recipe;
use crate::daemon;
use crate::image::{GuestImage, HostRoot};

/// Document and marker of the commands.
pub(super) const RECIPE: (&str, &str) = ("docs/ci.md", "container");
const PACKAGES: [&str; 4] = ["buildah", "podman", "crun", "netavark"];

/// The only test.
pub(crate) fn cases() -> Vec<Case> {
    const WHEN: &str = "installs buildah and podman; runs when asked for: --only slow/container";
    vec![Case::alone("slow/container", container).slow(WHEN)]
}

fn container(image: &GuestImage) -> Result<String> {
    if !rustix::process::geteuid().is_root() {
        return Err(skip("buildah in a root directory of its own needs root"));
    }
    let root = HostRoot::build(image, "container", &PACKAGES)?;
    let programs = programs()?;
    let directory = tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
    let folder = directory.path().join("pvrdma");
    for part in ["bin", "containers", "pvrdma/target", "pvrdma/lab"] {
        fs::create_dir_all(directory.path().join(part)).context("cannot create a directory")?;
    }
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    std::os::unix::fs::symlink(repository.join("lab/container"), folder.join("lab/container"))?;
    std::os::unix::fs::symlink(&programs, folder.join("target/release"))?;
    lab::write_test(&folder)?;
    for program in ["usr/bin/buildah", "usr/bin/podman"] {
        root.enter_in(&directory.path().join("bin"), program)?;
    }
    let settings = directory.path().join("containers.conf");
    fs::write(&settings, SETTINGS).context("cannot write settings of podman")?;
    let (document, name) = RECIPE;
    let script = format!("{PLACE}\ncd pvrdma\n{}", recipe(document, name)?);
    let path = format!("{}:{}", directory.path().join("bin").display(), std::env::var("PATH").unwrap_or_default());
    let output = Command::new("unshare")
        .args(["--mount", "--pid", "--fork", "--kill-child", "bash", "-euc", &script, "container"])
        .args([&root.path(""), directory.path()])
        .env("PATH", path)
        .env("TMPDIR", directory.path())
        .env("CONTAINERS_CONF_OVERRIDE", settings)
        .env("PVRDMA_BED_DIR", image.directory())
        .current_dir(directory.path())
        .stdin(Stdio::null())
        .output()
        .context("cannot run unshare")?;
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    ensure!(output.status.success(), "{}: {said}", output.status);
    lab::ensure_played(&folder, &said)?;
    Ok(lab::up_after(&said))
}

/// Returns the folder of this program, which contains the others too.
fn programs() -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this program")?;
    let programs = own.parent().context("this program is nowhere")?;
    // Builds both if cargo is available.
    daemon::program()?;
    daemon::program_of("pvrdma-lab")?;
    Ok(programs.to_owned())
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
