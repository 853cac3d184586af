//! The daemon: networks, their sockets and the control socket, from start to end.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use anyhow::{Context, Result};
use log::{info, warn};
use pvrdma_vfio_user_server::socket::{FileIdentity, SocketAccess, SocketFile};

use crate::config::{Config, Device, Isolate, Pin, Roce};
use crate::control::start_replacing;
use crate::control_access::ControlAccess;
use crate::control_path;
use crate::control_server::{ControlServer, status};
use crate::metrics::{MetricsServer, Place};
use crate::protocol::upgraded_lines;
use crate::rlimits;
use crate::socket::Inherited;
use crate::supervisor::replace::{TakeOverError, Taken, take_over};
use crate::supervisor::{Front, Program, Supervisor};

pub use crate::supervisor::Changes;

/// A running daemon. Dropping it disconnects all clients and removes all sockets.
#[derive(Debug)]
pub struct Daemon {
    // Fields are dropped in this order: the control server ends before the networks that it asks.
    control: Option<ControlServer>,
    metrics: Option<MetricsServer>,
    supervisor: Arc<Supervisor>,
    /// Configuration of the start or the last reload.
    config: Config,
    /// Connection to the daemon that this one replaces, until this one is ready.
    replaces: Option<UnixStream>,
}

impl Daemon {
    /// Starts everything in this process, regardless of [`Config::isolate`], and then writes a line for each device to
    /// `ready`. For programs that embed a daemon.
    ///
    /// # Errors
    /// A socket cannot be created or a device cannot be served. Nothing is left behind in that case.
    pub fn start(config: &Config, ready: &mut dyn Write) -> Result<Self> {
        Self::run(config, None, Inherited::default(), ready)
    }

    /// Starts everything as [`Self::start`] does, with a process for each network unless [`Config::isolate`] says
    /// otherwise. For `pvrdmad` only: the processes execute the calling program with the argument `worker`. Sockets may
    /// be `inherited`.
    ///
    /// # Errors
    /// As for [`Self::start`]; or an inherited socket is not used by the configuration.
    pub fn supervise(config: &Config, inherited: Inherited, ready: &mut dyn Write) -> Result<Self> {
        let program = (config.isolate == Isolate::Network).then(Program::own);
        Self::run(config, program.as_ref(), inherited, ready)
    }

    fn run(config: &Config, program: Option<&Program>, inherited: Inherited, ready: &mut dyn Write) -> Result<Self> {
        rlimits::raise(config);
        let control = control_socket(config)?;
        let metrics = config.metrics.as_ref().map(Place::open).transpose().context("metrics")?;
        let path = control.as_ref().and_then(SocketFile::identity).map(FileIdentity::path);
        let supervisor = Arc::new(Supervisor::start(config, program, inherited, path)?);
        Self::serve(config, supervisor, control, metrics, ready)
    }

    /// Replaces the daemon whose control socket is at `path`: takes all networks from it, under running VMs. That
    /// daemon ends once [`Self::is_ready`] is called. This is for `pvrdmad` only, as [`Self::supervise`]. Prints the
    /// result for each network to `results`.
    ///
    /// # Errors
    /// The other daemon serves its networks as before.
    pub fn take_over(path: &Path, ready: &mut dyn Write, results: &mut dyn Write) -> Result<Self> {
        let taken = match start_replacing(path).map(|old| take_over(old, &Program::own()))? {
            Ok(taken) => taken,
            Err(error) => {
                if let TakeOverError::Networks(networks) = &error {
                    // The reader of this output may have closed it.
                    let _ = results.write_all(upgraded_lines(networks).as_bytes());
                }
                return Err(error.into());
            }
        };
        let _ = results.write_all(upgraded_lines(&taken.networks).as_bytes());
        let (supervisor, config, control, metrics, old) = taken.into_parts();
        rlimits::raise(&config);
        let mut daemon = Self::serve(&config, Arc::new(supervisor), control, metrics, ready)?;
        daemon.replaces = Some(old);
        Ok(daemon)
    }

    /// Lets the daemon that this one replaces end.
    pub fn is_ready(&mut self) {
        if let Some(old) = self.replaces.take() {
            Taken::serves(&old);
        }
    }

    fn serve(
        config: &Config,
        supervisor: Arc<Supervisor>,
        control: Option<SocketFile>,
        metrics: Option<Place>,
        ready: &mut dyn Write,
    ) -> Result<Self> {
        let front = Front { control: control.map(Arc::new), metrics: metrics.map(Arc::new) };
        let (control, metrics) = (front.control.clone(), front.metrics.clone());
        supervisor.set_front(front);
        let access = config.control.as_ref().map(|control| control.access).unwrap_or_default();
        let access = Arc::new(ControlAccess::new(access, config.captures.is_on()));
        let metrics = metrics.map(|place| {
            let (access, supervisor) = (Arc::clone(&access), Arc::clone(&supervisor));
            let text = move || status(&access, &supervisor, true).openmetrics().map_err(|error| error.to_string());
            MetricsServer::start(place, Box::new(text))
        });
        let metrics = metrics.transpose().context("metrics")?;
        let control = control.map(|socket| ControlServer::start(socket, access, Arc::clone(&supervisor)));
        let control = control.transpose().context("control socket")?;
        announce(config, ready);
        Ok(Self { control, metrics, supervisor, config: config.clone(), replaces: None })
    }

    /// Applies the differences between a new configuration and the last one: adds new devices and networks, and removes
    /// those that are gone.
    ///
    /// # Errors
    /// Resources are unavailable, or a setting changed that is fixed while the daemon runs. Nothing has changed in that
    /// case.
    pub fn reload(&mut self, config: Config) -> Result<Changes, String> {
        let changes = self.supervisor.reload(&config)?;
        self.config = config;
        Ok(changes)
    }

    /// Returns a receiver that is notified when this daemon has to end, because another one has replaced it.
    pub fn replaced(&self) -> Receiver<()> {
        self.supervisor.replaced()
    }

    /// Returns `true` once another daemon has replaced this one.
    pub fn is_replaced(&self) -> bool {
        self.supervisor.is_replaced()
    }

    /// Ends the process of a daemon that was replaced. Its sockets belong to the other daemon, so nothing else is
    /// dropped: that would remove their files.
    pub fn leave(mut self) -> ! {
        // Requests that are being served get their answers.
        drop(self.control.take());
        drop(self.metrics.take());
        std::process::exit(0)
    }

    /// Returns a function that returns only if the daemon is alive: it makes the same calls as a request at the control
    /// socket.
    pub(crate) fn alive(&self) -> impl Fn() + Send + use<> {
        let supervisor = Arc::clone(&self.supervisor);
        move || drop(supervisor.status(false))
    }

    /// Returns a short description of the served devices.
    pub fn summary(&self) -> String {
        let (devices, networks) = (self.config.devices().count(), self.config.networks.len());
        format!("devices: {devices}; networks: {networks}")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // After this, no thread waits for replies of workers.
        self.supervisor.begin_stop();
    }
}

/// Announces that everything runs: a line in the log, and one for each device.
fn announce(config: &Config, ready: &mut dyn Write) {
    // Log: once, at the start.
    info!("{}", start_line(config));
    for (_, device) in config.devices() {
        // The reader of this output may have closed it.
        let _ = writeln!(ready, "{}", ready_line(device));
    }
    let _ = ready.flush();
}

/// Opens the control socket, if there is to be one. The daemon serves without it if the default path cannot be used.
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

/// Describes the networks and devices for the log.
fn start_line(config: &Config) -> String {
    let networks = config.networks.iter().map(|network| {
        let devices: Vec<_> = network.devices.iter().map(|device| device.config.name.as_str()).collect();
        format!("network {} (devices {})", network.name, devices.join(", "))
    });
    let networks = networks.collect::<Vec<_>>().join(", ");
    format!("pvrdmad {}: backend {}, {networks}", crate::VERSION, config.backend)
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
    format!("{}: ready on {} (mac {}, roce {roce}, pin {pin})", device.config.name, device.socket, device.mac)
}
