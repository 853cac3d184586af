//! The daemon: devices, their sockets and the control socket, from the configuration to the end.

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use log::{info, warn};
use pvrdma_dev::PvrdmaDevice;
use pvrdma_guest_memory::DmaSpace;
use pvrdma_ibverbs::Ibverbs;
use pvrdma_rxe::{Rxe, RxeConfig};
use pvrdma_verbs::Backend;

use crate::config::{self, BackendSpec, Config, Device, Pin, Roce};
use crate::control::ControlServer;
use crate::control_access::ControlAccess;
use crate::control_path;
use crate::network::Network;
use crate::rlimits;
use crate::sigbus;
use crate::socket::{SocketAccess, SocketFile};
use crate::status::{DaemonStatus, Reporter, by_name};
use crate::vfio_user::{ConnectionStats, Endpoint, IrqTable, REPLY_DEADLINE, Server};

/// A running daemon. Dropping it disconnects all clients and removes all sockets.
#[derive(Debug)]
pub struct Daemon {
    // Dropped in this order: nobody asks about devices that are being stopped.
    _control: Option<ControlServer>,
    _servers: Vec<Server>,
    _networks: Vec<Option<Arc<Network>>>,
}

impl Daemon {
    /// Starts everything and then says so, a line for each device.
    ///
    /// # Errors
    /// A socket cannot be made or a device is not possible; nothing is left behind then.
    pub fn start(config: &Config, ready: &mut dyn Write) -> Result<Self> {
        rlimits::raise(config);
        sigbus::install();
        // All sockets first: they are what fails most often.
        let control = control_socket(config)?;
        let sockets = device_sockets(config)?;
        let served = serve_networks(config, sockets)?;
        let networks = served.iter().map(|(_, reporter)| reporter.network.clone()).collect();
        let (servers, reporters): (Vec<_>, Vec<_>) = served.into_iter().unzip();
        let (started, kind) = (Instant::now(), config.backend.to_string());
        let macs: Vec<_> = config
            .devices()
            .zip(&reporters)
            .map(|((_, device), reporter): (_, &Reporter)| {
                (device.config.name.clone(), (device.config.mac, reporter.rxe.clone()))
            })
            .collect();
        let reporters: Arc<[Reporter]> = reporters.into();
        let control = control
            .map(|socket| {
                let shown = Arc::clone(&reporters);
                let show = move |device: &str, object| {
                    let reporter = shown.iter().find(|reporter| reporter.device.config.name == device);
                    let reporter = reporter.ok_or_else(|| format!("there is no device '{device}'"))?;
                    Ok(reporter.function.device_objects(object))
                };
                let access = config.control.as_ref().map(|control| control.access).unwrap_or_default();
                let access = Arc::new(ControlAccess::new(access, config.captures.is_on()));
                let asked = Arc::clone(&access);
                let status = move || DaemonStatus {
                    version: env!("CARGO_PKG_VERSION").to_owned(),
                    pid: std::process::id(),
                    uptime_s: started.elapsed().as_secs(),
                    backend: kind.clone(),
                    lost_pages: sigbus::repaired(),
                    control: by_name(&asked.counters.list()),
                    devices: reporters.iter().map(Reporter::report).collect(),
                };
                let capture = move |device: &str, config| {
                    let (_, (mac, rxe)) = macs
                        .iter()
                        .find(|(name, _)| name == device)
                        .ok_or_else(|| format!("there is no device '{device}' (the devices are {})", names(&macs)))?;
                    let rxe = rxe.as_ref().ok_or("the host's adapter moves the packets: capture there")?;
                    rxe.capture(*mac, config).map_err(|error| error.to_string())
                };
                ControlServer::start(socket, access, status, show, capture)
            })
            .transpose()
            .context("control socket")?;
        announce(config, ready);
        Ok(Self { _control: control, _servers: servers, _networks: networks })
    }
}

/// A socket for each device.
fn device_sockets(config: &Config) -> Result<Vec<SocketFile>> {
    let bind = |device: &Device| {
        SocketFile::bind(&device.socket, device.access).with_context(|| format!("device {}", device.config.name))
    };
    config.devices().map(|(_, device)| bind(device)).collect()
}

/// Says that everything runs: a line in the log, and one for each device.
fn announce(config: &Config, ready: &mut dyn Write) {
    // Log: once, at the start.
    info!("{}", start_line(config));
    for (_, device) in config.devices() {
        // Whoever started us may not want to read this.
        let _ = writeln!(ready, "{}", ready_line(device));
    }
    let _ = ready.flush();
}

/// The control socket, if there is to be one. That a place nobody chose cannot be had is no reason not to serve.
fn control_socket(config: &Config) -> Result<Option<SocketFile>> {
    if let Some(control) = &config.control {
        return SocketFile::bind(&control.path, control.access).map(Some).context("control socket");
    }
    let path = match control_path::for_daemon() {
        Ok(Some(path)) => path,
        Ok(None) => return Ok(None),
        Err(error) => {
            // Log: once, at the start.
            warn!("no control socket: the folder for it cannot be made: {error}");
            return Ok(None);
        }
    };
    match SocketFile::bind(&path, SocketAccess::default()) {
        Ok(socket) => {
            // Log: once, at the start.
            info!("control socket {}", path.display());
            Ok(Some(socket))
        }
        Err(error) => {
            // Log: once, at the start.
            warn!("no control socket: {:#}", anyhow::Error::new(error));
            Ok(None)
        }
    }
}

/// Devices for people.
fn names<T>(devices: &[(String, T)]) -> String {
    devices.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ")
}

/// What runs here, for the log.
fn start_line(config: &Config) -> String {
    let devices: Vec<_> = config.devices().map(|(_, device)| device.config.name.as_str()).collect();
    format!("pvrdmad {}: backend {}, devices {}", env!("CARGO_PKG_VERSION"), config.backend, devices.join(", "))
}

/// All devices, each network on a backend of its own.
fn serve_networks(config: &Config, sockets: Vec<SocketFile>) -> Result<Vec<(Server, Reporter)>> {
    let mut sockets = sockets.into_iter();
    let mut served = Vec::new();
    for network in &config.networks {
        let sockets = sockets.by_ref().take(network.devices.len()).collect();
        match &config.backend {
            BackendSpec::Rxe => {
                let backend = RxeConfig { vlan: network.vlan, ..RxeConfig::default() };
                let backend = Rxe::new(backend).context("backend rxe")?;
                // Before the devices, which look for theirs when their drivers start.
                let links = links(network, &backend)?;
                for ((server, mut reporter), link) in serve_all(network, sockets, &backend)?.into_iter().zip(links) {
                    (reporter.network, reporter.rxe) = (link, Some(backend.clone()));
                    served.push((server, reporter));
                }
            }
            BackendSpec::Ibverbs(spec) => {
                let backend = Ibverbs::new(spec.clone()).context("backend ibverbs")?;
                served.extend(serve_all(network, sockets, &backend)?);
            }
        }
    }
    Ok(served)
}

/// The devices' connections to their network, one place for each device.
fn links(network: &config::Network, backend: &Rxe) -> Result<Vec<Option<Arc<Network>>>> {
    let devices = network.devices.iter();
    devices
        .map(|device| {
            let link = Network::start(network, device, backend);
            Ok(link.with_context(|| format!("device {}", device.config.name))?.map(Arc::new))
        })
        .collect()
}

/// All devices of a network, on its backend.
fn serve_all<B: Backend + 'static>(
    network: &config::Network,
    sockets: Vec<SocketFile>,
    backend: &B,
) -> Result<Vec<(Server, Reporter)>> {
    let pairs = network.devices.iter().zip(sockets);
    pairs
        .map(|(device, socket)| {
            serve(device, socket, backend).with_context(|| format!("device {}", device.config.name))
        })
        .collect()
}

fn serve<B: Backend + 'static>(device: &Device, socket: SocketFile, backend: &B) -> Result<(Server, Reporter)> {
    let memory = DmaSpace::new(device.pin.into());
    let irqs = Arc::new(IrqTable::default());
    let stats = Arc::new(ConnectionStats::default());
    let function = PvrdmaDevice::new(device.config.clone(), Arc::clone(&memory), irqs.clone(), backend)?;
    let endpoint = Endpoint {
        name: device.config.name.clone(),
        function: function.clone(),
        memory: Arc::clone(&memory),
        irqs: Arc::clone(&irqs),
        stats: Arc::clone(&stats),
        intx: device.config.intx,
        reply_deadline: REPLY_DEADLINE,
    };
    let server = Server::start(socket, endpoint)?;
    let device = device.clone();
    Ok((server, Reporter { device, function, memory, irqs, stats, network: None, rxe: None }))
}

fn ready_line(device: &Device) -> String {
    let roce = match device.roce() {
        Roce::V1 => "v1",
        Roce::V2 => "v2",
    };
    let pin = match device.pin {
        Pin::All => "all",
        Pin::Registered => "registered",
        Pin::Off => "off",
    };
    let config = &device.config;
    format!("{}: ready on {} (mac {}, roce {roce}, pin {pin})", config.name, device.socket.display(), config.mac)
}
