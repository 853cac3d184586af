//! The configuration: a file, and words of the command line or of the control socket.
//!
//! An accepted configuration reaches the daemon's processes unchanged; a refused one changes nothing. Values that have
//! a textual form can be read back from it.
#![no_main]

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::str::FromStr;

use libfuzzer_sys::fuzz_target;
use pvrdma_ether_link::link_spec::LinkSpec;
use pvrdmad::config::{
    BackendSpec, BitRate, Config, ConfigSpec, ControlSpec, DeviceSpec, FaultWord, MetricsSpec, NetworkSpec,
    SocketPlace, change_share, share_words,
};
use rustix::fs::MemfdFlags;

/// Texts that a byte above 127 stands for, because random bytes do not form keys.
const WORDS: [&str; 128] = [
    // Of the file.
    "\n[[device]]\nname = \"a\"\nsocket = \"/a\"\nmac = \"52:54:00:00:00:01\"\n",
    "\n[[device]]\nname = \"b\"\nsocket = \"/b\"\nmac = \"52:54:00:00:00:02\"\n",
    "\n[[device]]\nname = \"",
    "\n[[network]]\nname = \"n\"\nuplink = \"tap:t\"\n",
    "\n[[network]]\nname = \"default\"\n",
    "\n[[network]]\nname = \"",
    "\nuplink = \"vxlan:10.0.0.1\"\nremote = [\"10.0.0.2\"]\n",
    "\nnetwork = \"n\"\n",
    "\nbackend = \"ibverbs,device=a\"\n",
    "\n[backend]\ndevice = \"a\"\n",
    "\n[congestion]\n",
    "\n[control]\npath = \"/c\"\n",
    "\n[metrics]\naddress = \"unix:/m\"\n",
    "\ncontrol = \"/c\"\n",
    "\nmetrics = \"127.0.0.1:1\"\n",
    "\nisolate = \"device\"\n",
    "\nsandbox = \"off\"\n",
    "\ncaptures = \"off\"\n",
    "\n[device.limits]\n",
    "\nmax_qp = ",
    "\nmax_qp_wr = ",
    "\nline_rate_mbps = ",
    "\nmin_rate_mbps = ",
    "\npeers = [\"",
    "\naddress = [\"",
    "\nnic = \"tap:u\"\n",
    "\nmax-rate = \"1G\"\n",
    "\nlink-rate = \"10G\"\n",
    "\nmode = \"660\"\n",
    "\nowner = 0\n",
    "\"\n",
    " = ",
    // Lines of the command line.
    "\nD",
    "\nN",
    "\nR",
    "\nname=a,socket=/a,mac=52:54:00:00:00:01",
    "\nDname=a,socket=/a,mac=52:54:00:00:00:01",
    "\nDname=b,socket=fd:3,mac=52-54-00-00-00-02",
    "\nDname=c,socket=/c,mac=52:54:00:00:00:03,network=n",
    "\nNname=n,uplink=tap:t",
    "\nNname=m,uplink=vxlan:10.0.0.1,vni=7,remote=10.0.0.2",
    "\nNname=default",
    "\nBibverbs,device=a",
    "\nBrxe",
    "\nC/c,mode=660",
    "\nMunix:/m",
    "\nM[::1]:9",
    "\nFloss:0.1/duplicate:0.2/seed:7",
    "\nFoff",
    "\nSweight=",
    "\nSmax-rate=1G,min-rate=",
    "\nL",
    "\nP",
    "\nV",
    // Keys.
    ",name=",
    ",socket=",
    ",mac=",
    ",owner=",
    ",group=",
    ",mode=",
    ",roce=v1",
    ",roce=v2",
    ",pin=registered",
    ",pin=off",
    ",memory=sealed",
    ",max-memory=",
    ",max-locked=",
    ",doorbells=mapped",
    ",version=17",
    ",version=",
    ",intx",
    ",network=",
    ",nic=unix:/n",
    ",nic-socket=/n",
    ",uplink=vxlan:10.0.0.1",
    ",uplink=vxlan:[fd00::1]:1",
    ",uplink=unix-dgram:/x:/y",
    ",uplink=af_packet:eth0",
    ",uplink=",
    ",remote=10.0.0.",
    ",remote=[fd00::2]",
    ",vni=",
    ",learn=remotes",
    " name=o,uplink=tap:o,icrc=agreed",
    ",vlan=trunk",
    ",vlan=",
    ",mtu=",
    ",link-rate=",
    ",max-rate=",
    ",min-rate=",
    ",qp-max-rate=",
    ",burst=",
    ",weight=",
    ",offload=off",
    ",fault=loss:0.1",
    ",peers=10.0.0.0/8",
    ",peers=",
    ",address=own",
    ",address=any",
    ",address=10.0.0.1",
    ",local=off",
    ",seed=",
    ",pcp=",
    ",forged-transmits=",
    ",cm=umad",
    ",negotiate=off",
    ",addresses=10.0.0.0/8+fd00::/8",
    ",poll=",
    // Values.
    "18446744073709551615",
    "4294967296",
    "65535",
    "16777215",
    "4094",
    "0.0001",
    "99.999G",
    "100T",
    "100k",
    "off",
    "on",
    "true",
    "e308",
    "/128",
    "unix:/",
    "vxlan:::1",
    "tap:",
    "fd:",
    "é",
    "\u{0}",
];

fn text(bytes: &[u8]) -> String {
    let word = |byte: &u8| match byte.checked_sub(128) {
        Some(index) => WORDS[usize::from(index)].to_owned(),
        None => char::from(*byte).to_string(),
    };
    bytes.iter().map(word).collect()
}

/// Checks that the textual form of a value is read back as the same value.
fn again<T: FromStr<Err: fmt::Debug> + fmt::Display + PartialEq + fmt::Debug>(word: &str) {
    if let Ok(value) = word.parse::<T>() {
        assert_eq!(value.to_string().parse::<T>().unwrap(), value, "{word:?}");
    }
}

/// Changes a share, and reads its textual form back.
fn share(pairs: &str) {
    let set: BTreeMap<_, _> =
        pairs.split(',').filter_map(|pair| pair.split_once('=')).map(|(k, v)| (k.to_owned(), v.to_owned())).collect();
    if let Ok(changed) = change_share(Default::default(), &set) {
        assert_eq!(change_share(Default::default(), &share_words(&changed)), Ok(changed), "{pairs:?}");
    }
}

/// A device that is added later, possibly with a new network.
type Later = (DeviceSpec, Option<NetworkSpec>);

/// Parses options of the command line, and devices that are added later.
fn words(text: &str) -> (ConfigSpec, Vec<Later>) {
    let (mut spec, mut later) = (ConfigSpec::default(), Vec::new());
    for line in text.lines() {
        let mut letters = line.chars();
        let kind = letters.next();
        let rest = letters.as_str();
        match kind {
            Some('D') => spec.devices.extend(rest.parse::<DeviceSpec>()),
            Some('R') => {
                let (device, network) = rest.split_once(' ').unwrap_or((rest, ""));
                later.extend(device.parse().map(|device| (device, network.parse().ok())));
            }
            Some('N') => spec.networks.extend(rest.parse::<NetworkSpec>()),
            Some('B') => spec.backend = rest.parse::<BackendSpec>().ok().or(spec.backend),
            Some('C') => spec.control = rest.parse::<ControlSpec>().ok().or(spec.control),
            Some('M') => spec.metrics = rest.parse::<MetricsSpec>().ok().or(spec.metrics),
            Some('F') => again::<FaultWord>(rest),
            Some('S') => share(rest),
            Some('L') => drop(rest.parse::<LinkSpec>()),
            Some('P') => again::<SocketPlace>(rest),
            Some('V') => {
                if let Ok(rate) = rest.parse::<BitRate>() {
                    assert_eq!(rate.word().parse(), Ok(rate), "{rest:?}");
                }
            }
            _ => {}
        }
    }
    (spec, later)
}

/// Returns the configuration from a file and a command line.
fn load(file: &str, command_line: ConfigSpec) -> Option<Config> {
    let mut memory = File::from(rustix::fs::memfd_create("configuration", MemfdFlags::CLOEXEC).unwrap());
    memory.write_all(file.as_bytes()).unwrap();
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    Config::load(Some(Path::new(&path)), command_line).inspect_err(|error| assert!(!error.to_string().is_empty())).ok()
}

/// Checks that the configuration is unchanged after transfer between processes of the daemon.
fn travels(config: &Config) {
    let sent = serde_json::to_vec(config).unwrap();
    assert_eq!(&serde_json::from_slice::<Config>(&sent).unwrap(), config);
}

fuzz_target!(|data: &[u8]| {
    let Some((&split, data)) = data.split_first() else { return };
    // The file, then the command line.
    let (file, command_line) = data.split_at(data.len() * usize::from(split & 15) / 15);
    let (spec, later) = words(&text(command_line));
    let Some(mut config) = load(&text(file), spec) else { return };
    travels(&config);
    for (device, network) in later {
        let (before, name) = (config.clone(), device.name.clone());
        match config.add_device(device, network) {
            Ok(()) => {
                travels(&config);
                let mut without = config.clone();
                without.remove_device(&name, |network| before.networks.iter().any(|known| known.name == network));
                assert_eq!(without, before, "a removal does not undo the addition");
            }
            Err(_) => assert_eq!(config, before, "refused, and changed all the same"),
        }
    }
});
