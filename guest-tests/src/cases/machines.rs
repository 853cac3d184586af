//! Machines that are built in other ways than the shared pair: other memory, an IOMMU, QEMU's own write mode.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::case::{Case, skip};
use super::pingpong::pingpong;
use crate::image::GuestImage;
use crate::pair::{LinkKind, Pair, PairOptions};
use crate::vm::MemoryKind;

/// One test per way.
pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::alone("machine/iommu", |image| {
            traffic(image, PairOptions { iommu: true, rxe: false, ..PairOptions::default() })
        }),
        Case::alone("machine/no-posted-writes", |image| {
            let vfio_user = vec![("x-no-posted-writes", serde_json::Value::Bool(true))];
            traffic(image, PairOptions { vfio_user, rxe: false, ..PairOptions::default() })
        }),
        Case::alone("machine/roce-v1", |image| {
            traffic(image, PairOptions { device_options: ",roce=v1".to_owned(), rxe: false, ..PairOptions::default() })
        }),
        Case::alone("machine/hugetlb", hugetlb),
        Case::alone("machine/private-memory-refused", private_memory),
    ]
}

fn traffic(image: &GuestImage, options: PairOptions) -> Result<String> {
    let pair = Pair::boot(image, &options)?;
    let link = pair.link(LinkKind::Pvrdma)?;
    pingpong(&pair.endpoints(&link), 0, "ibv_rc_pingpong", "-c")
        .and_then(|_| pingpong(&pair.endpoints(&link), 1, "ibv_rc_pingpong", "-c -s 1048576 -n 20"))
        .with_context(|| pair.diagnosis())
}

fn hugetlb(image: &GuestImage) -> Result<String> {
    const POOL: &str = "/proc/sys/vm/nr_hugepages";
    // Two guests of 512 MiB in pages of 2 MiB.
    const WANTED: u64 = 512;
    let read = || -> Result<u64> {
        let text = fs::read_to_string(POOL).map_err(|error| skip(format!("no huge pages here: {error}")))?;
        text.trim().parse().context("the number of huge pages is none")
    };
    let before = read()?;
    if fs::write(POOL, (before + WANTED).to_string()).is_err() || read()? < before + WANTED {
        // Give back what part of it there was.
        let _ = fs::write(POOL, before.to_string());
        return Err(skip(format!("cannot reserve {WANTED} huge pages (needs root and free memory)")));
    }
    let options =
        PairOptions { memory_kind: MemoryKind::Hugetlb, memory_mib: 512, rxe: false, ..PairOptions::default() };
    let result = traffic(image, options);
    fs::write(POOL, before.to_string()).context("cannot give the huge pages back")?;
    result
}

/// The driver must not find a working device, and the daemon must say why and go on living.
fn private_memory(image: &GuestImage) -> Result<String> {
    let options = PairOptions { memory_kind: MemoryKind::Private, rxe: false, ..PairOptions::default() };
    let pair = Pair::boot_without_driver(image, &options)?;
    let a = pair.a();
    a.run("modprobe vmxnet3 && modprobe ib_uverbs")?;
    // modprobe itself succeeds: the module stays loaded without a device.
    a.exec("modprobe vmw_pvrdma", Duration::from_secs(60))?;
    let devices = a.run("ls /sys/class/infiniband")?;
    if !devices.trim().is_empty() {
        bail!("the driver works on private memory: {devices}");
    }
    let daemon = pair.daemon().context("there is no daemon")?;
    daemon.status().context("the daemon does not answer any more")?;
    let log = daemon.log_tail();
    if !log.contains("private") && !log.contains("share") {
        bail!("the daemon does not say what is wrong:\n{log}");
    }
    Ok("refused, with the reason in the log".to_owned())
}
