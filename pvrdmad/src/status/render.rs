//! What the daemon says about itself, as tables for people.

use std::collections::BTreeMap;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, ContentArrangement, Table};

use super::report::{CaptureReport, DaemonStatus, DeviceReport, NetworkReport};
use crate::config::Pin;

impl DaemonStatus {
    /// Tables for people.
    pub fn render(&self) -> String {
        let mut devices = table();
        devices.set_header([
            "device", "client", "guest", "port", "memory", "resident", "QPs", "CQs", "SRQs", "MRs", "PDs", "GIDs",
        ]);
        for device in &self.devices {
            let count = |kind: &str| device.objects.get(kind).copied().unwrap_or(0).to_string();
            let resident = match (&device.memory.pin_error, device.memory.pin) {
                (Some(_), _) => "FAILED".to_owned(),
                (None, Pin::Off) => "off".to_owned(),
                (None, _) => size(device.memory.pinned_bytes),
            };
            devices.add_row([
                device.name.clone(),
                if device.client.connected { "connected" } else { "none" }.to_owned(),
                if device.client.connected { &device.phase } else { "-" }.to_owned(),
                device.port.clone(),
                size(device.memory.mapped_bytes),
                resident,
                count("qps"),
                count("cqs"),
                count("srqs"),
                count("mrs"),
                count("pds"),
                count("gids"),
            ]);
        }
        for column in devices.column_iter_mut().skip(4) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let mut text = format!(
            "pvrdmad {} (process {}), up {} s, backend {}\n{devices}\n",
            self.version, self.pid, self.uptime_s, self.backend
        );
        for device in &self.devices {
            if let Some(error) = &device.memory.pin_error {
                text += &format!("{}: {error}\n", device.name);
            }
        }
        for device in &self.devices {
            let CaptureReport { active, frames, dropped } = device.capture;
            if active + frames + dropped > 0 {
                let share = percent(dropped, frames.saturating_add(dropped));
                text += &format!(
                    "{}: {active} captures, {frames} frames captured, {dropped} dropped ({share})\n",
                    device.name
                );
            }
        }
        if self.lost_pages != 0 {
            text +=
                &format!("{} pages of guest memory were truncated by their VMM and read as zero\n", self.lost_pages);
        }
        text + &self.render_network() + &self.render_counters()
    }

    /// What crossed the ports of devices with an uplink. Every counter by itself is among the others below.
    fn render_network(&self) -> String {
        let mut network = table();
        network.set_header([
            "network",
            "MTU",
            "sent",
            "frames",
            "received",
            "frames",
            "resent",
            "timeouts",
            "dropped",
            "passed in",
            "passed out",
        ]);
        for device in &self.devices {
            let Some(NetworkReport { mtu, counters }) = &device.network else { continue };
            let count = |name: &str| counters.get(name).copied().unwrap_or(0);
            let dropped: u64 = counters
                .iter()
                .filter(|(name, _)| name.contains("_dropped") || name.contains("_lost_in"))
                .map(|(_, count)| count)
                .sum();
            network.add_row([
                device.name.clone(),
                mtu.to_string(),
                size(count("wire_sent_bytes")),
                count("wire_frames_sent").to_string(),
                size(count("wire_received_bytes")),
                count("wire_frames_received").to_string(),
                count("wire_resent").to_string(),
                count("wire_timeouts").to_string(),
                dropped.to_string(),
                count("passed_in").to_string(),
                count("passed_out").to_string(),
            ]);
        }
        for column in network.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        if network.is_empty() { String::new() } else { format!("{network}\n") }
    }

    /// Counters that are not zero, one column for each device.
    fn render_counters(&self) -> String {
        let columns: Vec<BTreeMap<&str, u64>> = self.devices.iter().map(DeviceReport::all_counters).collect();
        let names: BTreeMap<&str, ()> = columns.iter().flatten().map(|(&name, _)| (name, ())).collect();
        if names.is_empty() {
            return String::new();
        }
        let mut counters = table();
        counters.set_header(["counter"].into_iter().chain(self.devices.iter().map(|device| device.name.as_str())));
        for name in names.keys() {
            let values = columns.iter().map(|column| column.get(name).map_or_else(String::new, u64::to_string));
            counters.add_row([(*name).to_owned()].into_iter().chain(values));
        }
        for column in counters.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        format!("{counters}\n")
    }
}

impl DeviceReport {
    fn all_counters(&self) -> BTreeMap<&str, u64> {
        let network = self.network.iter().flat_map(|network| &network.counters);
        let others =
            self.counters.iter().chain(&self.adapter).chain(network).map(|(name, &value)| (name.as_str(), value));
        others.filter(|&(_, value)| value != 0).collect()
    }
}

fn table() -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Dynamic);
    table
}

/// A share for people.
fn percent(part: u64, whole: u64) -> String {
    let tenths = u128::from(part) * 1000 / u128::from(whole.max(1));
    format!("{}.{} %", tenths / 10, tenths % 10)
}

/// Bytes for people.
fn size(bytes: u64) -> String {
    match bytes {
        0..0x400 => format!("{bytes} B"),
        0x400..0x10_0000 => format!("{} KiB", bytes >> 10),
        0x10_0000..0x4000_0000 => format!("{} MiB", bytes >> 20),
        _ => format!("{}.{} GiB", bytes >> 30, (bytes >> 20 & 0x3ff) * 10 / 0x400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(
            [0, 1023, 4096, 512 << 20, 6 << 30, (3 << 30) + (1 << 29)].map(size),
            ["0 B", "1023 B", "4 KiB", "512 MiB", "6.0 GiB", "3.5 GiB"]
        );
    }
}
