//! Addresses of RDMA devices that are added, removed and moved, and the maximum number of addresses and connections.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::super::case::Case;
use super::super::exchange::{Programs, Ready, finish};
use super::super::lifecycle::{WRITES_PORT, written};
use super::steps::{CARD, PATIENCE, and_then_restore, rdma, rdma_between};
use crate::endpoints::gid_index;
use crate::pair::{Link, LinkKind, PVRDMA_DEVICE, Pair};

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("network/address-renewed/at-client", |pair, link| renewed(pair, link, 0)),
        Case::new("network/address-renewed/at-server", |pair, link| renewed(pair, link, 1)),
        Case::new("slow/address-of-a-guest-without-link", |pair, _| moved(pair, true))
            .slow("waits for the end of a claim; runs when asked for: --only slow/address-of"),
        Case::new("slow/address-moved", |pair, _| moved(pair, false))
            .slow("an address stays with its guest for a minute; runs when asked for: --only slow/address-moved"),
        Case::new("network/full-gid-table", full_table),
        Case::new("network/1000-connections", connections),
    ]
}

/// The address of one end is removed from under a connection that writes, and added again. The connection continues,
/// although the kernel assigns the address another GID index while the old one is in use.
fn renewed(pair: &mut Pair, link: &Link, end: usize) -> Result<String> {
    let command = |vm: usize| {
        let (device, index) = (link.device, link.gid_index[vm]);
        // The retry settings tolerate an outage of seconds.
        format!("ib_write_bw -F -d {device} -x {index} -u 18 -s 65536 -D 3")
    };
    let programs = Programs {
        server_vm: pair.b(),
        server: command(1),
        ready: Ready::Tcp(WRITES_PORT),
        client_vm: pair.a(),
        client: format!("{} {}", command(0), link.ip[1]),
        timeout: PATIENCE,
    };
    let (server, client) = programs.start()?;
    let start = written(pair)?;
    let advance = |from: u64, what: &str| -> Result<u64> {
        loop {
            let now = written(pair)?;
            if now > from + (1 << 20) {
                return Ok(now);
            }
            ensure!(client.is_running(), "the connection ended {what}:\n{}\n{}", client.output(), server.output());
        }
    };
    advance(start, "before its address was removed")?;
    let address = link.ip[end];
    let renew = format!("ip addr del {address}/24 dev {CARD} && ip addr add {address}/24 dev {CARD}");
    pair.vms()[end].run(&renew)?;
    advance(written(pair)?, "with its address renewed")?;
    finish(&server, &client, PATIENCE)?;
    let index = pair.link(LinkKind::Pvrdma)?.gid_index[end];
    Ok(format!("GID index {} is now {index}", link.gid_index[end]))
}

/// The address of a service moves from guest a to guest b, which gets it while a still has it. RDMA follows after a has
/// lost its link and removed the address (`unplugged`), or has only removed it.
fn moved(pair: &mut Pair, unplugged: bool) -> Result<String> {
    let daemon = pair.daemon().context("there is no daemon")?;
    // Each case has its own address, because the daemon reserves an address for its last guest for a minute.
    let service = Ipv4Addr::new(192, 168, 77, if unplugged { 50 } else { 51 });
    let add = format!("ip addr add {service}/32 dev {CARD}");
    let delete = format!("ip addr del {service}/32 dev {CARD}");
    let waiting = || -> Result<bool> {
        let device = daemon.show("vm1", "device")?;
        Ok(device["backend"]["waiting_gids"].as_array().is_some_and(|gids| !gids.is_empty()))
    };
    let own = pair.link(LinkKind::Pvrdma)?.ip.map(IpAddr::V4);
    let work = || {
        pair.a().run(&add)?;
        rdma_between(pair, [service.into(), own[1]], 0).context("at the first guest")?;
        pair.b().run(&add)?;
        gid_index(pair.b(), PVRDMA_DEVICE, service.into())?;
        ensure!(waiting()?, "two guests have one address: {}", daemon.show("vm1", "device")?);
        if unplugged {
            daemon.set_link("vm0", false)?;
        }
        pair.a().run(&delete)?;
        let started = std::time::Instant::now();
        while waiting()? {
            ensure!(started.elapsed() < PATIENCE, "still waiting: {}", daemon.show("vm1", "device")?);
            std::thread::sleep(Duration::from_millis(50));
        }
        let waited = started.elapsed();
        if unplugged {
            daemon.set_link("vm0", true)?;
            gid_index(pair.a(), PVRDMA_DEVICE, own[0])?;
        }
        rdma_between(pair, [own[0], service.into()], 1).context("at the second guest")?;
        Ok(format!("free after {:.1} s", waited.as_secs_f64()))
    };
    and_then_restore(work, || {
        daemon.set_link("vm0", true)?;
        for vm in pair.vms() {
            vm.exec(&delete, PATIENCE)?;
        }
        rdma(pair)
    })
}

/// As many addresses as the device supports. The last one works like the first, and one more does no harm.
fn full_table(pair: &mut Pair, link: &Link) -> Result<String> {
    let gids = format!("/sys/class/infiniband/{PVRDMA_DEVICE}/ports/1/gids");
    let free = format!("cat {gids}/* 2>/dev/null | grep -c -x 0000:0000:0000:0000:0000:0000:0000:0000");
    let count = |command: &str| -> Result<u32> {
        // `grep -c` fails when the count is zero.
        let text = pair.a().run(&format!("{command} || true"))?;
        text.trim().parse().with_context(|| format!("no number: {text}"))
    };
    let (all, before) = (count(&format!("ls {gids} | wc -l"))?, count(&free)?);
    let last = Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 4, 0, 0)) + before);
    let work = || {
        pair.a().run(&format!(
            "for i in $(seq 1 {before}); do echo addr add 10.4.$((i / 256)).$((i % 256))/32 dev {CARD}; done | ip -batch -"
        ))?;
        let full = format!("test $({free}) = 0");
        pair.a().wait_until(&full, PATIENCE)?;
        // Guest b has a route for its answers.
        pair.b().run(&format!("ip route replace 10.4.0.0/16 dev {CARD}"))?;
        pair.a().run(&format!("ip addr add 10.5.0.1/32 dev {CARD}"))?;
        rdma_between(pair, [last.into(), link.ip[1].into()], 0)?;
        rdma(pair)?;
        Ok(format!("{all} GIDs"))
    };
    let note = and_then_restore(work, || {
        pair.b().exec("ip route del 10.4.0.0/16", PATIENCE)?;
        pair.a().run(&format!("ip addr flush dev {CARD} to 10.4.0.0/15"))?;
        pair.a().wait_until(&format!("test $({free}) = {before}"), PATIENCE)
    })?;
    rdma(pair)?;
    Ok(note)
}

/// A thousand simultaneous connections made by the connection manager, each with its own queues.
fn connections(pair: &mut Pair, link: &Link) -> Result<String> {
    const CONNECTIONS: u32 = 1000;
    let count = format!("-c {CONNECTIONS} -C 1 -S 64");
    let exchange = Programs {
        server_vm: pair.b(),
        server: format!("ucmatose {count} -b {}", link.ip[1]),
        ready: Ready::ConnectionManager,
        client_vm: pair.a(),
        client: format!("ucmatose {count} -s {} -b {}", link.ip[1], link.ip[0]),
        timeout: PATIENCE,
    }
    .run()?;
    ensure!(exchange.client.contains("data transfers complete"), "no transfer:\n{}", exchange.client);
    Ok(String::new())
}
