//! `crates/iwarp` over sockets of this machine, and a guest whose kernel has `siw`, iWARP in software.

use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use pvrdma_iwarp::wire::Cause;
use pvrdma_iwarp::{End, Limits, Rtr};
use pvrdma_verbs_types::{RemoteAddress, WcStatus};

use super::case::Case;
use super::kernel_log;
use crate::endpoints::{listens, network_script};
use crate::image::{GuestImage, SiwModule};
use crate::iwarp_peer::{IwarpPeer, rping};
use crate::vm::{Card, Job, Vm, VmBuilder};

/// Address of the guest behind QEMU's user network, and that of this machine.
const GUEST: [u8; 4] = [10, 0, 2, 15];
const HOST: &str = "10.0.2.2";
/// Port on which the guest's program listens.
const PORT: u16 = 7174;
const COUNT: u8 = 10;
/// Lengths of exchanged buffers in bytes. The second one is the longest that the program accepts.
const LENGTHS: [usize; 2] = [64, 65_535];
const LIMITS: Limits = Limits { ird: 16, ord: 16, crc: true };
const PATIENCE: Duration = Duration::from_secs(60);

/// Needs one guest, without a daemon.
pub(crate) fn cases() -> Vec<Case> {
    vec![Case::alone("iwarp/siw", siw).slow("compiles siw, and takes a minute; runs when asked for: --only iwarp/siw")]
}

/// A guest with `siw`, and the port of this machine that leads to the port of its program.
struct SiwGuest {
    vm: Vm,
    port: u16,
    _directory: tempfile::TempDir,
}

impl SiwGuest {
    fn boot(image: &GuestImage) -> Result<Self> {
        let module = SiwModule::build(image)?;
        let directory =
            tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
        // QEMU needs a number, and takes the port a moment later.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let card = Card {
            netdev: format!("user,id=iwarp,ipv6=off,hostfwd=tcp:127.0.0.1:{port}-:{PORT}"),
            device: "virtio-net-pci,netdev=iwarp,mac=52:54:00:00:17:01".to_owned(),
        };
        let vm = VmBuilder::new(image, directory.path()).name("siw").memory_mib(512).more_cards(&[card]).start()?;
        vm.wait_boot()?;
        vm.run(&network_script("virtio_net", &[GUEST.into()], 1500))?;
        module.start(&vm, "$(cat /run/nic-virtio_net)")?;
        Ok(Self { vm, port, _directory: directory })
    }

    /// Starts the program as the server, and connects to it.
    fn client(&self, limits: Limits, length: usize) -> Result<(Job, IwarpPeer)> {
        let server = self.vm.spawn(&format!("rping -s -V -p {PORT} -S {length}"))?;
        self.vm.wait_until(&listens(PORT), PATIENCE)?;
        let tcp = TcpStream::connect(("127.0.0.1", self.port)).context("cannot connect to QEMU")?;
        Ok((server, IwarpPeer::connect(tcp, limits, rping::memory(length))?))
    }

    /// Starts the program as the client, and accepts its connection.
    fn server(&self, limits: Limits, length: usize) -> Result<(Job, IwarpPeer)> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        let client = self.vm.spawn(&format!("rping -c -V -C {COUNT} -a {HOST} -p {port} -S {length}"))?;
        let (tcp, _) = listener.accept()?;
        Ok((client, IwarpPeer::accept(tcp, limits, rping::memory(length))?))
    }
}

fn siw(image: &GuestImage) -> Result<String> {
    let guest = SiwGuest::boot(image)?;
    let exchanges = exchanges(&guest).with_context(|| guest.vm.diagnosis())?;
    refused_write(&guest).context("a WRITE to no memory")?;
    // A kernel whose rping is killed after a Terminate crashes in `iw_cm`, so each Terminate takes a guest.
    drop(guest);
    refused_read(&SiwGuest::boot(image)?).context("a READ of too much")?;
    Ok(format!("{exchanges} exchanges of rping, both roles, with and without CRC; 2 Terminates"))
}

/// Exchanges data in both roles, and returns the number of exchanges.
fn exchanges(guest: &SiwGuest) -> Result<u32> {
    let mut exchanges = 0;
    for crc in [true, false] {
        let limits = Limits { crc, ..LIMITS };
        for length in LENGTHS {
            as_client(guest, limits, length).with_context(|| format!("client, {length} bytes, CRC {crc}"))?;
            as_server(guest, limits, length).with_context(|| format!("server, {length} bytes, CRC {crc}"))?;
            exchanges += 2 * u32::from(COUNT);
        }
    }
    kernel_log::check(&guest.vm)?;
    Ok(exchanges)
}

fn as_client(guest: &SiwGuest, limits: Limits, length: usize) -> Result<()> {
    let (server, mut peer) = guest.client(limits, length)?;
    let agreed = *peer.negotiated();
    ensure!(agreed.crc == limits.crc && agreed.rtr == Some(Rtr::Read), "agreed on {agreed:?}");
    rping::client(&mut peer, length, COUNT).with_context(|| format!("rping:\n{}", server.output()))?;
    peer.close()?;
    server.wait_success(PATIENCE).map(drop)
}

fn as_server(guest: &SiwGuest, limits: Limits, length: usize) -> Result<()> {
    let (client, mut peer) = guest.server(limits, length)?;
    ensure!(peer.negotiated().crc == limits.crc, "agreed on {:?}", peer.negotiated());
    rping::server(&mut peer, length, COUNT).with_context(|| format!("rping:\n{}", client.output()))?;
    ensure!(peer.end()? == End::PeerClosed, "the client did not close in order");
    client.wait_success(PATIENCE).map(drop)
}

/// `siw` names the reason, and the request that is still open gets it.
fn refused_write(guest: &SiwGuest) -> Result<()> {
    let (_server, mut peer) = guest.client(LIMITS, LENGTHS[0])?;
    let nowhere = RemoteAddress { addr: 0, rkey: 0xdead_be00 };
    peer.write(nowhere, 0, 64)?;
    ensure!(peer.finished()? == WcStatus::Success, "a WRITE ends when the socket has accepted it");
    peer.read(nowhere, 0, 64)?;
    refused(peer, Cause::TAGGED_STAG).context("the READ behind it")
}

fn refused_read(guest: &SiwGuest) -> Result<()> {
    let (_client, mut peer) = guest.server(LIMITS, LENGTHS[0])?;
    peer.post_receive(0, 64)?;
    let source = rping::message(&mut peer)?;
    peer.read(source, 0, 8192)?;
    refused(peer, Cause { layer: 0, error_type: 1, code: 1 })
}

/// Checks the end of a READ that the guest refuses for this cause.
fn refused(mut peer: IwarpPeer, cause: Cause) -> Result<()> {
    let (status, end) = (peer.finished()?, peer.end()?);
    let named = matches!(&end, End::Terminated { cause: named, .. } if *named == cause);
    ensure!(status == WcStatus::RemoteAccess && named, "{status:?}, {end:?} instead of {cause}");
    Ok(())
}
