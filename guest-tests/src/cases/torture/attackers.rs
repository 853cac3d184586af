//! Attackers with devices of their own, in the network of the guests.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use pvrdma_dev::testing::{Driver, GuestMemory, Irqs, Stop};
use pvrdma_packet::MacAddr;
use pvrdma_verbs_types::Gid;
use pvrdmad::testing::{Behind, Dice, HostileClient, HostilePeer, HostileProcess, RemoteFunction, Target, Targets};
use rustix::fs::MemfdFlags;

use super::victims::Victim;
use super::wire::{self, Wire};
use crate::daemon::DaemonDevice;
use crate::pair::{Pair, device_mac};

/// Ethernet addresses of the devices of the hostile VMM and of the hostile driver.
const VMM: MacAddr = MacAddr([0x52, 0x54, 0, 0, 0, 0x67]);
const DRIVER: MacAddr = MacAddr([0x52, 0x54, 0, 0, 0, 0x66]);
const DRIVER_IP: [u8; 4] = [192, 168, 77, 66];
/// Memory of the attacker's guest in bytes.
const MEMORY: u64 = 8 << 20;
/// Maximum number of steps in one life.
const STEPS: usize = 1000;

/// Time limit of each step. Guests are emulated, and everything happens at once.
pub(super) const PATIENCE: Duration = Duration::from_secs(300);
/// Names of the devices of the VMM and of the driver.
const DEVICES: [&str; 2] = ["vmm", "driver"];

/// Sockets of their devices.
#[derive(Debug)]
pub(super) struct Attackers {
    /// Sockets of the VMM, which has a vNIC as well.
    vmm: [(PathBuf, Behind); 2],
    driver: PathBuf,
    wire: Wire,
}

/// Counts of the attackers' actions.
#[derive(Debug)]
pub(super) struct Deeds {
    /// Clients that connected.
    pub(super) clients: u64,
    /// Driver instances that ran.
    pub(super) drivers: u64,
    /// Frames that the peer sent.
    pub(super) frames: u64,
}

impl Attackers {
    /// Adds their devices to the network that ends at `wire`.
    pub(super) fn come(pair: &Pair, wire: Wire) -> Result<Self> {
        let daemon = pair.daemon().context("no daemon")?;
        let path = |name: &str| pair.directory().join(name);
        let (vmm, nic, driver) = (path("vmm.pvrdma"), path("vmm.nic"), path("driver.pvrdma"));
        let options = format!("{},nic-socket={}", wire::DEVICE_OPTIONS, nic.display());
        let devices = [(&vmm, VMM, options), (&driver, DRIVER, wire::DEVICE_OPTIONS.to_owned())];
        for (name, (socket, mac, options)) in DEVICES.into_iter().zip(devices) {
            daemon.add(&DaemonDevice {
                name: name.to_owned(),
                socket: socket.clone(),
                mac: mac.to_string(),
                options,
            })?;
        }
        Ok(Self { vmm: [(vmm, Behind::Rdma), (nic, Behind::Network(VMM))], driver, wire })
    }

    /// Waits until the daemon has noticed that all attackers are gone.
    pub(super) fn wait_gone(pair: &Pair) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = pair.daemon().context("no daemon")?.status()?;
            let devices = status["devices"].as_array().context("no devices")?;
            let is_there = |device: &&serde_json::Value| {
                let clients = [&device["client"], &device["nic"]["client"]];
                DEVICES.iter().any(|name| device["name"] == **name)
                    && clients.iter().any(|client| client["connected"] == true)
            };
            let Some(device) = devices.iter().find(is_there) else { return Ok(()) };
            if Instant::now() > deadline {
                bail!("who has hung up is still there: {device}");
            }
        }
    }

    /// Attacks until `traffic` has ended.
    pub(super) fn beside(&self, seed: u64, victims: &[Victim], traffic: impl FnOnce() -> Result<()>) -> Result<Deeds> {
        let (stop, targets) = (AtomicBool::new(false), Targets::new(victims.iter().map(Target::from).collect()));
        let at_stations = victims.iter().map(|victim| (Target::from(victim), device_mac(victim.guest())));
        let peer = HostilePeer::new(at_stations.collect(), Dice::new(seed, 23));
        thread::scope(|scope| {
            let clients: Vec<_> = (0..)
                .zip(&self.vmm)
                .map(|(actor, (socket, behind))| {
                    let dice = Dice::new(seed, 20 + actor);
                    scope.spawn(|| talk(socket, *behind, dice, &stop))
                })
                .collect();
            let drivers = scope.spawn(|| drive(&self.driver, Dice::new(seed, 22), &targets, &stop));
            let frames = scope.spawn(|| self.wire.attack(peer, &stop));
            let traffic = {
                let _stop = Stop(&stop);
                traffic()
            };
            let count = |outcome: thread::Result<Result<u64>>| match outcome {
                Ok(Ok(0)) => Err(anyhow!("an attacker did nothing")),
                Ok(count) => count,
                Err(_) => Err(anyhow!("an attacker was not answered as it should be, see above")),
            };
            let clients: Result<Vec<u64>> = clients.into_iter().map(|thread| count(thread.join())).collect();
            let [drivers, frames] = [drivers, frames].map(|thread| count(thread.join()));
            traffic?;
            Ok(Deeds {
                clients: clients.context("clients")?.into_iter().sum(),
                drivers: drivers.context("drivers")?,
                frames: frames.context("frames")?,
            })
        })
    }
}

/// Runs clients that send arbitrary messages, one after the other.
fn talk(socket: &Path, behind: Behind, mut dice: Dice, stop: &AtomicBool) -> Result<u64> {
    let mut clients = 0;
    while !stop.load(Ordering::Acquire) {
        let stream = UnixStream::connect(socket).with_context(|| format!("cannot connect to {}", socket.display()))?;
        let hostile = HostileClient::new(&mut dice);
        hostile.talk(&stream, &mut dice, behind);
        if dice.one_in(3) {
            hostile.truncate();
        }
        hear(&stream).with_context(|| format!("client {clients} of {}", socket.display()))?;
        clients += 1;
    }
    Ok(clients)
}

/// Reads answers until the daemon closes the connection, which it must do.
fn hear(mut stream: &UnixStream) -> Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    match io::copy(&mut stream, &mut io::sink()) {
        Err(error) if error.kind() != ErrorKind::ConnectionReset => Err(error).context("the daemon does not hang up"),
        _ => Ok(()),
    }
}

/// Runs processes of a guest that perform arbitrary operations, each on a driver of its own.
fn drive(socket: &Path, mut dice: Dice, targets: &Targets, stop: &AtomicBool) -> Result<u64> {
    let mut own = Gid::default();
    own.0[10..12].fill(0xff);
    own.0[12..].copy_from_slice(&DRIVER_IP);
    let mut drivers = 0;
    while !stop.load(Ordering::Acquire) {
        let file = File::from(rustix::fs::memfd_create("hostile", MemfdFlags::CLOEXEC)?);
        file.set_len(MEMORY)?;
        let (function, irqs) = connect(socket, &file)?;
        let driver = Driver::probe(function, &GuestMemory::in_file(file), &irqs)?;
        driver.bind_gid(0, own)?;
        let mut process = HostileProcess::new(&driver, own, targets.clone(), Dice::new(dice.long(), 5));
        for _ in 0..dice.below(STEPS) {
            if stop.load(Ordering::Acquire) {
                break;
            }
            process.step();
        }
        if dice.one_in(2) {
            process.end();
            driver.remove();
        }
        drivers += 1;
    }
    Ok(drivers)
}

/// Connects as soon as the daemon has cleaned up after the previous client.
fn connect(socket: &Path, memory: &File) -> Result<(Arc<RemoteFunction>, Arc<Irqs>)> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match RemoteFunction::connect(socket, memory) {
            Ok(connected) => return Ok(connected),
            Err(error) if Instant::now() > deadline => bail!("{error:#}"),
            Err(_) => thread::sleep(Duration::from_millis(10)),
        }
    }
}
