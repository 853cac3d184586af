//! `pvrdma-lab run --rootfs`: the archive of a small container image becomes the system of two guests, for a user
//! without privileges. A suite of three programs runs in it.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::case::Case;
use super::lab::{as_nobody, ensure_status, said, up_after};
use super::rootfs_debian;
use crate::image::GuestImage;

/// Builds the archive (an OCI layout with two layers) from files of the guests' system, and the suite.
const BUILD: &str = r#"
guest=$1 busybox=$2
libraries=$guest/usr/lib/x86_64-linux-gnu
mkdir -p lower/usr/{bin,lib/x86_64-linux-gnu,lib64} lower/etc/libibverbs.d upper blobs/sha256 run/suite
ln -s usr/bin usr/lib usr/lib64 lower/
cp "$guest"/usr/bin/{ibv_rc_pingpong,ibv_devinfo} lower/usr/bin/
cp "$guest/usr/bin/dash" lower/usr/bin/sh
cp "$busybox" lower/usr/bin/busybox
for applet in cat id sleep stat; do ln -s busybox "lower/usr/bin/$applet"; done
cp "$libraries/ld-linux-x86-64.so.2" lower/usr/lib64/
cp -a "$libraries"/libibverbs lower/usr/lib/x86_64-linux-gnu/
cp "$guest/etc/libibverbs.d/vmw_pvrdma.driver" lower/etc/libibverbs.d/
for program in "$guest"/usr/bin/{ibv_rc_pingpong,ibv_devinfo,dash} "$libraries"/libibverbs/libvmw_pvrdma-*.so; do
    "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" --list "$program" |
        sed -n 's/.*=> \([^ ]*\) (.*/\1/p'
done | sort -u | xargs cp -L -t lower/usr/lib/x86_64-linux-gnu
echo gone > lower/hidden
echo program > lower/usr/bin/su
chmod 4711 lower/usr/bin/su
touch upper/.wh.hidden
echo here > upper/in-the-tree
tar -C lower --owner=0 --group=0 --numeric-owner -cf blobs/sha256/aa .
tar -C upper --owner=0 --group=0 --numeric-owner -czf blobs/sha256/bb .
echo '{"architecture":"amd64","os":"linux","config":{"Env":["OF_THE_IMAGE=yes"]}}' > blobs/sha256/cc
echo '{"config":{"digest":"sha256:cc"},"layers":[{"digest":"sha256:aa"},{"digest":"sha256:bb"}]}' > blobs/sha256/dd
echo '{"manifests":[{"digest":"sha256:dd"}]}' > index.json
tar -cf run/image.tar index.json blobs
cat > run/suite/10-pingpong << 'END'
#!/bin/sh
set -eu
test "$OF_THE_IMAGE" = yes
test "$(cat /in-the-tree)" = here
test ! -e /hidden
test ! -e /bed
test ! -e /.pvrdma-lab
test "$(id -u)" = 0
test "$(stat -c '%a %u' /usr/bin/su)" = '4711 0'
test -d "/lib/modules/$(cat /proc/sys/kernel/osrelease)"
echo "$PVRDMA_LAB_NUMBER" > "ran-$PVRDMA_LAB_NUMBER"
if [ "$PVRDMA_LAB_NUMBER" = 0 ]; then
    ibv_rc_pingpong -g "$PVRDMA_LAB_GID_INDEX"
else
    until ibv_rc_pingpong -g "$PVRDMA_LAB_GID_INDEX" vm0; do sleep 0.2; done
fi
END
printf '#!/bin/sh\nexit 77\n' > run/suite/20-skipped
printf '#!/bin/sh\necho "<last words>"\n[ $PVRDMA_LAB_NUMBER = 0 ] && exec sleep 600\nexit 3\n' > run/suite/30-failed
chmod 755 run/suite/*
"#;

/// The tests.
pub(crate) fn cases() -> Vec<Case> {
    let mut cases = vec![Case::alone("lab/rootfs", rootfs)];
    cases.extend(rootfs_debian::cases());
    cases
}

/// Boots the archive, and checks the results in each form.
fn rootfs(image: &GuestImage) -> Result<String> {
    let folder = tempfile::tempdir().context("cannot create a directory")?;
    let (guest, busybox) = (image.directory().join("guest"), image.directory().join("kernel/usr/bin/busybox"));
    let built = Command::new("bash")
        .args(["-euo", "pipefail", "-c", BUILD, "build"])
        .args([&guest, &busybox])
        .current_dir(folder.path())
        .output()
        .context("cannot run bash")?;
    ensure!(built.status.success(), "no archive: {}", said(&built));
    let arguments = "--rootfs image.tar --suite suite --junit junit.xml --annotations --logs logs";
    let output = as_nobody(image, folder.path(), arguments)?;
    ensure_status(&output, 3)?;
    let text = said(&output);
    for line in [
        "::group::vm0: 10-pingpong passed",
        // The guest that skips first ends the program in the other one.
        "::20-skipped skipped",
        "::error title=pvrdma-lab%3A vm1::30-failed ended with status 3",
        "<last words>",
    ] {
        ensure!(text.contains(line), "no '{line}': {text}");
    }
    ensure!(text.lines().filter(|line| line.contains("iters in")).count() == 2, "no two results: {text}");
    for file in ["ran-0", "ran-1", "logs/10-pingpong.vm1.output", "logs/vm0.console"] {
        ensure!(folder.path().join("run").join(file).exists(), "{file} is not there: {text}");
    }
    check_junit(&folder.path().join("run/junit.xml"))?;
    Ok(up_after(&text))
}

/// Checks the counts and the failure; a test of the lab parses such a file.
fn check_junit(path: &Path) -> Result<()> {
    let text = fs::read_to_string(path).context("no file of JUnit")?;
    let counts = r#"<testsuites name="pvrdma-lab" tests="6" failures="1" errors="0""#;
    ensure!(text.contains(counts), "no '{counts}': {text}");
    let failed = text.split("<testcase ").filter(|case| case.contains("<failure")).collect::<Vec<_>>();
    let [failed] = failed.as_slice() else { bail!("no single failure: {text}") };
    ensure!(failed.starts_with(r#"classname="vm1" name="30-failed""#), "another failure: {text}");
    ensure!(failed.contains("&lt;last words&gt;"), "no output: {text}");
    Ok(())
}
