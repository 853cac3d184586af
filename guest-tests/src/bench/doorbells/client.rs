//! Two devices of a daemon, and a client that drives them like a process of a guest, without a virtual machine. A
//! doorbell costs a message here, but not the VM exit of a guest.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use pvrdma_dev::testing::Encoded;

use super::sides::{Place, TRAPPED};
use crate::bench::figure::Figure;
use crate::daemon::{Daemon, DaemonDevice};
use crate::device_pair::{Side, connected_at, connected_mapped_at, ring};

const WRITES: u32 = 5_000;
const WARM_UP: u32 = 500;

/// Measures writes of 8 bytes, one at a time.
pub(super) fn measure(runs: usize) -> Result<Figure> {
    let directory = tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
    // Threads inherit the placement of the thread that starts them. The caller's own placement does not change.
    let rounds = std::thread::scope(|scope| {
        let rounds = scope.spawn(|| -> Result<Vec<[f64; 2]>> {
            let mut mapped = Ends::start(&directory.path().join("mapped"), "mapped")?;
            let mut trapped = Ends::start(&directory.path().join("trapped"), "trapped")?;
            Place::Guest.of_this_thread()?;
            (0..runs).map(|_| Ok([mapped.write()?, trapped.write()?])).collect()
        });
        rounds.join()
    });
    let rounds = rounds.map_err(|_| anyhow::anyhow!("the client panicked"))??;
    let title = "8-byte write of a client of `pvrdmad`, post to completion, with a processor to spare".to_owned();
    Ok(Figure::of_rounds("doorbells/client-write", title, "µs", true, &rounds, TRAPPED))
}

/// A daemon with a driver of its devices.
struct Ends {
    sides: [Side; 2],
    element: Vec<Encoded>,
    _daemon: Daemon,
}

impl Ends {
    fn start(directory: &Path, doorbells: &str) -> Result<Self> {
        std::fs::create_dir(directory)?;
        let devices = [1, 2].map(|number: u8| DaemonDevice {
            name: format!("vm{number}"),
            socket: directory.join(number.to_string()),
            mac: format!("52:54:00:00:00:{number:02x}"),
            options: format!(",pin=off,doorbells={doorbells}"),
        });
        let daemon = Daemon::start(directory, &devices)?;
        let sockets = devices.map(|device| device.socket);
        let sides = match doorbells {
            "mapped" => connected_mapped_at(&sockets, 4096)?,
            _ => connected_at(&sockets, 4096)?,
        };
        for process in daemon.processes() {
            Place::Spare.of_process(process)?;
        }
        let element = sides[0].writes(&sides[1], 8).take(1).collect();
        Ok(Self { sides, element, _daemon: daemon })
    }

    /// Returns the microseconds from a post to its completion.
    fn write(&mut self) -> Result<f64> {
        let Self { sides: [a, _], element, .. } = self;
        a.post_and_reap(element, WARM_UP, 1, ring)?;
        let start = Instant::now();
        a.post_and_reap(element, WRITES, 1, ring)?;
        Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(WRITES))
    }
}
