//! Drivers, guests and machines that end and start again.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::case::Case;
use super::exchange::{Programs, Ready};
use super::nvme;
use super::pingpong::pingpong;
use crate::pair::{Link, Pair};

/// Memory in KiB that the daemon may keep after all resources of a guest were released: overhead of the allocator.
pub(super) const SLACK_KIB: u64 = 4096;

/// Reload, reboot, kill.
pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::new("lifecycle/reload-driver-20-times", reload_driver),
        Case::new("lifecycle/reboot", reboot),
        // The survivor's kernel may report that its peer is gone.
        Case::new("lifecycle/qemu-killed-in-transfer", qemu_killed).ignore_kernel_log(),
        Case::new("slow/upgrade-20-times", upgrade).slow("takes minutes; runs when asked for: --only upgrade-20"),
        Case::new("slow/qemu-killed-at-10-points", killed_at_ten_points)
            .ignore_kernel_log()
            .slow("takes minutes; runs when asked for: --only killed-at-10"),
    ]
}

fn reload_driver(pair: &mut Pair, link: &Link) -> Result<String> {
    // The first run fills the daemon's pools.
    reload(pair, 0)?;
    let before = memory(pair)?;
    for _ in 0..20 {
        reload(pair, 0)?;
    }
    let note = check_memory(pair, before)?;
    check_traffic(pair, link)?;
    Ok(note)
}

/// Reloads the driver of a guest.
pub(super) fn reload(pair: &Pair, index: usize) -> Result<()> {
    pair.vms()[index].run("rmmod vmw_pvrdma")?;
    pair.load_pvrdma(index)
}

fn reboot(pair: &mut Pair, link: &Link) -> Result<String> {
    let before = memory(pair)?;
    pair.reboot(0)?;
    check_traffic(pair, link)?;
    check_memory(pair, before)
}

fn qemu_killed(pair: &mut Pair, link: &Link) -> Result<String> {
    let before = memory(pair)?;
    let noticed = kill_in_transfer(pair, link, 64 << 20)?;
    Ok(format!("noticed after {:.1} s; {}", noticed.as_secs_f64(), check_memory(pair, before)?))
}

/// Ten machines are killed at different points of a transfer. None leaves memory, a descriptor or a mapping behind.
fn killed_at_ten_points(pair: &mut Pair, link: &Link) -> Result<String> {
    // The first run fills the daemon's pools.
    kill_in_transfer(pair, link, 1 << 20)?;
    let (before, open) = (memory(pair)?, open_things(pair)?);
    for point in 0..10_u32 {
        // From the first bytes to a gibibyte, in steps that coincide with no other size.
        kill_in_transfer(pair, link, 3_u64.pow(point) * 54_321).with_context(|| format!("point {point}"))?;
    }
    let note = check_memory(pair, before)?;
    let now = open_things(pair)?;
    if now != open {
        bail!("the daemon had {open:?} descriptors and mappings of guests, and has {now:?}");
    }
    Ok(note)
}

/// The process of the network is replaced twenty times, and then the whole daemon, while programs run that check their
/// data or wait for events. No program notices.
pub(super) fn upgrade(pair: &mut Pair, link: &Link) -> Result<String> {
    const UPGRADES: u32 = 20;
    let vms = || [pair.a(), pair.b()];
    nvme::connect(vms(), link.ip[0])?;
    let result = programs_during_upgrades(pair, link, UPGRADES);
    let ended = nvme::disconnect([pair.a(), pair.b()]);
    let longest = result?;
    ended?;
    check_traffic(pair, link)?;
    Ok(format!("not served for {longest} ms at most"))
}

/// Returns the longest time in milliseconds for which an upgrade stopped the guests.
fn programs_during_upgrades(pair: &mut Pair, link: &Link, upgrades: u32) -> Result<u64> {
    const TIME: Duration = Duration::from_secs(60);
    let (device, seconds) = (link.device, TIME.as_secs());
    let between = |server: String, ready, client: String| Programs {
        server_vm: pair.b(),
        server,
        ready,
        client_vm: pair.a(),
        client,
        timeout: TIME,
    };
    let ping = |side: &str, more: &str| format!("rping {side} -a {} -C 3000 -V -S 4096{more}", link.ip[1]);
    let latency = |vm: usize| format!("ib_send_lat -F -e -p 18600 -d {device} -x {} -s 64 -n 3000", link.gid_index[vm]);
    let (server, client) = writes(pair, link, 1, TIME).start()?;
    let mut others = vec![pair.b().spawn(&nvme::verify(32, 3))?];
    for programs in [
        between(ping("-s", ""), Ready::ConnectionManager, ping("-c", &format!(" -I {}", link.ip[0]))),
        between(latency(1), Ready::Tcp(18600), format!("{} {}", latency(0), link.ip[1])),
        between("iperf3 -s -1".to_owned(), Ready::Tcp(5201), format!("iperf3 -c {} -t {seconds}", link.ip[1])),
    ] {
        let (server, client) = programs.start()?;
        others.extend([client, server]);
    }
    let mut longest = 0;
    for number in 1..=upgrades + 1 {
        // The counters of the next process begin at zero.
        let start = written(pair)?;
        while written(pair)? == start {
            if !client.is_running() {
                bail!("the transfer ended before upgrade {number}:\n{}", client.output());
            }
        }
        if number <= upgrades {
            longest = longest.max(pair.daemon().context("there is no daemon")?.upgrade()?);
        } else {
            pair.daemon_mut().context("there is no daemon")?.take_over()?;
        }
    }
    for program in [client, server].into_iter().chain(others) {
        program.wait_success(TIME * 3)?;
    }
    Ok(longest)
}

/// Returns the number of descriptors of the daemon's processes, and of their mappings of guest memory.
pub(super) fn open_things(pair: &Pair) -> Result<(usize, usize)> {
    pair.daemon().context("there is no daemon")?.open_things()
}

/// Default port of `ib_write_bw`.
pub(super) const WRITES_PORT: u16 = 18515;

/// Returns programs that write for `time`, with the server in this guest.
pub(super) fn writes<'a>(pair: &'a Pair, link: &Link, server: usize, time: Duration) -> Programs<'a> {
    let (device, seconds) = (link.device, time.as_secs());
    let command = |vm: usize| format!("ib_write_bw -F -d {device} -x {} -s 65536 -D {seconds}", link.gid_index[vm]);
    Programs {
        server_vm: &pair.vms()[server],
        server: command(server),
        ready: Ready::Tcp(WRITES_PORT),
        client_vm: &pair.vms()[1 - server],
        client: format!("{} {}", command(1 - server), link.ip[server]),
        timeout: time,
    }
}

/// Kills guest b when `bytes` of a transfer are done, and restarts it. Returns the time until the other guest noticed.
fn kill_in_transfer(pair: &mut Pair, link: &Link, bytes: u64) -> Result<Duration> {
    let link = pair.link(link.kind)?;
    let start = written(pair)?;
    let (_server, client) = writes(pair, &link, 1, Duration::from_secs(60)).start()?;
    while written(pair)?.saturating_sub(start) < bytes {
        if !client.is_running() {
            bail!("the transfer ended before the kill:\n{}", client.output());
        }
    }
    pair.b().kill();
    let killed = Instant::now();
    let output =
        client.wait(Duration::from_secs(50)).context("the other guest did not notice that its peer is gone")?;
    let noticed = killed.elapsed();
    if output.code == 0 {
        bail!("the transfer to a machine that was killed succeeded:\n{}", output.text);
    }
    drop(client);
    pair.restart(1)?;
    check_traffic(pair, &link).with_context(|| format!("after {}", link.device))?;
    Ok(noticed)
}

/// Returns the number of bytes that RDMA writes of the guests have moved.
pub(super) fn written(pair: &Pair) -> Result<u64> {
    let status = pair.daemon().context("there is no daemon")?.status()?;
    let devices = status["devices"].as_array().context("no devices")?;
    Ok(devices.iter().filter_map(|device| device["adapter"]["rc_write_bytes"].as_u64()).sum())
}

/// Data still flows in both directions; GID indices may have changed.
fn check_traffic(pair: &Pair, link: &Link) -> Result<()> {
    let link = pair.link(link.kind)?;
    pingpong(&pair.endpoints(&link), 0, "ibv_rc_pingpong", "-c")?;
    pingpong(&pair.endpoints(&link), 1, "ibv_rc_pingpong", "-c")?;
    Ok(())
}

/// Returns the private memory of the daemon's processes in KiB.
pub(super) fn memory(pair: &Pair) -> Result<u64> {
    pair.daemon().context("there is no daemon")?.memory_kib()
}

fn check_memory(pair: &Pair, before: u64) -> Result<String> {
    // Clean-up after a client is not part of any answer, so it may take a moment.
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let after = memory(pair)?;
        if after <= before + SLACK_KIB {
            return Ok(format!("daemon memory {before} -> {after} KiB"));
        }
        if Instant::now() > deadline {
            bail!("the daemon has grown from {before} to {after} KiB");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
