//! Renders the status of the daemon as tables.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::report::{
    CaptureReport, DaemonStatus, DeviceReport, InterfaceReport, LinkReport, NetworkReport, NetworkState, NetworkStatus,
    NicReport, ShareReport, WedgedProcess,
};
use super::table::{number, percent, short, size, table};
use crate::config::{BitRate, Pin};
use crate::doorbells::DoorbellReport;

/// Advice on how to end a process that cannot be killed.
const WEDGED_REMEDY: &str = "  end the FUSE server that holds it, or write 1 to\n  \
                             /sys/fs/fuse/connections/N/abort (docs/troubleshooting.md)";

impl WedgedProcess {
    /// Renders a line.
    pub fn render(&self) -> String {
        let Self { pid, network, device, since_s, threads } = self;
        let role = device.as_ref().map_or_else(String::new, |device| format!(", the keeper of device {device},"));
        let threads = if threads.is_empty() { String::new() } else { format!(" (threads: {})", threads.join(", ")) };
        format!("network {network}: process {pid}{role} was killed {since_s} s ago and does not end{threads}")
    }
}

/// Counter of refused connections.
const TURNED_AWAY: &str = "client_connections_turned_away";

impl DaemonStatus {
    /// Renders the tables.
    pub fn render(&self) -> String {
        let header = ["device", "guest", "port", "memory", "resident", "QPs", "CQs", "SRQs", "MRs", "PDs", "GIDs"];
        let devices = table(header, 3, self.devices.iter().map(DeviceReport::row));
        let mut text = format!(
            "pvrdmad {} (process {}), up {} s, backend {}\n{devices}",
            self.version, self.pid, self.uptime_s, self.backend
        );
        text += &self.render_nics();
        text += &self.render_networks();
        text += &self.render_recoveries();
        text += &self.render_keepers();
        text += &self.render_wedged();
        for device in &self.devices {
            if let Some(error) = &device.memory.pin_error {
                text += &format!("{}: {error}\n", device.name());
            }
        }
        text += &self.render_failed();
        text += &self.render_faults();
        text += &self.render_holders();
        text += &self.render_links();
        text += &self.render_doorbells();
        text += &self.render_rules();
        for device in &self.devices {
            let CaptureReport { active, frames, dropped } = device.capture;
            if active + frames + dropped > 0 {
                let share = percent(dropped, frames.saturating_add(dropped));
                text += &format!(
                    "{}: {active} captures, {frames} frames captured, {dropped} dropped ({share})\n",
                    device.name()
                );
            }
        }
        if self.lost_mappings != 0 {
            text += &format!(
                "{} mappings of guest memory were taken away by VMMs, which were disconnected\n",
                self.lost_mappings
            );
        }
        for (name, what) in [
            ("control_connections_refused", "connections to the control socket"),
            ("control_captures_refused", "captures"),
            ("control_replacements_refused", "replacements of the daemon"),
        ] {
            let count = self.control.get(name).copied().unwrap_or(0);
            if count != 0 {
                text += &format!("{} {what} were refused\n", number(count));
            }
        }
        text + &self.render_shares() + &self.render_ports() + &self.render_counters()
    }

    /// Devices that are in reset since a crash.
    fn render_recoveries(&self) -> String {
        let mut text = String::new();
        for device in &self.devices {
            let Some(problem) = device.recovery() else { continue };
            let name = short(device.name());
            text += &format!("device {name}: in reset since a crash: reload its driver in the guest\n");
            if let Some(problem) = problem {
                text += &format!("device {name}: its driver could not be told: {problem}\n");
            }
        }
        text
    }

    /// Networks whose clients can block a thread of the daemon forever.
    fn render_keepers(&self) -> String {
        let without = self.networks.iter().filter(|network| !network.keepers);
        let names: Vec<_> = without.map(|network| short(&network.name)).collect();
        if names.is_empty() {
            return String::new();
        }
        format!("{}: no process of its own receives clients' descriptors (isolate=none)\n", names.join(", "))
    }

    /// Processes and threads that do not end.
    fn render_wedged(&self) -> String {
        let mut text: String = self.wedged.iter().map(|wedged| wedged.render() + "\n").collect();
        for network in self.networks.iter().filter(|network| !network.stuck_clients.is_empty()) {
            let (name, devices) = (short(&network.name), network.stuck_clients.join(", "));
            text += &format!("network {name}: {devices}: removed, but a call of its client's thread does not return\n");
        }
        if !text.is_empty() {
            text += &format!("{WEDGED_REMEDY}\n");
        }
        text
    }

    /// Holders of sockets where another client was refused. The refused client has only seen its connection closed.
    fn render_holders(&self) -> String {
        let sockets = self.devices.iter().flat_map(|device| {
            let counter = device.numbers("counters").find(|(name, _)| *name == TURNED_AWAY);
            let card = device.nic.as_ref();
            let nic = card.map(|nic| (device, &nic.socket, &nic.client, nic.counters.get(TURNED_AWAY).copied()));
            [(device, &device.socket, &device.client, counter.map(|(_, count)| count))].into_iter().chain(nic)
        });
        let mut text = String::new();
        for (device, socket, client, count) in sockets {
            if let (Some(process), Some(count @ 1..)) = (client.process, count) {
                let name = short(device.name());
                text += &format!(
                    "{name}: process {process} has {socket}; turned away since the start: {}\n",
                    number(count)
                );
            }
        }
        text
    }

    /// Links that are down, and sockets whose files were removed.
    fn render_links(&self) -> String {
        let uplinks =
            self.networks.iter().filter_map(|network| Some(("network", &network.name[..], network.uplink.as_ref()?)));
        let nics =
            self.devices.iter().filter_map(|device| Some(("device", device.name(), device.network.nic.as_ref()?)));
        let mut text = String::new();
        for (what, name, LinkReport { link, up }) in uplinks.chain(nics) {
            if *up == Some(false) {
                let missing =
                    if link.starts_with("unix") { "no peer is connected" } else { "the interface is not there" };
                text += &format!("{what} {}: {link}: {missing}\n", short(name));
            }
        }
        for network in &self.networks {
            if let Some(interface) = &network.interface {
                text += &interface_lines(&short(&network.name), interface);
            }
        }
        for device in self.devices.iter().filter(|device| device.link_down) {
            text += &format!("device {}: its port is down by the administrator\n", short(device.name()));
        }
        for path in self.networks.iter().flat_map(|network| &network.lost_sockets) {
            text += &format!(
                "{path}: the file of this socket was removed: restart the daemon, or remove and add its device\n"
            );
        }
        text
    }

    /// Devices with mapped doorbells, and those for which mapping is allowed but impossible.
    fn render_doorbells(&self) -> String {
        let mut text = String::new();
        for device in &self.devices {
            let DoorbellReport { mode, reason, watcher, unguarded } = &device.doorbells;
            match (watcher, reason) {
                (Some(watcher), _) => text += &format!("{}: doorbells: {mode} ({watcher})\n", short(device.name())),
                (None, Some(reason)) => {
                    text += &format!("{}: doorbells: {mode} ({reason})\n", short(device.name()));
                }
                (None, None) => {}
            }
            if let Some(reason) = unguarded {
                let name = short(device.name());
                text += &format!("{name}: its VM may end with the process of its network: {reason}\n");
            }
        }
        text
    }

    /// Address rules other than the default, and the peers with which devices may communicate.
    fn render_rules(&self) -> String {
        let unguarded = |device: &&DeviceReport| device.addresses.rule == "own" && !device.addresses.guarded;
        let count = self.devices.iter().filter(unguarded).count();
        let mut text = String::new();
        if count > 0 {
            text += &format!("addresses: unguarded for {count} devices: the first device that binds one has it\n");
        }
        for device in &self.devices {
            for (peers, whose) in device.peers.iter().zip(["", " of its network"]) {
                let more = match peers.len() {
                    0 => continue,
                    1 => String::new(),
                    count => format!(" and {} more", count - 1),
                };
                let first = peers.first().map_or("", String::as_str);
                text += &format!("{}: peers{whose}: {first}{more}\n", short(device.name()));
            }
        }
        text
    }

    /// The networks, unless there is only one, with nothing to report.
    fn render_networks(&self) -> String {
        let plain = |network: &NetworkStatus| network.state == NetworkState::Running && network.restarts == 0;
        if self.networks.len() < 2 && self.networks.iter().all(plain) {
            return String::new();
        }
        let row = |network: &NetworkStatus| {
            let pid = network.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
            let (name, devices) = (network.name.clone(), network.devices.len().to_string());
            vec![name, network.state.word().to_owned(), pid, network.restarts.to_string(), devices]
        };
        let header = ["network", "state", "process", "restarts", "devices"];
        let mut text = table(header, 2, self.networks.iter().map(row));
        for network in &self.networks {
            if let Some(end) = &network.last_end {
                text += &format!("network {}: its last process {end}\n", network.name);
            }
            if !network.lost_vms.is_empty() {
                let names = network.lost_vms.join(", ");
                text += &format!("network {}: {names}: device lost until the VM restarts\n", network.name);
            }
        }
        text
    }

    /// Shares of devices, if one of them has used processor time or has limits.
    fn render_shares(&self) -> String {
        let shares = self.devices.iter().filter_map(|device| Some((device.name(), device.share.as_ref()?)));
        let shown = shares.filter(|(_, share)| share.worker_ns > 0 || share.port_ns > 0 || share.max_rate.is_some());
        let rate =
            |bits: Option<u64>| bits.map_or_else(|| "-".to_owned(), |bits| BitRate::from_bytes(bits / 8).to_string());
        let milliseconds = |ns: u64| number(ns / 1_000_000);
        let row = |(name, share): (&str, &ShareReport)| {
            vec![
                short(name),
                share.weight.to_string(),
                rate(share.min_rate),
                rate(share.max_rate),
                milliseconds(share.worker_ns),
                milliseconds(share.port_ns),
                number(share.throttled),
            ]
        };
        table(["share", "weight", "min", "max", "workers ms", "port ms", "throttled"], 1, shown.map(row))
    }

    /// Traffic through the ports of devices with an uplink. The remaining counters are in the table below.
    fn render_ports(&self) -> String {
        let networks = || {
            let devices = self.devices.iter();
            devices.map(|device| (short(device.name()), &device.network)).filter(|(_, port)| !port.counters.is_empty())
        };
        let traffic = |(name, NetworkReport { mtu, counters, .. }): (String, &NetworkReport)| {
            let count = |name: &str| counters.get(name).copied().unwrap_or(0);
            vec![
                name,
                mtu.to_string(),
                size(count("wire_sent_bytes")),
                number(count("wire_frames_sent")),
                size(count("wire_received_bytes")),
                number(count("wire_frames_received")),
                number(count("passed_in")),
                number(count("passed_out")),
            ]
        };
        let trouble = |(name, NetworkReport { counters, .. }): (String, &NetworkReport)| {
            let count = |name: &str| counters.get(name).copied().unwrap_or(0);
            let is_drop = |name: &str| name.contains("_dropped") || name.contains("_lost_in");
            let dropped: u64 = counters.iter().filter(|(name, _)| is_drop(name)).map(|(_, count)| count).sum();
            vec![name, number(count("wire_resent")), number(count("wire_timeouts")), number(dropped)]
        };
        let header = ["port", "MTU", "sent", "frames", "received", "frames", "passed in", "passed out"];
        table(header, 1, networks().map(traffic))
            + &table(["port", "resent", "timeouts", "dropped"], 1, networks().map(trouble))
    }

    /// Network functions that this daemon emulates.
    fn render_nics(&self) -> String {
        let cards = self.devices.iter().filter_map(|device| Some((short(device.name()), device.nic.as_ref()?)));
        let row = |(name, nic): (String, &NicReport)| {
            let guest = match (nic.client.connected, nic.active) {
                (false, _) => "none",
                (true, false) => "connected",
                (true, true) => "active",
            };
            let count = |name: &str| number(nic.counters.get(name).copied().unwrap_or(0));
            let [sent, received] = ["vmxnet3_sent_frames", "vmxnet3_received_frames"].map(count);
            vec![name, guest.to_owned(), nic.link.clone(), nic.mac.clone(), sent, received]
        };
        table(["network function", "guest", "link", "MAC", "sent", "received"], 4, cards.map(row))
    }

    /// Counters that are not zero, with one column per device and a few devices per table.
    fn render_counters(&self) -> String {
        self.devices.chunks(3).map(render_counters).collect()
    }
}

/// Describes an interface that devices follow, as far as it is not a single one that is up and suits the network.
fn interface_lines(network: &str, interface: &InterfaceReport) -> String {
    let (name, mut lines) = (&interface.name, Vec::new());
    if !interface.up {
        lines.push(format!("ports are down: interface {name} is {}", interface.state));
    }
    if let Some(active) = &interface.active {
        let backup = interface.backup.as_deref().unwrap_or("absent");
        lines.push(format!("{active} of {name} is active, the backup is {backup}"));
    }
    lines.extend(interface.mtu_difference());
    if let Some((mtu, wanted)) = interface.too_short() {
        lines.push(format!("interface {name} carries packets of {mtu} bytes, not of {wanted}: path MTUs are shorter"));
    }
    lines.into_iter().map(|line| format!("network {network}: {line}\n")).collect()
}

fn render_counters(devices: &[DeviceReport]) -> String {
    let columns: Vec<BTreeMap<&str, u64>> = devices.iter().map(DeviceReport::all_counters).collect();
    let names: BTreeSet<&str> = columns.iter().flatten().map(|(&name, _)| name).collect();
    let header = ["counter".to_owned()].into_iter().chain(devices.iter().map(|device| short(device.name())));
    let row = |name: &str| {
        let values = columns.iter().map(|column| column.get(name).map_or_else(String::new, u64::to_string));
        [name.to_owned()].into_iter().chain(values).collect()
    };
    table(header, 1, names.into_iter().map(row))
}

impl DeviceReport {
    /// Renders its line in the table of devices.
    fn row(&self) -> Vec<String> {
        let count = |kind: &str| {
            let objects = self.status.get("objects");
            // A word replaces a number that is unavailable now.
            match objects.and_then(|objects| objects.get(kind)) {
                Some(Value::String(word)) => word.clone(),
                count => count.and_then(Value::as_u64).unwrap_or(0).to_string(),
            }
        };
        let guest = match (self.client.connected, self.phase()) {
            (false, _) => "none",
            (true, "reset") => "connected",
            (true, phase) => phase,
        };
        let resident = match (&self.memory.pin_error, self.memory.pin) {
            (Some(_), _) => "FAILED".to_owned(),
            (None, Pin::Off) => "off".to_owned(),
            (None, _) => size(self.memory.status.pinned_bytes),
        };
        let device =
            [short(self.name()), guest.to_owned(), self.port.clone(), size(self.memory.status.mapped_bytes), resident];
        device.into_iter().chain(["qps", "cqs", "srqs", "mrs", "pds", "gids"].map(count)).collect()
    }

    fn all_counters(&self) -> BTreeMap<&str, u64> {
        let network = self.network.counters.iter().map(|(name, &value)| (name.as_str(), value));
        // Counters of its socket have the same names as those of the device's socket.
        let nic = self.nic.iter().flat_map(|nic| &nic.counters).map(|(name, &value)| (name.as_str(), value));
        let nic = nic.filter(|(name, _)| name.starts_with("vmxnet3_"));
        let others = self.numbers("counters").chain(self.numbers("adapter")).chain(network).chain(nic);
        others.filter(|&(_, value)| value != 0).collect()
    }
}
