//! Dissects every packet with Wireshark, which must not report an error.
//!
//! Debian's version of Wireshark does not check the ICRC, so this test checks it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use pcap_file::pcapng::{Block, PcapNgReader};
use pvrdma_roce::wire::Packet;

use super::case::Case;
use super::exchange::{Programs, Ready};
use super::packets;
use crate::image::GuestImage;
use crate::pair::{Link, Pair};

/// Severity from which on a Wireshark message is an error: `warn`.
const WARNING: u32 = 0x0060_0000;

/// Heuristic dissectors for the payload of a queue pair, which contains arbitrary data in this test.
const GUESSES: [&str; 10] = [
    "smcr_infiniband",
    "smb_direct_infiniband",
    "rpcrdma_infiniband",
    "nvme_rdma",
    "lnet_ib",
    "iser_infiniband",
    "eth_over_ib",
    "mellanox_eoib",
    "sdp_infiniband",
    "fc_infiniband",
];

/// Fields to print.
const FIELDS: [&str; 6] = [
    "frame.number",
    "frame.protocols",
    "infiniband.bth.opcode",
    "infiniband.mad.attributeid",
    "_ws.expert.severity",
    "_ws.expert.message",
];

/// Opcodes of all RC operations, by the position of their packets: sends, writes, reads, atomics, responses.
const RC_OPCODES: [u8; 22] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 23];
/// The same for datagrams.
const UD_OPCODES: [u8; 2] = [100, 101];
/// Opcode of a congestion notification packet.
const CNP: u8 = 129;

/// Opcodes that the guests' programs certainly use: sends, writes, reads and atomics with their responses, datagrams.
const GUEST_OPCODES: [u8; 14] = [0, 1, 2, 4, 6, 7, 8, 12, 13, 14, 15, 17, 18, 100];

/// Packets of every kind, generated in this process, and those of real guests.
pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::alone("dissect/every-encapsulation", encapsulations),
        Case::new("dissect/local-delivery", local_delivery),
    ]
}

fn encapsulations(image: &GuestImage) -> Result<String> {
    let directory = tempfile::tempdir().context("cannot create a directory")?;
    let mut total = 0;
    for (name, frames) in packets::every_encapsulation()? {
        let path = directory.path().join(format!("{name}.pcap"));
        packets::write(&path, &frames)?;
        let seen = dissect(image, &path).with_context(|| name.clone())?;
        seen.expect(RC_OPCODES.into_iter().chain(UD_OPCODES).chain([CNP])).with_context(|| name.clone())?;
        if seen.frames != frames.len() {
            bail!("{name}: {} of {} packets were dissected", seen.frames, frames.len());
        }
        total += seen.frames;
    }
    Ok(format!("{total} packets"))
}

/// Traffic between local guests, captured with `pvrdmad capture`.
fn local_delivery(pair: &mut Pair, link: &Link) -> Result<String> {
    let daemon = pair.daemon().context("there is no daemon")?;
    // On a disk that is busy with other work, a write can take seconds. The daemon then drops frames, because it
    // buffers only some megabytes for a slow reader.
    let memory = tempfile::tempdir_in("/dev/shm").context("cannot create a directory in memory")?;
    let path = memory.path().join("local.pcapng");
    let capture = daemon.capture("vm0", &path)?;
    let run = |ready, server: &str, client: &str| {
        Programs {
            server_vm: pair.b(),
            server: server.to_owned(),
            ready,
            client_vm: pair.a(),
            client: client.to_owned(),
            timeout: std::time::Duration::from_secs(120),
        }
        .run()
    };
    let verbs = |program: &str, own: usize| format!("{program} -d {} -g {}", link.device, link.gid_index[own]);
    let peer = link.ip[1];
    for (program, options) in [("ibv_rc_pingpong", "-s 5000 -n 20"), ("ibv_ud_pingpong", "-s 1000 -n 20")] {
        let command = |own| format!("{} {options}", verbs(program, own));
        run(Ready::Tcp(18515), &command(1), &format!("{} {peer}", command(0)))?;
    }
    // Every operation, in lengths that produce every packet position.
    let integrity = |own: usize| format!("integrity {} {} 24 3", link.device, link.gid_index[own]);
    run(Ready::Tcp(18600), &integrity(1), &format!("{} {peer}", integrity(0)))?;
    let rping = |side: &str| format!("rping {side} -a {peer} -C 5 -V -S 3000");
    run(Ready::ConnectionManager, &rping("-s"), &rping("-c"))?;
    let said = capture.stop()?;
    let seen = dissect(pair.image(), &path)?;
    seen.expect(GUEST_OPCODES)?;
    for (attribute, name) in [(0x10, "REQ"), (0x13, "REP"), (0x14, "RTU"), (0x15, "DREQ")] {
        if !seen.mads.contains(&attribute) {
            bail!("no connection manager's {name} in {:x?}", seen.mads);
        }
    }
    Ok(format!("{} packets dissected; the capture: {said}", seen.frames))
}

/// Result of Wireshark.
#[derive(Debug, Default)]
struct Seen {
    /// RoCE packets.
    frames: usize,
    /// Number of packets by opcode.
    opcodes: BTreeMap<u8, usize>,
    /// Attributes of management datagrams.
    mads: BTreeSet<u32>,
}

impl Seen {
    fn expect(&self, opcodes: impl IntoIterator<Item = u8>) -> Result<()> {
        let missing: Vec<u8> = opcodes.into_iter().filter(|opcode| !self.opcodes.contains_key(opcode)).collect();
        if !missing.is_empty() {
            bail!("no packets with the opcodes {missing:?}, but {:?}", self.opcodes);
        }
        Ok(())
    }
}

/// Dissects a file. Frames that are not RoCE are ignored.
fn dissect(image: &GuestImage, path: &Path) -> Result<Seen> {
    let (program, arguments) = image.tshark();
    let mut command = Command::new(program);
    command.args(arguments).arg("-r").arg(path).args(["-n", "-T", "fields", "-E", "separator=/t"]);
    // IPv6 requires a UDP checksum, RoCE does not (IBA annex A17.9.2).
    for option in ["ip.check_checksum", "udp.check_checksum", "udp.ignore_ipv6_zero_checksum"] {
        command.arg("-o").arg(format!("{option}:TRUE"));
    }
    command.args(GUESSES.into_iter().flat_map(|guess| ["--disable-heuristic", guess]));
    command.args(FIELDS.into_iter().flat_map(|field| ["-e", field]));
    let output = command.stdin(Stdio::null()).output().context("cannot run the image's tshark")?;
    if !output.status.success() {
        bail!("tshark: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    let roce = roce_frames(path)?;
    let mut seen = Seen::default();
    let mut complaints = Vec::new();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let mut fields = line.split('\t');
        let mut next = || fields.next().unwrap_or_default();
        let (number, protocols, opcode, attribute, severity, message) =
            (next(), next(), next(), next(), next(), next());
        if !number.parse().is_ok_and(|number| roce.contains(&number)) {
            continue;
        }
        seen.frames += 1;
        match opcode.parse() {
            Ok(opcode) => *seen.opcodes.entry(opcode).or_default() += 1,
            Err(_) => complaints.push(format!("{number}: not dissected: {protocols}")),
        }
        seen.mads.extend(attribute.strip_prefix("0x").and_then(|digits| u32::from_str_radix(digits, 16).ok()));
        if severity.split(',').filter_map(|word| word.parse::<u32>().ok()).any(|severity| severity >= WARNING) {
            complaints.push(format!("{number}: {protocols}: {message}"));
        }
    }
    if !complaints.is_empty() {
        complaints.truncate(20);
        bail!("tshark complains:\n{}", complaints.join("\n"));
    }
    if seen.frames != roce.len() {
        bail!("tshark lists {} of {} packets", seen.frames, roce.len());
    }
    Ok(seen)
}

/// Returns the numbers of the RoCE packets in a file, each of which is verified.
fn roce_frames(path: &Path) -> Result<BTreeSet<usize>> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    let mut reader = PcapNgReader::new(file).context("not a capture")?;
    let (mut number, mut roce) = (0, BTreeSet::new());
    while let Some(block) = reader.next_block() {
        let Block::EnhancedPacket(block) = block.context("a broken capture")? else { continue };
        number += 1;
        let Ok(packet) = Packet::parse(&block.data) else { continue };
        packet.verify().with_context(|| format!("{number}: {packet}"))?;
        roce.insert(number);
    }
    Ok(roce)
}
