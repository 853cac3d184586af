//! QEMU's monitor: hot-plugs devices into a running machine.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::machine::Vm;

impl Vm {
    /// Plugs in a device; `arguments` are those of QEMU's `device_add`.
    pub fn add_device(&self, arguments: &Value) -> Result<()> {
        self.monitor(&json!({ "execute": "device_add", "arguments": arguments })).map(drop)
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
