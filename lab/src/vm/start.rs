//! Starts a machine from its description.

use std::fs::File;
use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::builder::{RunAs, VmBuilder};
use super::channel::Channel;
use super::machine::Vm;
use super::qemu::{self, Line};
use crate::image::append_program;
use crate::process::BoundChild;

impl VmBuilder {
    /// Starts the machine and waits until its agent answers.
    pub fn boot(self) -> Result<Vm> {
        let vm = self.start()?;
        vm.wait_boot()?;
        Ok(vm)
    }

    /// Starts the machine without waiting for the guest.
    pub fn start(self) -> Result<Vm> {
        let prepared = self.prepare()?;
        let (mut qemu, mut arguments) = prepared.builder.image.qemu();
        if let Some(user) = &prepared.builder.run_as {
            chown(&prepared.agent_socket, Some(user.user), None).context("cannot give a socket away")?;
            let wrapped = as_user(user, &qemu);
            qemu = "setpriv".to_owned();
            arguments.splice(0..0, wrapped);
            let firmware = readable_firmware(&prepared.builder)?;
            arguments.extend(["-L".to_owned(), firmware.to_string_lossy().into_owned()]);
        }
        arguments.extend(qemu::machine_arguments(&prepared.builder)?);
        arguments.extend(prepared.boot_arguments());
        arguments.extend(["-qmp".to_owned(), format!("unix:{},server=on,wait=off", prepared.monitor.display())]);
        log::debug!("{}: {qemu} {}", prepared.builder.name, arguments.join(" "));
        let log = File::create(&prepared.qemu_log)
            .with_context(|| format!("cannot create {}", prepared.qemu_log.display()))?;
        let process = BoundChild::spawn(&format!("QEMU of {}", prepared.builder.name), &qemu, |command| {
            command
                .args(&arguments)
                .env("QEMU_MODULE_DIR", prepared.builder.image.qemu_module_directory())
                .stdin(std::process::Stdio::null())
                .stderr(log);
            if let Ok(out) = File::options().append(true).open(&prepared.qemu_log) {
                command.stdout(out);
            }
        })?;
        prepared.accept(Arc::new(Mutex::new(process)))
    }

    /// Returns the words of a command that runs the machine under KVM in a guest that acts as the host. All paths are
    /// those of that guest: the image, the first stage, the character device that leads to the listener for the agent,
    /// and the console output.
    pub fn command(mut self, initramfs: &Path, agent: &Path, console: &Path) -> Result<Vec<String>> {
        self.kvm = true;
        let (program, mut words) = self.image.qemu();
        words.insert(0, program);
        words.extend(qemu::machine_arguments(&self)?);
        words.extend(qemu::boot_arguments(&self, initramfs, Line::Device(agent), console));
        Ok(words)
    }

    /// Prepares the files and sockets that a machine needs before QEMU runs.
    pub fn prepare(self) -> Result<Prepared> {
        let file = |suffix: &str| self.directory.join(format!("{}.{suffix}", self.name));
        let agent_socket = file("agent");
        remove_stale(&agent_socket)?;
        let listener = UnixListener::bind(&agent_socket)
            .with_context(|| format!("cannot listen on {}", agent_socket.display()))?;
        let initramfs = file("initramfs");
        std::fs::copy(self.image.initramfs(), &initramfs)
            .with_context(|| format!("cannot write {}", initramfs.display()))?;
        let program = std::env::current_exe().context("cannot find this program")?;
        append_program(&initramfs, "guest-tests", &program)?;
        let (console, qemu_log, monitor) = (file("console"), file("qemu.log"), file("monitor"));
        Ok(Prepared { builder: self, listener, agent_socket, initramfs, console, qemu_log, monitor })
    }
}

/// A machine whose QEMU has not started: its files exist, and the agent socket is listening.
#[derive(Debug)]
pub struct Prepared {
    builder: VmBuilder,
    listener: UnixListener,
    agent_socket: PathBuf,
    initramfs: PathBuf,
    console: PathBuf,
    qemu_log: PathBuf,
    monitor: PathBuf,
}

impl Prepared {
    /// Returns the QEMU options that boot the image and connect the agent on any kind of machine.
    pub fn boot_arguments(&self) -> Vec<String> {
        qemu::boot_arguments(&self.builder, &self.initramfs, Line::Socket(&self.agent_socket), &self.console)
    }

    /// Returns the path of the first stage, which contains this program.
    pub fn initramfs(&self) -> &Path {
        &self.initramfs
    }

    /// Marks the machine as run by another one. If it does not boot, the host's console is reported as well, and a
    /// panic of the host ends the wait.
    pub fn played_by(self, host: &Vm) -> Self {
        Self { console: host.console.clone(), ..self }
    }

    /// Returns the path of the socket for the agent.
    pub fn agent_socket(&self) -> &Path {
        &self.agent_socket
    }

    /// Waits for QEMU, which `process` runs, without waiting for the guest.
    pub fn accept(self, process: Arc<Mutex<BoundChild>>) -> Result<Vm> {
        let stream = accept(&self.listener, &process, &self.qemu_log)?;
        let channel = Channel::new(stream)?;
        Ok(Vm {
            name: self.builder.name,
            process,
            channel,
            console: self.console,
            qemu_log: self.qemu_log,
            monitor: self.monitor,
            started: Instant::now(),
            patience: self.builder.patience,
        })
    }
}

/// Copies the firmware to a folder that every user can read: QEMU calls `access`, which ignores capabilities.
fn readable_firmware(builder: &VmBuilder) -> Result<PathBuf> {
    let copies = builder.directory.join("firmware");
    let copy = || -> std::io::Result<()> {
        std::fs::create_dir_all(&copies)?;
        for folder in builder.image.qemu_firmware() {
            for entry in std::fs::read_dir(folder)? {
                let file = entry?.path();
                let is_firmware = file.extension().is_some_and(|suffix| suffix == "bin" || suffix == "rom");
                if let Some(name) = file.file_name().filter(|_| is_firmware) {
                    std::fs::copy(&file, copies.join(name))?;
                }
            }
        }
        Ok(())
    };
    copy().context("cannot copy QEMU's firmware")?;
    Ok(copies)
}

/// Returns `setpriv` arguments that run `program` as another user. The only remaining capability permits reading every
/// file; it does not permit connecting to a socket, which takes write permission.
fn as_user(user: &RunAs, program: &str) -> Vec<String> {
    let RunAs { user, groups } = user;
    let kvm = std::fs::metadata("/dev/kvm").map(|device| device.gid());
    let groups: Vec<_> = groups.iter().copied().chain(kvm).map(|group| group.to_string()).collect();
    let kept = "-all,+dac_read_search";
    vec![
        format!("--reuid={user}"),
        format!("--regid={user}"),
        format!("--groups={}", groups.join(",")),
        format!("--inh-caps={kept}"),
        format!("--ambient-caps={kept}"),
        format!("--bounding-set={kept}"),
        "--".to_owned(),
        program.to_owned(),
    ]
}

/// Waits for QEMU, which connects to the socket as it starts.
fn accept(
    listener: &UnixListener,
    process: &Mutex<BoundChild>,
    errors: &Path,
) -> Result<std::os::unix::net::UnixStream> {
    listener.set_nonblocking(true).context("cannot poll a socket")?;
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).context("cannot use a socket")?;
                return Ok(stream);
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error).context("cannot accept QEMU's connection"),
        }
        if let Some(status) = process.lock().unwrap_or_else(PoisonError::into_inner).exited() {
            bail!("QEMU ended at once with {status}:\n{}", std::fs::read_to_string(errors).unwrap_or_default());
        }
        if Instant::now() > deadline {
            bail!("QEMU did not connect to the agent's socket within 30 s");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn remove_stale(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}
