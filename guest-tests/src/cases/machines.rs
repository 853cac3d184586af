//! Machines with other configurations than the shared pair: other memory, more processors, an IOMMU, QEMU's own write
//! mode.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::case::{Case, skip};
use super::exchange::{Programs, Ready, finish};
use super::pingpong::pingpong;
use crate::endpoints::{gid_index, listens};
use crate::guest_with_daemon::{GuestWithDaemon, MAC, addresses, cable, datagrams};
use crate::image::GuestImage;
use crate::pair::{LinkKind, PVRDMA_DEVICE, Pair, PairOptions};
use crate::vm::MemoryKind;

/// One test per configuration.
pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::alone("machine/iommu", |image| {
            traffic(image, PairOptions { iommu: true, rxe: false, ..PairOptions::default() })
        }),
        Case::alone("machine/no-posted-writes", |image| {
            let vfio_user = vec![("x-no-posted-writes", serde_json::Value::Bool(true))];
            traffic(image, PairOptions { vfio_user, rxe: false, ..PairOptions::default() })
        }),
        Case::alone("machine/hot-added", |image| {
            traffic(image, PairOptions { hot_plug: true, rxe: false, ..PairOptions::default() })
        }),
        Case::alone("machine/qemu-vmxnet3", |image| {
            traffic(image, PairOptions { qemu_nic: true, rxe: false, ..PairOptions::default() })
        }),
        Case::alone("machine/roce-v1", |image| {
            traffic(image, PairOptions { device_options: ",roce=v1".to_owned(), rxe: false, ..PairOptions::default() })
        }),
        Case::alone("machine/two-processors", two_processors),
        Case::alone("machine/hugetlb", hugetlb),
        Case::alone("machine/private-memory-refused", private_memory),
        Case::alone("slow/16-gib", sixteen_gib).slow("takes 17 GiB of memory; runs when asked for: --only 16-gib"),
    ]
}

fn traffic(image: &GuestImage, options: PairOptions) -> Result<String> {
    let pair = Pair::boot(image, &options)?;
    let link = pair.link(LinkKind::Pvrdma)?;
    pingpong(&pair.endpoints(&link), 0, "ibv_rc_pingpong", "-c")
        .and_then(|_| pingpong(&pair.endpoints(&link), 1, "ibv_rc_pingpong", "-c -s 1048576 -n 20"))
        .with_context(|| pair.diagnosis())
}

/// Threads that run at the same time, with their own queues and with shared ones.
fn two_processors(image: &GuestImage) -> Result<String> {
    let pair = Pair::boot(image, &PairOptions { cpus: [2; 2], rxe: false, ..PairOptions::default() })?;
    let link = pair.link(LinkKind::Pvrdma)?;
    let command = |vm: usize| format!("threads {} {} 1000", link.device, link.gid_index[vm]);
    let programs = Programs {
        server_vm: pair.b(),
        server: command(1),
        ready: Ready::Tcp(18601),
        client_vm: pair.a(),
        client: format!("{} {}", command(0), link.ip[1]),
        timeout: Duration::from_secs(120),
    };
    let output = programs.run().with_context(|| pair.diagnosis())?;
    let result = output.client.lines().find(|line| line.contains("on 2 processors"));
    Ok(result.with_context(|| format!("no result in the client's output:\n{}", output.client))?.to_owned())
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
        // Return the partial allocation.
        let _ = fs::write(POOL, before.to_string());
        return Err(skip(format!("cannot reserve {WANTED} huge pages (needs root and free memory)")));
    }
    let options =
        PairOptions { memory_kind: MemoryKind::Hugetlb, memory_mib: 512, rxe: false, ..PairOptions::default() };
    let result = traffic(image, options);
    fs::write(POOL, before.to_string()).context("cannot give the huge pages back")?;
    result
}

/// The device works before all memory is populated; the note contains the duration of both.
fn sixteen_gib(image: &GuestImage) -> Result<String> {
    const MIB: u32 = 16 << 10;
    let available = fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let available = available.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.split_whitespace().next());
    if available.and_then(|kib| kib.parse::<u64>().ok()).is_none_or(|kib| kib < 18 << 20) {
        return Err(skip("needs 18 GiB of unused memory"));
    }
    let directory = tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
    let cable = cable(directory.path());
    let uplink = format!("uplink={}", datagrams(&cable[0], &cable[1]));
    let started = Instant::now();
    let options = format!("pin=all,{uplink}");
    let guest = GuestWithDaemon::start_with(image, directory.path(), "large", MAC[0], &options, MIB)?;
    let run = || -> Result<String> {
        guest.bring_up(&addresses(0), 1500)?;
        let up = started.elapsed();
        let index = gid_index(guest.vm(), PVRDMA_DEVICE, addresses(0)[0])?;
        let command = format!("ib_write_bw -F -d {PVRDMA_DEVICE} -x {index} -n 1000 -s 65536");
        let server = guest.vm().spawn(&command)?;
        guest.vm().run(&format!("until {}; do sleep 0.02; done", listens(18515)))?;
        let client = guest.vm().spawn(&format!("{command} {}", addresses(0)[0]))?;
        finish(&server, &client, Duration::from_secs(60))?;
        let deadline = started + Duration::from_secs(300);
        // The range of shadowed ROMs is never written, and not locked.
        let all = u64::from(MIB - 1) << 20;
        while guest.device()?["memory"]["pinned_bytes"].as_u64().is_none_or(|bytes| bytes < all) {
            if Instant::now() > deadline {
                bail!("not all of it is locked: {}", guest.device()?["memory"]);
            }
            thread::sleep(Duration::from_millis(100));
        }
        Ok(format!("up {:.1} s, resident {:.1} s after its start", up.as_secs_f64(), started.elapsed().as_secs_f64()))
    };
    run().with_context(|| guest.diagnosis())
}

/// The driver must not find a working device, and the daemon must report the reason and continue.
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
