//! Knowledge of the attackers: the queue pairs and memory regions of the comparing programs with their keys, as an
//! administrator of the guests could read them.

use std::fmt;
use std::net::Ipv6Addr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use pvrdma_verbs_types::Gid;
use pvrdmad::testing::Target;

use crate::pair::{Link, Pair};

/// First PSN of the programs' connections (`guest/integrity.c`).
const PSN: u32 = 0x12_3456;
/// Programs in each guest.
const PROGRAMS: usize = 2;

/// A queue pair with a region.
#[derive(Clone, Debug)]
pub(super) struct Victim {
    guest: usize,
    gid: Ipv6Addr,
    qpn: u32,
    handle: u32,
    key: u32,
    address: u64,
    length: u64,
    peer: Ipv6Addr,
    peer_qpn: u32,
}

impl Victim {
    /// Returns the index of its guest.
    pub(super) const fn guest(&self) -> usize {
        self.guest
    }
}

impl fmt::Display for Victim {
    /// Formats it in the syntax of the hostile process.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gid, qpn, handle, key, address, length, .. } = self;
        write!(f, "{gid},{qpn},{handle},{key},{address},{length}")
    }
}

impl From<&Victim> for Target {
    fn from(victim: &Victim) -> Self {
        Self {
            number: u8::try_from(victim.guest).unwrap_or_default(),
            gid: Gid(victim.gid.octets()),
            qpn: victim.qpn,
            datagram_qpn: 1,
            psn: PSN,
            addr: victim.address,
            rkey: victim.key,
            peer: Gid(victim.peer.octets()),
            peer_qpn: victim.peer_qpn,
        }
    }
}

/// Returns all victims, once they are connected.
pub(super) fn find(pair: &Pair, link: &Link) -> Result<Vec<Victim>> {
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut found = Vec::new();
    for guest in [0, 1] {
        loop {
            let here = look(pair, link, guest)?;
            if here.len() == PROGRAMS {
                found.extend(here);
                break;
            }
            if Instant::now() > deadline {
                bail!("guest {guest} has no {PROGRAMS} programs that are connected: {here:?}");
            }
        }
    }
    Ok(found)
}

fn look(pair: &Pair, link: &Link, guest: usize) -> Result<Vec<Victim>> {
    let shown = pair.daemon().context("no daemon")?.show(&format!("vm{guest}"), "qp")?;
    let shown = shown.as_array().with_context(|| format!("no list: {shown}"))?;
    // Immediately, because the programs continue meanwhile.
    let said = pair.vms()[guest].run(LOOK)?;
    let of_programs =
        |name: &'static str| said.lines().filter(move |line| line.contains("comm integrity") && line.contains(name));
    let mut found = Vec::new();
    for pair in of_programs(" lqpn ") {
        let (qpn, pid) = (value(pair, "lqpn", 10)?, value(pair, "pid", 10)?);
        let region = of_programs(" rkey ").find(|region| value(region, "pid", 10).is_ok_and(|other| other == pid));
        let qp = shown.iter().find(|qp| qp["qpn"] == qpn && qp["attrs"]["dest_qpn"].as_u64().is_some_and(|to| to > 1));
        let (Some(region), Some(qp), Some((address, length))) = (region, qp, arena(&said, pid)) else { continue };
        found.push(Victim {
            guest,
            gid: link.ip[guest].to_ipv6_mapped(),
            qpn: u32::try_from(qpn)?,
            handle: u32::try_from(qp["handle"].as_u64().context("no handle")?)?,
            key: u32::try_from(value(region, "rkey", 16)?)?,
            address,
            length,
            peer: link.ip[1 - guest].to_ipv6_mapped(),
            peer_qpn: u32::try_from(qp["attrs"]["dest_qpn"].as_u64().context("no peer")?)?,
        });
    }
    Ok(found)
}

/// Commands of a guest's administrator: list the kernel's objects, a line each, and the programs' maps.
const LOOK: &str = "rdma -dd resource show mr; rdma -dd resource show qp; \
                    for pid in $(pidof integrity); do echo \"maps of $pid\"; cat /proc/$pid/maps; done";

/// Returns the number after a word.
fn value(line: &str, name: &str, radix: u32) -> Result<u64> {
    let mut words = line.split_whitespace();
    let word = words.find(|&word| word == name).and_then(|_| words.next());
    let word = word.with_context(|| format!("no {name}: {line}"))?;
    u64::from_str_radix(word.trim_start_matches("0x"), radix).with_context(|| format!("{name}: {line}"))
}

/// Returns the largest anonymous memory of a process: start and length; `None` if the process has ended.
fn arena(said: &str, pid: u64) -> Option<(u64, u64)> {
    let maps = said.lines().skip_while(|line| *line != format!("maps of {pid}")).skip(1);
    let maps = maps.take_while(|line| !line.starts_with("maps of")).filter(|line| line.split_whitespace().count() == 5);
    let ranges = maps.filter_map(|line| {
        let (start, end) = line.split_whitespace().next()?.split_once('-')?;
        let [start, end] = [start, end].map(|number| u64::from_str_radix(number, 16).ok());
        Some((start?, end? - start?))
    });
    ranges.max_by_key(|&(_, length)| length)
}
