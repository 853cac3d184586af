//! RDMA users in the kernel: files, disks and sockets.

use std::rc::Rc;

use anyhow::{Result, ensure};

use super::pair::ApplicationsPair;
use crate::cases::case::Case;
use crate::cases::exchange::Ready;
use crate::cases::shared::Shared;

/// Address of guest b, the server.
const SERVER: &str = "192.168.77.2";
/// Address of guest a.
const CLIENT: &str = "192.168.77.1";

pub(super) fn cases(shared: &Rc<Shared<ApplicationsPair>>) -> Vec<Case> {
    vec![
        shared.case("applications/nfs", nfs),
        shared.case("applications/iser", iser),
        shared.case("applications/srp", srp),
        shared.case("applications/rds", rds),
        // Without named networks, SMC-R requests RoCE v1.
        Shared::new(|image| ApplicationsPair::boot_with(image, ",roce=v1")).case("applications/smc-r", smc),
    ]
}

/// Files of 1 to 4 million bytes are written, read after the client's cache is dropped, and compared.
fn nfs(pair: &ApplicationsPair) -> Result<String> {
    pair.prepare(
        "set -e
         modprobe nfsd; modprobe rpcrdma
         mkdir -p /srv/export /var/lib/nfs/rpc_pipefs
         mount -t tmpfs tmpfs /srv/export
         mount -t nfsd nfsd /proc/fs/nfsd 2>/dev/null || true
         echo '/srv/export *(rw,no_root_squash,fsid=0,insecure,no_subtree_check)' > /etc/exports
         exportfs -ra
         # As short as possible: no client has anything to reclaim.
         echo 10 > /proc/fs/nfsd/nfsv4gracetime
         rpc.mountd -N 3
         rpc.nfsd -N 3 -V 4.2 --rdma=20049 2",
    )?;
    let done = pair.command(&format!(
        "set -e
         modprobe rpcrdma; modprobe nfsv4
         mount -t nfs4 -o rdma,port=20049,vers=4.2 {SERVER}:/ /mnt
         grep -q 'proto=rdma' /proc/mounts
         head -c 4000001 /dev/urandom > /tmp/sent
         cp /tmp/sent /mnt/came
         sync -f /mnt
         echo 3 > /proc/sys/vm/drop_caches
         umount /mnt
         mount -t nfs4 -o rdma,port=20049,vers=4.2 {SERVER}:/ /mnt
         cmp /tmp/sent /mnt/came
         umount /mnt"
    ));
    let ended = pair.prepare("rpc.nfsd 0; pkill rpc.mountd; exportfs -ua; umount /srv/export");
    done?;
    ended?;
    Ok("4 MB".to_owned())
}

/// A disk of the kernel's target, verified by fio.
fn iser(pair: &ApplicationsPair) -> Result<String> {
    pair.prepare(&format!(
        "set -e
         modprobe ib_isert
         target=/sys/kernel/config/target
         mkdir -p $target/core/rd_mcp_0/disk $target/iscsi
         echo rd_pages=8192 > $target/core/rd_mcp_0/disk/control
         echo 1 > $target/core/rd_mcp_0/disk/enable
         tpg=$target/iscsi/iqn.2024-01.test:disk/tpgt_1
         mkdir -p $tpg/lun/lun_0 $tpg/np/{SERVER}:3260
         ln -s $target/core/rd_mcp_0/disk $tpg/lun/lun_0/disk
         echo 1 > $tpg/np/{SERVER}:3260/iser
         for name in authentication demo_mode_write_protect; do echo 0 > $tpg/attrib/$name; done
         for name in generate_node_acls cache_dynamic_acls; do echo 1 > $tpg/attrib/$name; done
         echo 1 > $tpg/enable"
    ))?;
    let done = pair.command(&format!(
        "set -e
         modprobe ib_iser; modprobe sd_mod
         mkdir -p /run/lock/iscsi
         echo InitiatorName=iqn.2024-01.test:a > /etc/iscsi/initiatorname.iscsi
         iscsid
         node='-m node -T iqn.2024-01.test:disk -p {SERVER}'
         iscsiadm $node -o new -I iser
         iscsiadm $node --login
         until [ -b /dev/sda ]; do sleep 0.05; done
         {FIO}
         iscsiadm $node --logout
         pkill iscsid"
    ));
    let ended = pair.prepare(&format!(
        "set -e
         target=/sys/kernel/config/target
         tpg=$target/iscsi/iqn.2024-01.test:disk/tpgt_1
         echo 0 > $tpg/enable
         rm $tpg/lun/lun_0/disk
         rmdir $tpg/lun/lun_0 $tpg/np/{SERVER}:3260 $tpg $target/iscsi/iqn.2024-01.test:disk
         rmdir $target/iscsi $target/core/rd_mcp_0/disk $target/core/rd_mcp_0"
    ));
    done?;
    ended?;
    Ok("16 MB verified".to_owned())
}

/// The same disk over SRP, whose target listens with the connection manager.
fn srp(pair: &ApplicationsPair) -> Result<String> {
    let guid = "cat /sys/class/infiniband/vmw_pvrdma0/node_guid";
    let initiator = pair.command(guid)?.trim().replace(':', "");
    let guid = pair.prepare(guid)?.trim().replace(':', "");
    pair.prepare(&format!(
        "set -e
         modprobe ib_srpt
         target=/sys/kernel/config/target
         mkdir -p $target/core/rd_mcp_1/disk $target/srpt
         echo 5555 > $target/srpt/discovery_auth/rdma_cm_port
         echo rd_pages=8192 > $target/core/rd_mcp_1/disk/control
         echo 1 > $target/core/rd_mcp_1/disk/enable
         tpg=$target/srpt/0xfe80000000000000{guid}/tpg
         mkdir -p $tpg/lun/lun_0
         ln -s $target/core/rd_mcp_1/disk $tpg/lun/lun_0/disk
         acl=$tpg/acls/0x0000000000000000{initiator}
         mkdir -p $acl/lun_0
         ln -s $tpg/lun/lun_0 $acl/lun_0/disk
         echo 1 > $tpg/enable"
    ))?;
    pair.command(&format!(
        "set -e
         modprobe ib_srp; modprobe sd_mod
         echo 'id_ext={guid},ioc_guid={guid},dest={SERVER}:5555' > /sys/class/infiniband_srp/srp-vmw_pvrdma0-1/add_target
         until [ -b /dev/sda ]; do sleep 0.05; done
         {FIO}
         for port in /sys/class/srp_remote_ports/*; do echo 1 > $port/delete; done"
    ))?;
    Ok("16 MB verified".to_owned())
}

/// Writes everywhere, reads it again and compares.
const FIO: &str = "fio --name=verify --filename=/dev/sda --direct=1 --ioengine=libaio --iodepth=8 --rw=randwrite \
    --bsrange=4k-256k --size=16m --verify=crc32c --do_verify=1 --verify_fatal=1 --randseed=7 > /tmp/fio 2>&1 || \
    { cat /tmp/fio; exit 1; }";

/// Datagrams in both directions at once, every byte compared. There is no fallback to TCP, which is a separate module.
fn rds(pair: &ApplicationsPair) -> Result<String> {
    let load = "modprobe rds_rdma";
    pair.prepare(load)?;
    pair.command(load)?;
    pair.run(&sockets("rds", "listen"), Ready::ConnectionManager, &sockets("rds", "connect"))?;
    Ok("8 MB each way".to_owned())
}

/// A stream that the kernel would carry over RDMA, but cannot with this driver: right after it has created a QP, SMC
/// queries the sizes of its queues (`smc_wr_remember_qp_attr`), and `pvrdma_query_qp` leaves them out of its answer for
/// a QP in RESET. So SMC prepares no work request, sends an empty one, gets no response and falls back to TCP.
fn smc(pair: &ApplicationsPair) -> Result<String> {
    // The module reports the device at warning level.
    let load = "modprobe smc && modprobe smc_diag && dmesg --clear";
    pair.prepare(load)?;
    pair.command(load)?;
    let client = pair.refused(&sockets("smc", "listen"), Ready::Tcp(7001), &sockets("smc", "connect"))?;
    // `SMC_CLC_DECL_TIMEOUT_CL`: no message arrived over the link.
    ensure!(client.contains("is not RDMA, for the reason 0x2010000"), "SMC does something else now: {client}");
    Ok("does not work with this driver: falls back to TCP".to_owned())
}

/// Returns the command that compares, for one end.
fn sockets(family: &str, side: &str) -> String {
    let (own, other) = if side == "listen" { (SERVER, CLIENT) } else { (CLIENT, SERVER) };
    format!("kernel_sockets {family} {side} {own} {other}")
}
