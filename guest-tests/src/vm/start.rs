//! From the description of a machine to a running one.

use std::fs::File;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::builder::VmBuilder;
use super::channel::Channel;
use super::machine::Vm;
use super::qemu;
use crate::image::append_file;
use crate::process::BoundChild;

impl VmBuilder {
    /// Starts the machine and waits until its agent answers.
    pub(crate) fn boot(self) -> Result<Vm> {
        let vm = self.start()?;
        vm.wait_boot()?;
        Ok(vm)
    }

    /// Starts the machine and does not wait for the guest.
    pub(crate) fn start(self) -> Result<Vm> {
        let file = |suffix: &str| self.directory.join(format!("{}.{suffix}", self.name));
        let agent_socket = file("agent");
        remove_stale(&agent_socket)?;
        let listener = UnixListener::bind(&agent_socket)
            .with_context(|| format!("cannot listen on {}", agent_socket.display()))?;
        let initramfs = file("initramfs");
        std::fs::copy(self.image.initramfs(), &initramfs)
            .with_context(|| format!("cannot write {}", initramfs.display()))?;
        let program = std::env::current_exe().context("cannot find this program")?;
        append_file(&initramfs, "guest-tests", &program)?;

        let console = file("console");
        let errors = file("qemu.log");
        let log = File::create(&errors).with_context(|| format!("cannot create {}", errors.display()))?;
        let (qemu, mut arguments) = self.image.qemu();
        arguments.extend(qemu::arguments(&self, &initramfs, &agent_socket, &console)?);
        log::debug!("{}: {qemu} {}", self.name, arguments.join(" "));
        let mut process = BoundChild::spawn(&format!("QEMU of {}", self.name), &qemu, |command| {
            command
                .args(&arguments)
                .env("QEMU_MODULE_DIR", self.image.qemu_module_directory())
                .stdin(std::process::Stdio::null())
                .stderr(log);
            if let Ok(out) = File::options().append(true).open(&errors) {
                command.stdout(out);
            }
        })?;
        let stream = accept(&listener, &mut process, &errors)?;
        let channel = Channel::new(stream)?;
        Ok(Vm {
            name: self.name.clone(),
            process: Mutex::new(process),
            channel,
            console,
            qemu_log: errors,
            started: Instant::now(),
            patience: self.patience,
        })
    }
}

/// QEMU connects to us as it starts.
fn accept(listener: &UnixListener, process: &mut BoundChild, errors: &Path) -> Result<std::os::unix::net::UnixStream> {
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
        if let Some(status) = process.exited() {
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
