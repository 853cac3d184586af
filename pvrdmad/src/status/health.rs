//! The problems of a daemon, for probes: everything in a status that needs an action.

use super::report::{DaemonStatus, LinkReport, NetworkState, NetworkStatus};

impl DaemonStatus {
    /// Returns the problems, a line each. Counters are not judged: that is the task of alerts.
    pub fn problems(&self) -> Vec<String> {
        let mut problems: Vec<_> = self.networks.iter().flat_map(NetworkStatus::problems).collect();
        problems.extend(self.wedged.iter().map(|wedged| wedged.render()));
        for device in &self.devices {
            let name = device.name();
            if let Some(error) = &device.memory.pin_error {
                problems.push(format!("device {name}: {error}"));
            }
            if let Some(LinkReport { link, up: Some(false) }) = &device.network.nic {
                problems.push(format!("device {name}: {link} is down"));
            }
        }
        problems
    }
}

impl NetworkStatus {
    fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if self.state != NetworkState::Running {
            problems.push(self.state.word().to_owned());
        }
        if !self.lost_vms.is_empty() {
            problems.push(format!("{}: device lost until the VM restarts", self.lost_vms.join(", ")));
        }
        if !self.stuck_clients.is_empty() {
            problems.push(format!("{}: a call of its client's thread does not return", self.stuck_clients.join(", ")));
        }
        problems.extend(self.lost_sockets.iter().map(|path| format!("{path}: the file of this socket was removed")));
        if let Some(LinkReport { link, up: Some(false) }) = &self.uplink {
            problems.push(format!("{link} is down"));
        }
        if let Some(interface) = &self.interface {
            let name = &interface.name;
            if !interface.up {
                problems.push(format!("interface {name} is {}", interface.state));
            }
            if let Some(backup) = interface.backup.as_ref().filter(|backup| *backup != "up") {
                problems.push(format!("the backup interface of {name} is {backup}"));
            }
            problems.extend(interface.mtu_difference().map(|difference| format!("interfaces {difference}")));
            if let Some((mtu, wanted)) = interface.too_short() {
                problems.push(format!("interface {name} carries packets of {mtu} bytes, not of {wanted}"));
            }
        }
        problems.into_iter().map(|problem| format!("network {}: {problem}", self.name)).collect()
    }
}
