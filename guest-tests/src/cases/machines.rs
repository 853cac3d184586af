//! Machines with other configurations than the shared pair: other memory, more processors, an IOMMU, QEMU's own write
//! mode, a second device; and machines that are suspended, or get more memory.

use std::fs;
use std::net::Ipv4Addr;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pvrdma_packet::MacAddr;

use super::case::{Case, skip};
use super::exchange::{Programs, Ready, finish};
use super::pingpong::pingpong;
use crate::endpoints::{Endpoints, gid_index, listens};
use crate::guest_with_daemon::{GuestWithDaemon, HostOptions, MAC, addresses, cable, datagrams};
use crate::image::GuestImage;
use crate::pair::{Link, LinkKind, PVRDMA_DEVICE, Pair, PairOptions};
use crate::vm::{MemoryKind, Vm};

/// Hint for cases that boot a pair of guests of their own.
const HALF_A_MINUTE: &str = "takes half a minute; runs when asked for by its name";
/// Name of a guest's second RDMA device.
const SECOND_DEVICE: &str = "vmw_pvrdma1";

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
        Case::alone("slow/no-msi", no_msi).slow(HALF_A_MINUTE),
        Case::alone("slow/two-devices", two_devices).slow(HALF_A_MINUTE),
        Case::alone("slow/memory-hot-plug", memory_hot_plug).slow(HALF_A_MINUTE),
        Case::alone("slow/suspend-to-ram", suspend_to_ram).slow(HALF_A_MINUTE),
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

/// The guest's kernel uses neither MSI-X nor MSI, so both functions use pins of their slot.
fn no_msi(image: &GuestImage) -> Result<String> {
    let device_options = ",intx=on".to_owned();
    let options = PairOptions { kernel_parameters: "pci=nomsi", device_options, rxe: false, ..PairOptions::default() };
    let pair = Pair::boot(image, &options)?;
    let link = pair.link(LinkKind::Pvrdma)?;
    let interrupts = pair.a().run("grep -E 'pvrdma|eth0' /proc/interrupts")?;
    ensure!(!interrupts.contains("MSI") && interrupts.contains("IO-APIC"), "{interrupts}");
    // The driver learns of commands by the pin, and of nothing else: programs must poll.
    let run = pingpong(&pair.endpoints(&link), 0, "ibv_rc_pingpong", "-c");
    run.with_context(|| pair.diagnosis())
}

/// A guest with two devices, each with its own interface and address, uses both at the same time.
fn two_devices(image: &GuestImage) -> Result<String> {
    const MAC: MacAddr = MacAddr([0x52, 0x54, 0, 0, 3, 1]);
    const IP: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 168, 76, 1), Ipv4Addr::new(192, 168, 76, 2)];
    let pair = Pair::boot(image, &PairOptions { empty_slot: true, rxe: false, ..PairOptions::default() })?;
    pair.add_device(0, "second", MAC)?;
    let second = format!("$(grep -l {MAC} /sys/class/net/*/address | cut -d/ -f5)");
    pair.a().wait_until(&format!("[ -n \"{second}\" ]"), Duration::from_secs(60))?;
    pair.a().run(&format!("ip link set {second} up && ip addr add {}/24 dev {second}", IP[0]))?;
    pair.b().run(&format!("ip addr add {}/24 dev eth0", IP[1]))?;
    let first = pair.link(LinkKind::Pvrdma)?;
    let [of_a, of_b] = [(pair.a(), SECOND_DEVICE, IP[0]), (pair.b(), PVRDMA_DEVICE, IP[1])]
        .map(|(vm, device, address)| gid_index(vm, device, address.into()));
    let second = Endpoints {
        device: [SECOND_DEVICE, PVRDMA_DEVICE],
        gid_index: [of_a?, of_b?],
        ip: IP.map(Into::into),
        ..pair.endpoints(&first)
    };
    beside_stream(&pair, &first, || {
        pingpong(&second, 0, "ibv_rc_pingpong", "-c")
            .and_then(|_| pingpong(&second, 1, "ibv_rc_pingpong", "-c -s 1048576 -n 20"))
    })
}

/// Runs `meanwhile` beside a stream of writes over a link, which is still running at its end.
fn beside_stream(pair: &Pair, link: &Link, meanwhile: impl FnOnce() -> Result<String>) -> Result<String> {
    let stream = format!("ib_write_bw -F -d {} -s 65536 -p 18620 -D 3600 -x", link.device);
    let server = pair.b().spawn(&format!("{stream} {}", link.gid_index[1]))?;
    pair.b().run(&format!("until {}; do sleep 0.02; done", listens(18620)))?;
    let client = pair.a().spawn(&format!("{stream} {} {}", link.gid_index[0], link.ip[1]))?;
    let result = meanwhile().with_context(|| pair.diagnosis())?;
    ensure!(server.is_running() && client.is_running(), "the stream ended:\n{}", client.output());
    for vm in pair.vms() {
        vm.kill_jobs()?;
    }
    Ok(result)
}

/// Memory is added while a connection is busy. The connection continues, and the new memory can be registered.
fn memory_hot_plug(image: &GuestImage) -> Result<String> {
    const MORE_MIB: u32 = 512;
    const TOTAL_KIB: &str = "sed -n 's/^MemTotal: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo";
    let parameters = "memhp_default_state=online";
    let options = PairOptions {
        more_memory_mib: MORE_MIB,
        kernel_parameters: parameters,
        memory_mib: 512,
        rxe: false,
        ..PairOptions::default()
    };
    let pair = Pair::boot(image, &options)?;
    let link = pair.link(LinkKind::Pvrdma)?;
    beside_stream(&pair, &link, || {
        let total = |vm: &Vm| -> Result<u64> {
            let kib = vm.run(TOTAL_KIB)?;
            kib.trim().parse().with_context(|| format!("no size: {kib}"))
        };
        let mut sizes = Vec::new();
        for vm in pair.vms() {
            let before = total(vm)?;
            vm.add_memory(MORE_MIB)?;
            let enough = before + u64::from(MORE_MIB) * 1024 * 9 / 10;
            vm.wait_until(&format!("[ $({TOTAL_KIB}) -ge {enough} ]"), Duration::from_secs(60))?;
            sizes.push(format!("{before} -> {} KiB", total(vm)?));
        }
        // More than there was: the buffer has to lie in the new memory, too.
        pingpong(&pair.endpoints(&link), 0, "ibv_rc_pingpong", "-s 402653184 -n 1")?;
        Ok(sizes.join(", "))
    })
}

/// The driver of the RDMA function cannot suspend, so it is unloaded before; that of the network function can.
fn suspend_to_ram(image: &GuestImage) -> Result<String> {
    let pair = Pair::boot(image, &PairOptions { rxe: false, ..PairOptions::default() })?;
    let a = pair.a();
    let run = || -> Result<String> {
        a.run("rmmod vmw_pvrdma && grep -q mem /sys/power/state")?;
        let sleep = a.spawn("echo mem >/sys/power/state")?;
        let deadline = Instant::now() + Duration::from_secs(60);
        while a.run_state()? != "suspended" {
            ensure!(Instant::now() < deadline, "the guest is {}: {}", a.run_state()?, sleep.output());
            thread::sleep(Duration::from_millis(20));
        }
        a.wake_up()?;
        sleep.wait_success(Duration::from_secs(60))?;
        a.run("modprobe vmw_pvrdma")?;
        let link = pair.link(LinkKind::Pvrdma)?;
        pingpong(&pair.endpoints(&link), 0, "ibv_rc_pingpong", "-c -e")
    };
    run().with_context(|| pair.diagnosis())
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
    let network = format!("uplink={}", datagrams(&cable[0], &cable[1]));
    let started = Instant::now();
    let options = HostOptions { device: ",pin=all".to_owned(), memory_mib: MIB, ..HostOptions::new(network) };
    let guest = GuestWithDaemon::start(image, directory.path(), "large", MAC[0], &options)?;
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
        bail!("the daemon's log does not name the problem:\n{log}");
    }
    Ok("refused, with the reason in the log".to_owned())
}
