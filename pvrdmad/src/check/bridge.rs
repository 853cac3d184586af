//! Checks of an uplink whose interface is a port of a bridge with a VXLAN tunnel, as EVPN uses it.

use std::fs;
use std::path::Path;

use super::report::{Report, Subject};

/// Flag of an interface that is up (`IFF_UP`).
const UP: u32 = 1;

/// Describes the bridge and its tunnels, and warns of settings with which frames do not reach other hosts.
///
/// `interfaces` is the directory of the kernel's network interfaces, `mtu` that of the network. An interface that is
/// no port of a bridge, or a bridge without tunnels, causes no line.
pub(super) fn look(subject: &Subject<'_>, interfaces: &Path, name: &str, mtu: u32, report: &mut Report) {
    let bridge = fs::read_link(interfaces.join(name).join("brport/bridge")).ok();
    let Some(bridge) = bridge.as_deref().and_then(Path::file_name).and_then(|name| name.to_str()) else { return };
    let tunnels = tunnels(interfaces, bridge);
    if tunnels.is_empty() {
        return;
    }
    report.say(format!("  {name} is a port of the bridge {bridge}; its VXLAN tunnels: {}", tunnels.join(", ")));
    for interface in [name, bridge].into_iter().chain(tunnels.iter().map(String::as_str)) {
        look_at_interface(subject, interfaces, interface, mtu, report);
    }
    for tunnel in &tunnels {
        if number(interfaces, tunnel, "brport/learning") == Some(1) {
            report.warning(
                subject,
                format!("{bridge} learns MAC addresses behind {tunnel} from frames, beside those of a control plane"),
                format!("with EVPN: bridge link set dev {tunnel} learning off"),
            );
        }
    }
}

/// Returns the ports of a bridge that are VXLAN devices, in the order of their names.
fn tunnels(interfaces: &Path, bridge: &str) -> Vec<String> {
    let Ok(ports) = fs::read_dir(interfaces.join(bridge).join("brif")) else { return Vec::new() };
    let names = ports.filter_map(|port| port.ok()?.file_name().into_string().ok());
    let is_tunnel = |name: &String| {
        let text = fs::read_to_string(interfaces.join(name).join("uevent")).unwrap_or_default();
        text.lines().any(|line| line == "DEVTYPE=vxlan")
    };
    let mut tunnels: Vec<_> = names.filter(is_tunnel).collect();
    tunnels.sort();
    tunnels
}

fn look_at_interface(subject: &Subject<'_>, interfaces: &Path, name: &str, mtu: u32, report: &mut Report) {
    if let Some(carried) = number(interfaces, name, "mtu").filter(|carried| *carried < mtu) {
        let problem = format!("{name} carries packets of {carried} bytes, the network's have up to {mtu}");
        report.warning(subject, problem, format!("ip link set {name} mtu {mtu}, or mtu={carried} for the network"));
    }
    if number(interfaces, name, "flags").is_some_and(|flags| flags & UP == 0) {
        report.warning(subject, format!("{name} is down"), format!("ip link set {name} up"));
    }
}

/// Reads a decimal number, or a hexadecimal one with its prefix, from an attribute of an interface.
fn number(interfaces: &Path, name: &str, attribute: &str) -> Option<u32> {
    let text = fs::read_to_string(interfaces.join(name).join(attribute)).ok()?;
    let text = text.trim();
    text.strip_prefix("0x").map_or_else(|| text.parse().ok(), |digits| u32::from_str_radix(digits, 16).ok())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Creates the folders of sysfs for a tap `vm7` and a tunnel `vx7` in a bridge `br7`.
    fn interfaces() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for (name, kind) in [("vm7", ""), ("vx7", "DEVTYPE=vxlan\n"), ("br7", "DEVTYPE=bridge\n")] {
            write(&format!("{name}/mtu"), "1450\n");
            write(&format!("{name}/flags"), "0x1003\n");
            write(&format!("{name}/uevent"), &format!("{kind}INTERFACE={name}\n"));
        }
        for port in ["vm7", "vx7"] {
            write(&format!("br7/brif/{port}"), "");
            write(&format!("{port}/brport/learning"), if port == "vx7" { "0\n" } else { "1\n" });
            symlink("../../br7", folder.path().join(port).join("brport/bridge")).unwrap();
        }
        folder
    }

    fn text(folder: &Path, mtu: u32) -> String {
        let mut report = Report::default();
        look(&Subject { name: "network red", key: "uplink" }, folder, "vm7", mtu, &mut report);
        report.text()
    }

    #[test]
    fn a_tunnel_of_a_control_plane_is_recognised() {
        let folder = interfaces();
        assert_eq!(text(folder.path(), 1450), "  vm7 is a port of the bridge br7; its VXLAN tunnels: vx7\n");
    }

    #[test]
    fn wrong_settings_are_named() {
        let folder = interfaces();
        for (file, value, words) in [
            ("vx7/brport/learning", "1\n", "warning: network red: uplink: br7 learns MAC addresses behind vx7"),
            ("vx7/mtu", "1400\n", "vx7 carries packets of 1400 bytes, the network's have up to 1450"),
            ("br7/flags", "0x1002\n", "br7 is down"),
        ] {
            let path = folder.path().join(file);
            let right = fs::read_to_string(&path).unwrap();
            fs::write(&path, value).unwrap();
            let text = text(folder.path(), 1450);
            assert!(text.contains(words) && text.matches("warning:").count() == 1, "{file}: {text}");
            fs::write(&path, right).unwrap();
        }
        assert_eq!(text(folder.path(), 9000).matches("up to 9000").count(), 3);
    }

    #[test]
    fn other_interfaces_cause_no_line() {
        let folder = interfaces();
        fs::write(folder.path().join("vx7/uevent"), "INTERFACE=vx7\n").unwrap();
        assert_eq!(text(folder.path(), 9000), "\n");
        fs::remove_file(folder.path().join("vm7/brport/bridge")).unwrap();
        assert_eq!(text(folder.path(), 9000), "\n");
    }
}
