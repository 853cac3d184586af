//! The complete state of a paused device as text: an oracle that does not depend on the messages.

use crate::Vmxnet3Device;

/// Fields that may differ between a saved device and the one that continues its state, each with the reason.
const IGNORED: &[&str] = &[
    // Buffers.
    "descs",
    "bytes",
    "room",
    "plan",
    // Counts since the last interrupt; the end of the pause interrupts in any case.
    "completed",
    "completed_descs",
    "batch",
    // Level of the line that the sink knows; the end of the pause reports it.
    "asserted",
    // The session is one from a state.
    "restored",
];

/// Leaves out the ignored fields of pretty debug output.
fn without_ignored(text: &str) -> String {
    let (mut kept, mut until) = (String::new(), None);
    for line in text.lines() {
        let indent = line.len() - line.trim_start().len();
        if let Some(end) = until {
            if indent == end {
                until = None;
            }
            continue;
        }
        let name = line.trim_start().split(':').next().unwrap_or_default();
        if IGNORED.contains(&name) {
            until = line.ends_with(['[', '{', '(']).then_some(indent);
            continue;
        }
        kept.push_str(line);
        kept.push('\n');
    }
    kept
}

/// Returns the state of a paused device.
pub(super) fn dump(device: &Vmxnet3Device) -> String {
    let Vmxnet3Device { core, control, pci } = device;
    let all = (
        (pci, control, core.mac(), &core.interrupts, core.is_bus_master(), core.memory.is_enabled()),
        (&core.paused, &core.depths, &core.coalesce, &core.tx_stats, &core.rx_stats, core.counters.list()),
        core.interrupts.raised(),
    );
    without_ignored(&format!("{all:#?}"))
}
