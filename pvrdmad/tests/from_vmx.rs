//! Configurations made from VMX files: they load, and have the settings that the VM had on ESXi.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use pvrdmad::config::{Config, ConfigSpec, Pin};
use pvrdmad::vmx::Vmx;

const PROGRAM: &str = env!("CARGO_BIN_EXE_pvrdmad");

/// Network, name, MAC address and residency of a device.
type Device = (&'static str, &'static str, &'static str, Pin);

/// Files, each with its devices.
const FILES: [(&str, &[Device]); 10] = [
    ("plain", &[("rdma", "plain", "00:0c:29:10:00:01", Pin::Registered)]),
    ("two-adapters", &[("dvportgroup-1012", "two-adapters", "00:50:56:a1:00:11", Pin::Registered)]),
    ("reserved", &[("dvportgroup-1012", "reserved", "00:50:56:a1:00:20", Pin::All)]),
    ("old-hardware", &[("rdma", "old-hardware", "00:50:56:3a:00:30", Pin::Registered)]),
    ("disconnected", &[("rdma", "disconnected", "00:50:56:a1:00:40", Pin::Registered)]),
    ("quoted-name", &[("prod--rdma----7", "db--main---k-ln---nr.-1", "00:0c:29:10:00:50", Pin::Registered)]),
    ("passthrough", &[("rdma", "passthrough", "00:0c:29:10:00:60", Pin::Registered)]),
    ("static-over-generated", &[("rdma", "static-over-generated", "00:50:56:3a:00:70", Pin::Registered)]),
    (
        "three-devices",
        &[
            ("storage", "three-devices", "00:0c:29:10:00:80", Pin::Registered),
            ("storage", "three-devices-2", "00:0c:29:10:00:81", Pin::Registered),
            ("compute", "three-devices-3", "00:0c:29:10:00:82", Pin::Registered),
        ],
    ),
    (
        "long-name",
        &[("a-port-group-with-a-name-tha", "a-virtual-machine-with-a-nam", "00:0c:29:10:00:90", Pin::Registered)],
    ),
];

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vmx").join(name).with_extension("vmx")
}

fn convert(arguments: &[&str], files: &[PathBuf]) -> Output {
    Command::new(PROGRAM).arg("from-vmx").args(arguments).args(files).output().unwrap()
}

/// Returns network, name, MAC address and residency of each device of a configuration.
fn devices(text: &[u8]) -> Vec<(String, String, String, Pin)> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("made.toml");
    fs::write(&path, text).unwrap();
    let config = Config::load(Some(&path), ConfigSpec::default()).unwrap();
    let devices = config.devices();
    let all = devices.map(|(network, device)| {
        assert!(device.nic_socket.is_some(), "an adapter of ESXi has both functions");
        (network.name.clone(), device.config.name.clone(), device.mac.to_string(), device.pin)
    });
    all.collect()
}

#[test]
fn ten_files_become_configurations() {
    let written = fs::read_dir(file("plain").parent().unwrap()).unwrap().count();
    assert_eq!(written, FILES.len());
    for (name, expected) in FILES {
        let output = convert(&[], &[file(name)]);
        assert!(output.status.success(), "{output:?}");
        // The line that the comment names is valid.
        let text = String::from_utf8(output.stdout.clone()).unwrap();
        assert!(text.contains("\n# uplink = "));
        let count = devices(text.replacen("\n# uplink = ", "\nuplink = ", 1).as_bytes()).len();
        assert_eq!(count, expected.len(), "{name}");
        let mut made = devices(&output.stdout);
        made.sort_by(|one, other| one.1.cmp(&other.1));
        let expected =
            expected.iter().map(|&(net, name, mac, pin)| (net.to_owned(), name.to_owned(), mac.to_owned(), pin));
        assert_eq!(made, expected.collect::<Vec<_>>(), "{name}");
    }
}

#[test]
fn all_virtual_machines_of_a_host_become_one_configuration() {
    let files: Vec<_> = FILES.iter().map(|(name, _)| file(name)).collect();
    let output = convert(&["--folder", "/run/pv'\"rdma/"], &files);
    let count: usize = FILES.iter().map(|(_, devices)| devices.len()).sum();
    assert_eq!(devices(&output.stdout).len(), count, "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.matches("[[network]]").count(), 6, "one for each port group: {text}");
    for comment in [
        "# quoted-name.vmx: DB \"main\" (Köln), Nr. 1",
        "# ethernet1 (e1000e) is not converted",
        "# PCI passthrough is not converted",
        "# It is not connected at power on: pvrdmad link down --device disconnected",
        "# memory: 65536 MiB",
    ] {
        assert!(text.contains(comment), "{comment}: {text}");
    }
}

#[test]
fn another_adapter_can_be_taken() {
    let output = convert(&["--adapter", "ethernet0"], &[file("two-adapters")]);
    assert_eq!(devices(&output.stdout)[0].2, "00:50:56:a1:00:10");
    let refused = convert(&["--adapter", "ethernet7"], &[file("two-adapters")]);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && said.contains("ethernet0 vmxnet3, ethernet1 pvrdma"), "{said}");
}

/// Attack: files that are none, and values with control characters, quotes and line breaks of TOML.
#[test]
fn a_hostile_file_adds_nothing() {
    let head = "virtualHW.version = \"19\"\n";
    for (text, problem) in [
        (String::new(), "virtualHW.version"),
        ("[[device]]\n".to_owned(), "line 1"),
        (format!("{head}memSize = 8192\n"), "line 2"),
        (format!("{head}{}", "#".repeat(2 << 20)), "at most"),
    ] {
        let error = format!("{:#}", Vmx::parse("x.vmx", &text).unwrap_err());
        assert!(error.contains(problem), "{error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x\u{1b}.vmx");
    let breaks = "|0A[[device]]|0Aname = |22evil|22|0D\u{1b}[31m\u{2028}";
    let adapter = format!(
        "ethernet0.present = \"TRUE\"\nethernet0.virtualDev = \"pvrdma\"\nethernet0.networkName = \"{breaks}\"\n\
         ethernet0.generatedAddress = \"00:0c:29:00:00:01\"\nethernet1.present = \"TRUE\"\nethernet1.virtualDev = \"{breaks}\"\n"
    );
    let rest = format!("displayName = \"{breaks}\"\nmemSize = \"{breaks}\"\nvirtualHW.version = \"{breaks}\"\n");
    fs::write(&path, format!("{adapter}{rest}")).unwrap();
    let output = convert(&[], std::slice::from_ref(&path));
    let made = devices(&output.stdout);
    assert_eq!((made.len(), made[0].1.contains("evil")), (1, true), "{output:?}");
    assert!(!String::from_utf8(output.stdout).unwrap().contains(['\u{1b}', '\r', '\u{2028}']));
    for mac in ["", "00:00:00:00:00:00", "zz", "\\\" \\n"] {
        fs::write(&path, format!("{head}{}", adapter.replace("00:0c:29:00:00:01", mac))).unwrap();
        assert!(!convert(&[], std::slice::from_ref(&path)).status.success(), "{mac}");
    }
}
