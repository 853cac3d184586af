//! Access to a device's socket: QEMU as another user than the daemon.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

use anyhow::{Context, Result, bail};

use super::case::{Case, skip};
use crate::daemon::{Daemon, DaemonDevice};
use crate::image::GuestImage;
use crate::vm::{RunAs, Vm, VmBuilder};

/// Ids that need not belong to a user or group of the host.
const USER: u32 = 47_110;
const GROUP: u32 = 47_111;
const OTHER_GROUP: u32 = 47_112;

const MAC: &str = "52:54:00:00:00:01";

/// A socket with `group=`.
pub(crate) fn cases() -> Vec<Case> {
    vec![Case::alone("sockets/group", group)]
}

/// A QEMU of another user can use the device if it is in the group of the socket, and is refused if it is not.
fn group(image: &GuestImage) -> Result<String> {
    if !rustix::process::geteuid().is_root() {
        return Err(skip("QEMU as another user needs root"));
    }
    let directory = tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
    // The socket's folder belongs to the daemon, the machine's to QEMU.
    let [sockets, own] = ["sockets", "vm"].map(|name| directory.path().join(name));
    for (folder, user) in [(&sockets, 0), (&own, USER)] {
        fs::create_dir(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755))?;
        chown(folder, Some(user), None)?;
    }
    let device = DaemonDevice {
        name: "vm".to_owned(),
        socket: sockets.join("vm.sock"),
        mac: MAC.to_owned(),
        options: format!(",group={GROUP}"),
    };
    let daemon = Daemon::start(directory.path(), std::slice::from_ref(&device))?;
    let start = |group: u32| {
        let user = RunAs { user: USER, groups: vec![group] };
        VmBuilder::new(image, &own).user_network(MAC).pvrdma_socket(&device.socket).run_as(user).start()
    };
    refused(start(OTHER_GROUP))?;
    let connections = connections(&daemon)?;
    if connections != 0 {
        bail!("{connections} connections from outside of the group\n{}", daemon.log_tail());
    }
    let vm = start(GROUP)?;
    let result = vm.wait_boot().and_then(|()| {
        vm.run("modprobe -a vmxnet3 ib_uverbs vmw_pvrdma && ibv_devinfo -d vmw_pvrdma0 | grep -w PORT_ACTIVE")
    });
    result.with_context(|| format!("{}\n{}", vm.diagnosis(), daemon.log_tail()))?;
    let user = process_user(&vm)?;
    if user != USER {
        bail!("QEMU runs as user {user}");
    }
    Ok(format!("user {USER} in group {GROUP} works, in group {OTHER_GROUP} is refused"))
}

/// Fails unless QEMU ended because it may not connect to the device.
fn refused(started: Result<Vm>) -> Result<()> {
    let said = match started {
        Ok(vm) => match vm.wait_boot() {
            Ok(()) => bail!("a QEMU outside of the group has the device"),
            Err(_) => vm.qemu_messages(),
        },
        // QEMU may end before it has connected to its agent's socket.
        Err(error) => format!("{error:#}"),
    };
    if !said.contains("Permission denied") {
        bail!("QEMU ended for another reason than the socket's permissions:\n{said}");
    }
    Ok(())
}

/// Returns the number of clients that the daemon's device has had.
fn connections(daemon: &Daemon) -> Result<u64> {
    let status = daemon.status()?;
    let find = |value: &serde_json::Value| value.pointer("/devices/0/counters/client_connections").cloned();
    find(&status).and_then(|count| count.as_u64()).with_context(|| format!("no client_connections in {status}"))
}

/// Returns the real user id of a machine's QEMU.
fn process_user(vm: &Vm) -> Result<u32> {
    let path = format!("/proc/{}/status", vm.process_id());
    let status = fs::read_to_string(Path::new(&path)).with_context(|| format!("cannot read {path}"))?;
    let numbers = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    let first = numbers.and_then(|numbers| numbers.split_whitespace().next());
    first.and_then(|number| number.parse().ok()).with_context(|| format!("no user in {path}"))
}
