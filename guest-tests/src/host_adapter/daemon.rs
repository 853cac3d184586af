//! The daemon itself on the adapter.

use anyhow::{Context, Result, ensure};
use pvrdmad::config::{Config, ConfigSpec};
use pvrdmad::control::ask_status;
use pvrdmad::daemon::Daemon;

/// Starts the daemon with two devices, queries its status, and ends it.
pub(super) fn check(device: &str, cm: &str) -> Result<()> {
    let folder = tempfile::tempdir().context("cannot create a directory")?;
    let path = |name: &str| folder.path().join(name);
    let spec = |index: u32| {
        let socket = path(&format!("vm{index}"));
        format!("name=vm{index},socket={},mac=52:54:00:00:00:0{index},pin=off", socket.display())
    };
    let parse = |text: String| text.parse().map_err(anyhow::Error::msg);
    let command_line = ConfigSpec {
        devices: vec![parse(spec(1))?, parse(spec(2))?],
        backend: Some(
            format!("ibverbs,device={device},port=1,gid-index=auto,cm={cm}").parse().map_err(anyhow::Error::msg)?,
        ),
        control: Some(path("control").into()),
        ..ConfigSpec::default()
    };
    let config = Config::load(None, command_line)?;
    let mut ready = Vec::new();
    let daemon = Daemon::start(&config, &mut ready)?;
    ensure!(String::from_utf8_lossy(&ready).lines().count() == 2, "not both devices are ready");
    let status = ask_status(&path("control"), false)?;
    ensure!(status.backend == format!("ibverbs ({device} port 1)"), "{}", status.backend);
    ensure!(status.devices.iter().all(|device| device.port == "active"), "{}", status.render());
    drop(daemon);
    println!("the daemon runs on {device}");
    Ok(())
}
