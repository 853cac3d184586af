//! QEMU's monitor: hot-plugs devices and memory into a running machine, and wakes it up.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::machine::Vm;

impl Vm {
    /// Plugs in a device; `arguments` are those of QEMU's `device_add`.
    pub fn add_device(&self, arguments: &Value) -> Result<()> {
        self.monitor(&json!({ "execute": "device_add", "arguments": arguments })).map(drop)
    }

    /// Plugs in shared memory, of which [`more_memory_mib`](super::builder::VmBuilder::more_memory_mib) is the maximum.
    pub fn add_memory(&self, memory_mib: u32) -> Result<()> {
        let size = u64::from(memory_mib) << 20;
        let backend = json!({ "qom-type": "memory-backend-memfd", "id": "more", "size": size, "share": true });
        self.monitor(&json!({ "execute": "object-add", "arguments": backend }))?;
        self.add_device(&json!({ "driver": "pc-dimm", "id": "dimm", "memdev": "more" }))
    }

    /// Returns QEMU's word for the state of the machine.
    pub fn run_state(&self) -> Result<String> {
        let answer = self.monitor(&json!({ "execute": "query-status" }))?;
        let state = answer["return"]["status"].as_str();
        Ok(state.with_context(|| format!("{}: no state in {answer}", self.name))?.to_owned())
    }

    /// Wakes the machine from suspend to RAM.
    pub fn wake_up(&self) -> Result<()> {
        self.monitor(&json!({ "execute": "system_wakeup" })).map(drop)
    }

    /// Moves the machine to the QEMU that waits on this socket, and waits until it runs there.
    pub fn migrate(&self, socket: &Path, limit: Duration) -> Result<()> {
        let uri = format!("unix:{}", socket.display());
        self.monitor(&json!({ "execute": "migrate", "arguments": { "uri": uri } }))?;
        let deadline = Instant::now() + limit;
        loop {
            let answer = self.monitor(&json!({ "execute": "query-migrate" }))?;
            match answer["return"]["status"].as_str() {
                Some("completed") => return Ok(()),
                Some("failed" | "cancelled") => bail!("{}: the migration has failed: {answer}", self.name),
                _ if Instant::now() > deadline => bail!("{}: the migration does not end: {answer}", self.name),
                // The monitor sends no event for the end unless it is asked to before.
                _ => std::thread::sleep(Duration::from_millis(100)),
            }
        }
    }

    /// Sends a request to the monitor and returns its answer.
    fn monitor(&self, request: &Value) -> Result<Value> {
        let path = self.monitor.display();
        let mut stream = UnixStream::connect(&self.monitor).with_context(|| format!("cannot connect to {path}"))?;
        let mut lines = BufReader::new(stream.try_clone().context("cannot share the monitor's socket")?).lines();
        let mut answer = Value::Null;
        for request in [&json!({ "execute": "qmp_capabilities" }), request] {
            writeln!(stream, "{request}").with_context(|| format!("cannot write to {path}"))?;
            // The greeting and events may come before the answer.
            loop {
                let line = lines.next().with_context(|| format!("{}: the monitor is gone", self.name))??;
                answer = serde_json::from_str(&line).with_context(|| format!("the monitor says {line}"))?;
                if answer.get("error").is_some() {
                    bail!("{}: {request}: {answer}", self.name);
                }
                if answer.get("return").is_some() {
                    break;
                }
            }
        }
        Ok(answer)
    }
}
