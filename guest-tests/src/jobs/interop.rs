//! Another implementation at the other end: guest a has our device, guest b the kernel's `rdma_rxe`, and the daemon stands
//! between a's network card and b's.

use std::time::Duration;

use anyhow::{Context, Result};

use super::case::Case;
use super::exchange::{Programs, Ready};
use crate::bed::Bed;
use crate::daemon::{Daemon, DaemonDevice};
use crate::pair::{gid_index, network_script, wait_for_gid};
use crate::vm::{Nic, NicModel, Vm};

const IP: [&str; 2] = ["192.168.79.1", "192.168.79.2"];
const DEVICE: [&str; 2] = ["vmw_pvrdma0", "rxe0"];
const MAC: [&str; 2] = ["52:54:00:00:02:01", "52:54:00:00:02:02"];

/// `(program, options)`, each with both guests as server.
const PROGRAMS: [(&str, &str); 5] = [
    ("ibv_rc_pingpong", "-m 1024 -n 200"),
    ("ibv_rc_pingpong", "-m 1024 -c -s 65536 -n 20"),
    ("ibv_rc_pingpong", "-m 512 -e -s 1000 -n 50"),
    ("ibv_ud_pingpong", "-s 1024 -n 200"),
    ("ibv_srq_pingpong", "-m 1024 -n 50 -q 4"),
];

/// One pair of machines for all of it.
pub(crate) fn cases() -> Vec<Case> {
    vec![Case::alone("interop/rdma_rxe", interop)]
}

fn interop(bed: &Bed) -> Result<String> {
    let directory = tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
    let path = |name: &str| directory.path().join(name);
    let text = |name: &str| path(name).display().to_string();
    let device = DaemonDevice {
        name: "vm0".to_owned(),
        socket: path("a.pvrdma"),
        mac: MAC[0].to_owned(),
        options: format!(
            ",nic=unix-dgram:{}:{},uplink=unix-dgram:{}:{}",
            text("nic"),
            text("a.net"),
            text("uplink"),
            text("b.net")
        ),
    };
    let daemon = Daemon::start(directory.path(), &[device])?;
    let nic = |index: usize, model, local: &str, remote: &str| Nic {
        model,
        mac: MAC[index].to_owned(),
        local: path(local),
        remote: path(remote),
    };
    let a = Vm::builder(bed, directory.path())
        .name("a")
        .nic(nic(0, NicModel::Vmxnet3, "a.net", "nic"))
        .pvrdma_socket(&path("a.pvrdma"))
        .start()?;
    let b = Vm::builder(bed, directory.path()).name("b").nic(nic(1, NicModel::Virtio, "b.net", "uplink")).start()?;
    let vms = [&a, &b];
    let run = || -> Result<String> {
        for vm in vms {
            vm.wait_boot()?;
        }
        a.run(&network_script("vmxnet3", IP[0]))?;
        a.run("modprobe ib_uverbs && modprobe rdma_ucm && modprobe vmw_pvrdma")?;
        b.run(&network_script("virtio_net", IP[1]))?;
        b.run("modprobe rdma_rxe && rdma link add rxe0 type rxe netdev $(cat /run/nic-virtio_net)")?;
        let mut gids = [0; 2];
        for index in [0, 1] {
            wait_for_gid(vms[index], DEVICE[index], IP[index])?;
            gids[index] = gid_index(vms[index], DEVICE[index], IP[index])?;
        }
        let mut done = 0;
        for (program, options) in PROGRAMS {
            for server in [1, 0] {
                exchange(vms, gids, server, program, options)
                    .with_context(|| format!("{program} {options}, server {}", vms[server].name()))?;
                done += 1;
            }
        }
        let status = daemon.status()?;
        let adapter = &status["devices"][0]["adapter"];
        let sent = adapter["wire_frames_sent"].as_u64().context("the daemon does not count frames")?;
        Ok(format!("{done} programs, {sent} frames sent, {} sent again", adapter["wire_resent"]))
    };
    run().with_context(|| {
        let status = daemon.status().map_or_else(|error| error.to_string(), |status| format!("{status:#}"));
        format!("{}\n{}\n--- pvrdmad\n{}\n{status}", a.diagnosis(), b.diagnosis(), daemon.log_tail())
    })
}

fn exchange(vms: [&Vm; 2], gids: [u32; 2], server: usize, program: &str, options: &str) -> Result<()> {
    let client = 1 - server;
    let command = |vm: usize| format!("{program} -d {} -g {} {options}", DEVICE[vm], gids[vm]);
    Programs {
        server_vm: vms[server],
        server: command(server),
        ready: Ready::Tcp(18515),
        client_vm: vms[client],
        client: format!("{} {}", command(client), IP[server]),
        timeout: Duration::from_secs(60),
    }
    .run()
    .map(|_| ())
}
