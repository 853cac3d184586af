//! Cost of received packets alone: the packets are recorded once, and a link delivers them as fast as they are taken.

use anyhow::Result;

use super::recorded::{Load, Played, Receivers};
use crate::bench::figure::Figure;

/// Connections of the row with two threads.
const QPS: usize = 8;
/// Devices of the row with many.
const DEVICES: u8 = 64;
/// Window of a requester.
const WINDOW: usize = 256;

/// Compares received RDMA writes for a port with two threads and with one.
pub(super) fn threads(runs: usize) -> Result<Figure> {
    let load = |port_threads| Load {
        devices: 1,
        connections: QPS,
        write: 1 << 20,
        window: usize::MAX,
        switched: false,
        port_threads,
    };
    #[expect(clippy::cast_precision_loss, reason = "figures have three digits")]
    let rate = |played: Played| played.bytes as f64 / played.seconds / 1e9;
    let rounds = compare(runs, load(2), load(1), rate)?;
    let title = format!("received RDMA writes of {QPS} QPs, a port with two threads");
    Ok(Figure::of_rounds("in-process/receive-threads", title, "GB/s", false, &rounds, "one thread"))
}

/// Compares the cost of a packet for many devices of a network and for one, with the same number of connections.
pub(super) fn devices(runs: usize) -> Result<Figure> {
    let load = |devices| Load {
        devices,
        connections: DEVICES.into(),
        write: 256 << 10,
        window: WINDOW,
        switched: true,
        port_threads: 1,
    };
    #[expect(clippy::cast_precision_loss, reason = "figures have three digits")]
    let cost = |played: Played| played.processor * 1e6 / played.packets as f64;
    let rounds = compare(runs, load(DEVICES), load(1), cost)?;
    let title = format!("processor time of a received packet, {DEVICES} devices with a QP each");
    let baseline = "one device with as many QPs";
    Ok(Figure::of_rounds("in-process/receive-devices", title, "µs", true, &rounds, baseline))
}

/// Measures two loads alternately.
fn compare(runs: usize, ours: Load, baseline: Load, of: impl Fn(Played) -> f64) -> Result<Vec<[f64; 2]>> {
    let (mut ours, mut baseline) = (Receivers::new(ours)?, Receivers::new(baseline)?);
    (0..runs).map(|_| Ok([of(ours.play()?), of(baseline.play()?)])).collect()
}
