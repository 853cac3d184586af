//! The agent in a guest: runs commands for the host over a virtio-serial port, several at once.

mod protocol;

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};

pub use protocol::{Event, PORT_NAME, Request, to_hex};

/// Serves the host until the port closes.
pub fn serve() -> Result<()> {
    let path = find_port()?;
    let port = File::options()
        .read(true)
        .write(true)
        .open(&path)
        .with_context(|| format!("cannot open {}", path.display()))?;
    let agent = Agent {
        port: Arc::new(Mutex::new(port.try_clone().context("cannot share the port")?)),
        running: Arc::new(Mutex::new(HashMap::new())),
    };
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    // A previous agent may have ended in the middle of a line, so that line is ended first.
    agent.write(b"\n");
    agent.send(&Event::Hello { boot: boot.trim().to_owned() });
    for line in BufReader::new(port).lines() {
        let line = line.context("cannot read from the host")?;
        match serde_json::from_str::<Request>(&line) {
            Ok(request) => agent.handle(request),
            Err(error) => eprintln!("agent: a request that is none: {error}"),
        }
    }
    Ok(())
}

#[derive(Clone, Debug)]
struct Agent {
    port: Arc<Mutex<File>>,
    /// Process ids of the running commands; each leads its own process group.
    running: Arc<Mutex<HashMap<u64, i32>>>,
}

impl Agent {
    fn handle(&self, request: Request) {
        match request {
            Request::Spawn { id, command } => {
                if let Err(error) = self.spawn(id, &command) {
                    self.send(&Event::Output { id, text: format!("agent: {error:#}\n") });
                    self.send(&Event::Exit { id, code: -1 });
                }
            }
            Request::Kill { id } => self.kill(id),
            Request::Write { id, path, append, mode, hex } => {
                let code = match write_file(&path, append, mode, &hex) {
                    Ok(()) => 0,
                    Err(error) => {
                        self.send(&Event::Output { id, text: format!("agent: {error:#}\n") });
                        1
                    }
                };
                self.send(&Event::Exit { id, code });
            }
        }
    }

    fn spawn(&self, id: u64, command: &str) -> Result<()> {
        // One pipe for both streams keeps their order.
        let (mut reader, writer) = std::io::pipe().context("cannot create a pipe")?;
        let mut child = Command::new("/bin/sh")
            .args(["-c", command])
            .stdin(Stdio::null())
            .stdout(writer.try_clone().context("cannot share a pipe")?)
            .stderr(writer)
            .process_group(0)
            .spawn()
            .context("cannot start sh")?;
        if let Ok(pid) = i32::try_from(child.id()) {
            self.running.lock().unwrap_or_else(PoisonError::into_inner).insert(id, pid);
        }
        let agent = self.clone();
        // Reading has its own thread, because a background program that the command leaves may keep the pipe open for
        // long.
        let output = std::thread::spawn(move || {
            let mut buffer = [0; 16384];
            while let Ok(count @ 1..) = reader.read(&mut buffer) {
                let text = String::from_utf8_lossy(&buffer[..count]).into_owned();
                agent.send(&Event::Output { id, text });
            }
        });
        let agent = self.clone();
        std::thread::spawn(move || {
            let code = match child.wait() {
                Ok(status) => status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default()),
                Err(_) => -1,
            };
            agent.running.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
            // The last output comes before the exit event, unless a background program keeps the pipe open.
            for _ in 0..100 {
                if output.is_finished() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            agent.send(&Event::Exit { id, code });
        });
        Ok(())
    }

    fn kill(&self, id: u64) {
        let pid = self.running.lock().unwrap_or_else(PoisonError::into_inner).get(&id).copied();
        if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) {
            // The kill fails if the command has ended in the meantime, which is the intended result.
            let _ = rustix::process::kill_process_group(pid, rustix::process::Signal::KILL);
        }
    }

    fn send(&self, event: &Event) {
        let Ok(mut line) = serde_json::to_vec(event) else {
            return;
        };
        line.push(b'\n');
        self.write(&line);
    }

    fn write(&self, line: &[u8]) {
        let mut port = self.port.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = port.write_all(line) {
            eprintln!("agent: cannot write to the host: {error}");
        }
    }
}

/// Opens the serial port named on the kernel's command line (`agent=/dev/ttyS1`), in raw mode.
fn named_port() -> Result<Option<PathBuf>> {
    let line = std::fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let Some(path) = line.split_whitespace().find_map(|word| word.strip_prefix("agent=")) else {
        return Ok(None);
    };
    let status = Command::new("stty").args(["-F", path, "raw", "-echo"]).status().context("cannot run stty")?;
    if !status.success() {
        bail!("cannot set up {path}: stty ended with {status}");
    }
    Ok(Some(PathBuf::from(path)))
}

fn find_port() -> Result<PathBuf> {
    if let Some(path) = named_port()? {
        return Ok(path);
    }
    // The driver creates the port a moment after it is loaded.
    for _ in 0..200 {
        if let Ok(entries) = std::fs::read_dir("/sys/class/virtio-ports") {
            for entry in entries.flatten() {
                let name = std::fs::read_to_string(entry.path().join("name")).unwrap_or_default();
                if name.trim() == PORT_NAME {
                    return Ok(PathBuf::from("/dev").join(entry.file_name()));
                }
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    bail!("this is no guest: there is no virtio-serial port named {PORT_NAME}")
}

fn write_file(path: &str, append: bool, mode: u32, hex: &str) -> Result<()> {
    let bytes = protocol::from_hex(hex).context("the content is not hexadecimal")?;
    let mut file = File::options()
        .create(true)
        .write(true)
        .append(append)
        .truncate(!append)
        .mode(mode)
        .open(path)
        .with_context(|| format!("cannot open {path}"))?;
    file.write_all(&bytes).with_context(|| format!("cannot write {path}"))
}
