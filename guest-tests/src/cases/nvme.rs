//! NVMe over RDMA: a kernel protocol that registers memory fast and invalidates it remotely.

use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Context, Result};

use super::case::Case;
use crate::pair::{Link, Pair};
use crate::vm::Vm;

/// The target in guest a, the host in guest b.
pub(crate) fn cases() -> Vec<Case> {
    vec![Case::new("nvme/fio-verify", fio_verify)]
}

fn fio_verify(pair: &mut Pair, link: &Link) -> Result<String> {
    between([pair.a(), pair.b()], link.ip[0], 48)
}

/// Runs the target in the first guest, at this address, and the host in the second, which verifies `mib` MiB.
pub(crate) fn between(vms: [&Vm; 2], ip: Ipv4Addr, mib: u32) -> Result<String> {
    let result = connect(vms, ip).and_then(|()| {
        let output = vms[1].spawn(&verify(mib, 1))?.wait_success(Duration::from_secs(180))?;
        Ok(speeds(&output))
    });
    // The host disconnects even after a failure, because the next case needs a device without users.
    let ended = disconnect(vms);
    let speeds = result?;
    ended?;
    Ok(speeds)
}

/// Starts the target in the first guest, at this address, and connects the host in the second.
pub(super) fn connect([a, b]: [&Vm; 2], ip: Ipv4Addr) -> Result<()> {
    a.run(&target_script(ip))?;
    b.run("modprobe nvme_rdma")?;
    b.run(&format!(
        "nvme connect -t rdma -a {ip} -s 4420 -n guest-tests --nr-io-queues=1 \
         --hostnqn=nqn.2014-08.org.nvmexpress:uuid:00000000-0000-0000-0000-00000000000b \
         --hostid=00000000-0000-0000-0000-00000000000b"
    ))?;
    b.wait_until("[ -b /dev/nvme0n1 ]", Duration::from_secs(20))
}

/// Disconnects, and stops the target that [`connect`] has started.
pub(super) fn disconnect([a, b]: [&Vm; 2]) -> Result<()> {
    let disconnect = b.exec("nvme disconnect -n guest-tests", Duration::from_secs(60));
    let remove = a.exec(REMOVE_TARGET, Duration::from_secs(60));
    disconnect.context("cannot disconnect")?;
    remove.context("cannot remove the target")?;
    Ok(())
}

/// Returns the command that writes `mib` MiB to the disk of the host and verifies them, `loops` times.
pub(super) fn verify(mib: u32, loops: u32) -> String {
    format!(
        "fio --name=verify --filename=/dev/nvme0n1 --direct=1 --ioengine=libaio --iodepth=8 --rw=randwrite \
         --bsrange=4k-256k --size={mib}m --loops={loops} --verify=crc32c --do_verify=1 --verify_fatal=1 \
         --randseed=7 2>&1",
    )
}

/// Returns the bandwidths that `fio` has printed.
fn speeds(output: &str) -> String {
    output
        .lines()
        .filter(|line| line.contains("READ: bw=") || line.contains("WRITE: bw="))
        .map(|line| line.split(',').next().unwrap_or(line).trim())
        .collect::<Vec<_>>()
        .join(", ")
}

fn target_script(ip: Ipv4Addr) -> String {
    format!(
        "set -e
         modprobe brd rd_nr=1 rd_size=65536
         modprobe nvmet_rdma
         cd /sys/kernel/config/nvmet
         mkdir subsystems/guest-tests
         echo 1 > subsystems/guest-tests/attr_allow_any_host
         mkdir subsystems/guest-tests/namespaces/1
         echo -n /dev/ram0 > subsystems/guest-tests/namespaces/1/device_path
         echo 1 > subsystems/guest-tests/namespaces/1/enable
         mkdir ports/1
         echo ipv4 > ports/1/addr_adrfam
         echo rdma > ports/1/addr_trtype
         echo 4420 > ports/1/addr_trsvcid
         echo {ip} > ports/1/addr_traddr
         ln -s /sys/kernel/config/nvmet/subsystems/guest-tests ports/1/subsystems/guest-tests"
    )
}

const REMOVE_TARGET: &str = "
    cd /sys/kernel/config/nvmet
    rm -f ports/1/subsystems/guest-tests
    rmdir ports/1
    rmdir subsystems/guest-tests/namespaces/1 subsystems/guest-tests
    modprobe -r nvmet_rdma brd";
