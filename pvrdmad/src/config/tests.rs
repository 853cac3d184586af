use std::path::{Path, PathBuf};

use pvrdma_dev::Limits;
use pvrdma_ether_link::link_spec::LinkSpec;
use pvrdma_roce::Congestion;
use pvrdma_rxe::{ForgedTransmits, HeldRequests, PortRules, VlanMode};
use pvrdma_verbs::{AddressRule, OtherAddresses};

use super::congestion::CongestionSpec;
use super::*;

fn args(devices: &[&str]) -> ConfigSpec {
    described(&[], devices)
}

fn described(networks: &[&str], devices: &[&str]) -> ConfigSpec {
    let networks = networks.iter().map(|text| text.parse().unwrap()).collect();
    ConfigSpec {
        networks,
        devices: devices.iter().map(|text| text.parse().unwrap()).collect(),
        ..ConfigSpec::default()
    }
}

#[test]
fn the_command_line_alone() {
    let config = Config::merge(ConfigSpec::default(), args(&["name=vm0,socket=/run/a,mac=52:54:00:00:00:01"])).unwrap();
    let [network] = &config.networks[..] else { panic!("{config:?}") };
    assert_eq!((network.name.as_str(), &network.uplink), ("default", &None));
    let device = &network.devices[0];
    assert_eq!((device.pin, device.roce(), device.config.version), (Pin::Registered, Roce::V2, 20));
    assert!(!device.config.intx);
    assert_eq!(device.config.limits, Limits::default());
}

#[test]
fn the_command_line_wins_over_the_file() {
    let file: ConfigSpec = toml::from_str(
        r#"
        backend = "rxe"
        control = "/run/control"
        [[device]]
        name = "vm0"
        socket = "/run/a"
        mac = "52:54:00:00:00:01"
        pin = "registered"
        [device.limits]
        max_qp = 100
        max_mr_size = 4096
        [[device]]
        name = "vm1"
        socket = "/run/b"
        mac = "52:54:00:00:00:02"
        network = "wire"
        version = 17
        intx = true
        [[network]]
        name = "wire"
        uplink = "unix:/run/u"
        fault = "loss:0.01/seed:7"
        "#,
    )
    .unwrap();
    let args = args(&["name=vm0,pin=off,roce=v1,intx", "name=vm2,socket=/run/c,mac=52:54:00:00:00:03"]);
    let config = Config::merge(file, args).unwrap();
    assert_eq!(config.control.as_ref().unwrap().path, Path::new("/run/control"));
    let devices: Vec<_> = config.devices().collect();
    let [(wire, b), (local, a), (same, c)] = devices[..] else { panic!("{config:?}") };
    assert_eq!((local.name.as_str(), same.name.as_str(), wire.name.as_str()), ("default", "default", "wire"));
    assert_eq!((a.pin, a.roce(), a.config.limits.verbs.max_qp, a.config.intx), (Pin::Off, Roce::V1, 100, true));
    assert_eq!(a.config.limits.verbs.max_cq, Limits::default().verbs.max_cq);
    assert_eq!((b.roce(), b.config.version, b.config.intx), (Roce::V1, 17, true));
    assert_eq!(wire.fault, "seed:7/loss:0.01".parse().ok());
    assert_eq!(c.config.name, "vm2");
}

#[test]
fn mistakes_in_a_device() {
    for (text, word) in [
        ("", "KEY=VALUE"),
        ("name", "KEY=VALUE"),
        ("socket=/a", "needs a name"),
        ("name=a,colour=red", "unknown key 'colour'"),
        ("name=a,name=b", "twice"),
        ("name=a,mac=53:54:00:00:00:01", "multicast"),
        ("name=a,mac=52:54", "MAC"),
        ("name=a,mac=00:00:00:00:00:00", "no address of a device"),
        ("name=a,sock=/a", "unknown key 'sock'; did you mean 'socket'? (the keys of a device are name, socket, mac"),
        ("name=a,limits=3", "unknown key 'limits'"),
        ("name=a,roce=v3", "roce: 'v3' is not one of v1, v2"),
        ("name=a,pin=yes", "registered"),
        ("name=a,version=new", "not a number"),
        ("name=a,version=99999999999", "version: '99999999999' is not a number from 0 to 4294967295"),
        ("name=a,intx=perhaps", "intx: 'perhaps' is neither on nor off"),
        ("name=a,mode=rw", "mode: mode 'rw' is not octal"),
        ("name=a,group=no-such-group", "group: there is no group"),
        ("name=a,owner=4294967295", "owner: 4294967295 is not a user's number"),
        ("name=a,pcp=never", "tagged"),
        ("name=a,forged-transmits=yes", "off, mac, roce, all"),
        ("name=a,hold=writes", "off, sends, all"),
        ("name=a,forged=allow", "unknown key 'forged'; did you mean 'forged-transmits'?"),
        ("name=a,address=10.0.0.0/8", "address: '10.0.0.0/8' is not own, any or an IP address"),
        ("name=a,peers=all", "peers: 'all' is neither an address nor ADDRESS/BITS"),
        ("name=a,seed=x", "seed: 'x' is not a number"),
        ("name=a,seed=1,seed=2", "twice"),
        ("name=a,icrc=agreed", "'icrc' is a key of a network"),
        ("name=a,nic=wifi:0", "nic: 'wifi:0' is not one of af_packet:"),
    ] {
        let error = text.parse::<DeviceSpec>().unwrap_err();
        assert!(error.contains(word), "{text}: {error}");
    }
    for (devices, word) in [
        (&[][..], "no device"),
        (&["name=a,mac=52:54:00:00:00:01"], "socket"),
        (&["name=a,socket=/a"], "mac"),
        (&["name=a b,socket=/a,mac=52:54:00:00:00:01"], "letters"),
        (&["name=a,socket=/a,mac=52:54:00:00:00:01,version=16"], "17 to 20"),
        (&["name=a,socket=/a,mac=52:54:00:00:00:01,forged-transmits=all"], "uplink=LINK of the network"),
        (&["name=a,socket=/a,mac=52:54:00:00:00:01,version=17,roce=v2"], "RoCE v2"),
        (&["name=a,socket=/a,mac=52:54:00:00:00:01", "name=a,socket=/b,mac=52:54:00:00:00:02"], "name is taken"),
        (
            &["name=a,socket=/a,mac=52:54:00:00:00:01", "name=b,socket=/a,mac=52:54:00:00:00:02"],
            "device b: socket /a is also the socket of device a",
        ),
        (
            &["name=a,socket=/a,mac=52:54:00:00:00:01", "name=b,socket=/b,mac=52:54:00:00:00:01"],
            "device b: device a of the same network has the same MAC",
        ),
        (&["name=a,socket=/a,mac=52:54:00:00:00:01,nic=unix:/n"], "needs an uplink"),
        (&["name=a,socket=/a,mac=52:54:00:00:00:01,network=n,nic=unix:/n"], "the same"),
        (&["name=a,socket=/a,mac=52:54:00:00:00:01,network=n,nic=vxlan:::1"], "no nic"),
        (&["name=a,socket=/a,mac=52:54:00:00:00:01,network=n,nic=unix:/l,nic-socket=/m"], "two ways"),
        (&["name=a,socket=/a,mac=52:54:00:00:00:01,nic-socket=/a"], "nic-socket /a is also the socket of device a"),
    ] {
        let given = described(&["name=n,uplink=unix:/n"], devices);
        let error = Config::merge(ConfigSpec::default(), given).unwrap_err().to_string();
        assert!(error.contains(word), "{devices:?}: {error}");
    }
}

#[test]
fn mistakes_in_a_network() {
    for (text, word) in [
        ("name=a,uplink=wifi:0", "uplink: 'wifi:0' is not one of af_packet:"),
        ("name=a,uplink=vxlan:here", "uplink: 'here' is not an IP address"),
        ("name=a,remote=there", "remote: 'there' is not an IP address"),
        ("name=a,vni=blue", "vni: 'blue' is not a number"),
        ("name=a,learn=french", "learn: 'french' is not one of stations, remotes"),
        ("name=a,vni=1,vni=2", "twice"),
        ("name=a,fault=loss:2", "rate of 0.0001 to 1"),
        ("name=a,vlan=x", "vlan: 'x' is neither trunk nor a VLAN (1 to 4094)"),
    ] {
        let error = text.parse::<NetworkSpec>().unwrap_err();
        assert!(error.contains(word), "{text}: {error}");
    }
}

#[test]
fn a_key_of_a_network_at_a_device_says_where_it_belongs() {
    let of_both = ["name", "peers"];
    for key in NetworkSpec::KEYS.iter().map(|key| key.name).filter(|key| !of_both.contains(key)) {
        let error = format!("name=a,{key}=b,socket=/a").parse::<DeviceSpec>().unwrap_err();
        let words =
            format!("'{key}' is a key of a network: write --network name=NAME,{key}=b and, at the device, network=");
        assert!(error.contains(&words), "{error}");
        let error = load::parse(Path::new("f"), &format!("[[device]]\nname = \"a\"\n{key} = \"b\"\n")).unwrap_err();
        let words = format!("`{key}` is a key of a network: write it in a [[network]] with a name, and network = ");
        assert!(error.to_string().contains(&words), "{error}");
    }
    // Other unknown keys have other hints.
    let error = load::parse(Path::new("f"), "[[device]]\nname = \"a\"\nnetwrk = \"b\"").unwrap_err().to_string();
    assert!(error.contains("did you mean `network`?") && !error.contains("a key of a network"), "{error}");
}

#[test]
fn ways_to_write_a_value() {
    let spec = |text: &str| text.parse::<DeviceSpec>().unwrap();
    let mac = spec("name=a,mac=52:54:00:00:00:01").mac;
    assert_eq!(spec("name=a,mac=52-54-00-00-00-01").mac, mac);
    let on = spec("name=a,intx").intx;
    for (word, other) in [("on", "off"), ("true", "false"), ("yes", "no")] {
        assert_eq!(spec(&format!("name=a,intx={word}")).intx, on);
        assert_ne!(spec(&format!("name=a,intx={other}")).intx, on);
    }
    let file = |text: &str| toml::from_str::<DeviceSpec>(&format!("name = \"a\"\nintx = {text}")).unwrap().intx;
    assert_eq!((file("true"), file("\"on\"")), (on, on));
    let network: NetworkSpec = "name=a,remote=10.0.0.1,remote=10.0.0.2".parse().unwrap();
    assert_eq!(network.remotes.len(), 2);
}

/// An error about a whole device or network names the line at which the file describes it.
#[test]
fn an_error_of_a_whole_table_has_a_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pvrdmad.toml");
    let said = |text: &str, devices: &[&str]| {
        std::fs::write(&path, text).unwrap();
        Config::load(Some(&path), args(devices)).unwrap_err().to_string()
    };
    let device = |name: &str, mac: u8, rest: &str| {
        format!("[[device]]\nname = \"{name}\"\nsocket = \"/{name}\"\nmac = \"52:54:00:00:00:0{mac}\"\n{rest}\n")
    };
    let a = device("a", 1, "");
    for (text, words) in [
        ("# ä\n\n[[device]]\nname = \"a\"\n".to_owned(), "line 3: device a: needs a socket"),
        (format!("{a}{}", device("b", 2, "version = 21")), "line 6: device b: version 21 is not one of 17 to 20"),
        (
            device("a", 1, "min-rate = \"2G\"\nmax-rate = \"1G\""),
            "line 1: device a: min-rate 2Gbit/s is above max-rate 1Gbit/s",
        ),
        (format!("{a}{a}"), "line 6: device a: the name is taken"),
        (format!("{a}{}", device("b", 1, "")), "line 6: device b: device a of the same network has the same MAC"),
        (format!("{a}[[network]]\nname = \"n\"\nmtu = 1\n"), "line 6: network n: "),
        (format!("\n[congestion]\nmin_rate_mbps = 2\nline_rate_mbps = 1\n{a}"), "line 2: congestion: min_rate_mbps"),
        ("device = [\n{ name = \"a\", socket = \"/a\" }]\n".to_owned(), "line 2: device a: needs a MAC"),
    ] {
        let error = said(&text, &[]);
        assert!(error.starts_with(&format!("{}: {words}", path.display())), "{text}: {error}");
    }
    // A value from the command line has no line.
    for (device, words) in [("name=a,version=21", "device a: version 21"), ("name=b", "device b: needs a socket")] {
        let error = said(&a, &[device]);
        assert!(error.starts_with(words), "{error}");
    }
}

#[test]
fn sockets_of_one_place() {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(folder.path(), folder.path().join("again")).unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let device = |name: &str, mac: u8, rest: &str| format!("name={name},mac=52:54:00:00:00:0{mac},{rest}");
    let load = |networks: &[&str], devices: &[String], control: Option<String>| {
        let devices: Vec<_> = devices.iter().map(String::as_str).collect();
        let control = control.map(|path| PathBuf::from(path).into());
        let command_line = ConfigSpec { control, ..described(networks, &devices) };
        Config::load(None, command_line).unwrap_err().to_string()
    };
    let a = device("a", 1, &format!("socket={}", path("s")));
    let error = load(&[], std::slice::from_ref(&a), Some(path("again/s")));
    assert!(error.contains("is also the control socket"), "{error}");
    let error = load(&[], &[a.clone(), device("b", 2, &format!("socket={}", path("again/./s")))], None);
    assert!(error.contains("device b: socket") && error.contains("the socket of device a"), "{error}");
    let network = format!("name=n,uplink=unix:{}", path("s"));
    let error = load(&[&network], &[a, device("b", 2, &format!("socket={},network=n", path("t")))], None);
    assert!(error.contains("device a: socket") && error.contains("is also the uplink of network n"), "{error}");
}

/// A default in the documentation is the default of the code: giving it changes nothing.
#[test]
fn defaults_are_as_documented() {
    let merged = |network: &str, device: &str| {
        let network = format!("name=default,{network}");
        let device = format!("name=a,socket=/a,mac=52:54:00:00:00:01{device}");
        format!("{:?}", Config::merge(ConfigSpec::default(), described(&[&network], &[&device])).unwrap())
    };
    let mut checked = 0;
    for key in DeviceSpec::KEYS.iter().filter(|key| !["", "required"].contains(&key.default)) {
        let with = format!(",{}={}", key.name, key.default);
        assert_eq!(merged("uplink=unix:/u", ""), merged("uplink=unix:/u", &with), "{}", key.name);
        checked += 1;
    }
    for key in NetworkSpec::KEYS.iter().filter(|key| !["", "required"].contains(&key.default)) {
        let tunnel = ["vni", "learn"].contains(&key.name);
        let network = if tunnel { "uplink=vxlan:10.0.0.1,remote=10.0.0.2" } else { "uplink=unix:/u" };
        let with = format!("{network},{}={}", key.name, key.default);
        // The default MTU depends on the uplink.
        assert_eq!(merged(network, ""), merged(&with, ""), "{}", key.name);
        checked += 1;
    }
    for kind in BACKENDS.iter().map(|kind| &kind.about) {
        for key in kind.keys.iter().filter(|key| !["", "required"].contains(&key.default)) {
            let with = format!("{},{}={}", kind.syntax, key.name, key.default);
            assert_eq!(kind.syntax.parse::<BackendSpec>(), with.parse(), "{}", key.name);
            checked += 1;
        }
    }
    for key in CongestionSpec::KEYS.iter().filter(|key| !key.default.is_empty()) {
        let spec: CongestionSpec = toml::from_str(&format!("{} = {}", key.name, key.default)).unwrap();
        assert_eq!(spec.resolve().unwrap(), Congestion::default(), "{}", key.name);
        checked += 1;
    }
    for key in Limits::keys() {
        // A number in TOML has 63 bits.
        for value in [key.default, *key.range.start(), (*key.range.end()).min(i64::MAX.cast_unsigned())] {
            let limits: Limits = toml::from_str(&format!("{} = {value}", key.name)).unwrap();
            assert_eq!(limits == Limits::default(), value == key.default, "{}", key.name);
        }
        checked += 1;
    }
    assert!(checked > 35, "{checked}");
}

#[test]
fn examples_load() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let config = Config::load(Some(&path), ConfigSpec::default()).unwrap_or_else(|error| panic!("{error}"));
        let ibverbs = matches!(config.backend, BackendSpec::Ibverbs(_));
        assert_eq!(ibverbs, path.ends_with("host-adapter.toml"), "{}", path.display());
        assert!(config.control.is_some());
        // The sockets are in a directory in which only its owner can create them.
        for (_, device) in config.devices() {
            assert!(device.socket.path().unwrap().starts_with("/run/pvrdmad"), "{}", device.socket);
        }
        count += 1;
    }
    assert_eq!(count, 3);
}

#[test]
fn the_reference_page_is_up_to_date() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/configuration.md");
    let written = std::fs::read_to_string(page).unwrap();
    assert!(
        written == reference::markdown(),
        "docs/configuration.md is stale: cargo run -p pvrdmad -- reference > docs/configuration.md"
    );
}

#[test]
fn a_tunnel_in_both_languages() {
    let file: ConfigSpec = toml::from_str(
        r#"
        [[network]]
        name = "tenant"
        uplink = "vxlan:10.0.0.1"
        remote = ["10.0.0.2", "10.0.0.3:8472"]
        vni = 7
        mtu = 8950
        [[device]]
        name = "vm0"
        socket = "/run/a"
        mac = "52:54:00:00:00:01"
        network = "tenant"
        "#,
    )
    .unwrap();
    let network = "name=tenant,uplink=vxlan:10.0.0.1,remote=10.0.0.2,remote=10.0.0.3:8472,vni=7,mtu=8950";
    let device = "name=vm0,socket=/run/a,mac=52:54:00:00:00:01,network=tenant";
    let from_file = Config::merge(file.clone(), args(&[])).unwrap();
    let from_words = Config::merge(ConfigSpec::default(), described(&[network], &[device])).unwrap();
    assert_eq!(from_file, from_words);
    let changed = described(&["name=tenant,remote=10.0.0.9,learn=remotes"], &[]);
    let changed = Config::merge(file, changed).unwrap();
    let Some(LinkSpec::Vxlan(tunnel)) = &changed.networks[0].uplink else { panic!("{changed:?}") };
    assert_eq!(tunnel.remotes, ["10.0.0.9:4789".parse().unwrap()]);
    assert!(tunnel.open && tunnel.vni.get() == 7);
}

#[test]
fn mistakes_in_the_file() {
    for (text, word) in [
        ("colour = 1", "colour"),
        ("[[device]]\nsocket = \"/a\"", "name"),
        ("[[device]]\nname = \"a\"\nspeed = 3", "speed"),
        ("[[device]]\nname = \"a\"\n[device.limits]\nmax_everything = 3", "max_everything"),
        ("[[device]]\nname = \"a\"\n[device.limits]\nmax_qp = 99999999", "max_qp must be 3..=65535"),
        ("[[device]]\nname = \"a\"\nmac = \"zz\"", "MAC"),
        ("[device]\nname = \"a\"", "it is written as [[device]], with double brackets"),
        ("[network]\nname = \"a\"", "it is written as [[network]], with double brackets"),
        ("[[network]]\nname = \"a\"\nmac = \"52:54:00:00:00:01\"", "unknown field `mac`"),
        ("[[network]]\nname = \"a\"\nvlan = 4095", "'4095' is neither trunk nor a VLAN (1 to 4094)"),
        ("[[network]]\nname = \"a\"\nvlan = -1", "'-1' is neither trunk nor a VLAN (1 to 4094)"),
        ("[[device]]\nname = \"a\"\nmode = 660", "string"),
        ("isolate = \"vm\"", "network"),
        ("sandbox = \"maybe\"", "strict"),
        ("[[network]]\nname = \"a\"\nremote = [\"there\"]", "IP address"),
    ] {
        let error = toml::from_str::<ConfigSpec>(text).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
    let error = Config::load(Some(Path::new("/nonexistent.toml")), args(&[])).unwrap_err();
    assert!(error.to_string().contains("/nonexistent.toml"));
}

/// Returns the permissions of the first device on its network.
fn rules(config: &Config) -> PortRules {
    config.networks[0].devices[0].rules.clone()
}

#[test]
fn rules_of_the_network() {
    let file = |text: &str| -> Result<Config, ConfigError> {
        let network = "[[network]]\nname = \"default\"\nuplink = \"unix:/n\"\n";
        let device = "[[device]]\nname = \"a\"\nsocket = \"/a\"\nmac = \"52:54:00:00:00:01\"\n";
        Config::merge(toml::from_str(&format!("{text}\n{network}{device}")).unwrap(), args(&[]))
    };
    let plain = rules(&file("").unwrap());
    let own = AddressRule { others: OtherAddresses::Own, listed: Vec::new() };
    let expected = PortRules::default()
        .with_addresses(Some(own))
        .with_congestion(Some(Congestion::default()))
        .with_negotiate(true)
        .with_multipath(true);
    assert_eq!(plain, expected);
    let text = "[congestion]\nline_rate_mbps = 25000\ncut_interval_us = 300\ncnp_dscp = 46";
    let tuned = rules(&file(text).unwrap()).congestion.unwrap();
    assert_eq!((tuned.line_rate, tuned.cut_interval.as_micros(), tuned.cnp_dscp), (25_000 * 125_000, 300, 46));
    // C10: the rate is that of the network, where it is known and none is given.
    let network = "[[network]]\nname = \"default\"\nuplink = \"unix:/n\"\nlink-rate = \"5M\"\n";
    let slow = |text: &str| {
        let device = "[[device]]\nname = \"a\"\nsocket = \"/a\"\nmac = \"52:54:00:00:00:01\"\n";
        let config = Config::merge(toml::from_str(&format!("{text}\n{network}\n{device}")).unwrap(), args(&[]));
        let congestion = rules(&config.unwrap()).congestion.unwrap();
        (congestion.line_rate, congestion.min_rate)
    };
    assert_eq!((slow(""), slow(text)), ((625_000, 625_000), (25_000 * 125_000, 1_250_000)));
    assert_eq!(Congestion { line_rate: 0, cut_interval: Default::default(), cnp_dscp: 0, ..tuned }, {
        Congestion { line_rate: 0, cut_interval: Default::default(), cnp_dscp: 0, ..Congestion::default() }
    });
    for (text, word) in [
        ("cnp_dscp = 64", "0 to 63"),
        ("cnp_priority = 8", "0 to 7"),
        ("alpha_interval_us = 0", "1 to 1000000"),
        ("min_rate_mbps = 20000", "above"),
        ("alpha_weight = 0", "1 to 65536"),
    ] {
        let error = file(&format!("[congestion]\n{text}")).unwrap_err().to_string();
        assert!(error.contains(word), "{text}: {error}");
    }
    assert!(toml::from_str::<ConfigSpec>("[congestion]\nspeed = 1").is_err());
    let device = "name=a,socket=/a,mac=52:54:00:00:00:01,pcp=always,forged-transmits=mac,congestion=off,negotiate=off,\
                  multipath=off,hold=all";
    let network = "name=default,uplink=unix:/n,vlan=42";
    let config = Config::merge(ConfigSpec::default(), described(&[network], &[device])).unwrap();
    let addresses = Some(AddressRule::default());
    let expected = PortRules::default()
        .with_priority_tags(true)
        .with_forged(ForgedTransmits::Mac)
        .with_addresses(addresses)
        .with_held(HeldRequests::All);
    assert_eq!(rules(&config), expected);
    assert_eq!(config.networks[0].vlan, VlanMode::Access(42));
}

/// Where all addresses are listed, the network function is held to them, unless a key says otherwise.
#[test]
fn guards_are_on_where_addresses_are_listed() {
    let guards = |more: &str| {
        let device = format!("name=a,socket=/a,mac=52:54:00:00:00:01{more}");
        let given = described(&["name=default,uplink=unix:/n"], &[&device]);
        let config = Config::merge(ConfigSpec::default(), given).map_err(|error| error.to_string())?;
        let PortRules { source_guard, ra_guard, dhcp_guard, alone, .. } = rules(&config);
        assert!(!alone, "hosts are beyond the uplink");
        Ok::<_, String>([source_guard, ra_guard, dhcp_guard])
    };
    assert_eq!(guards(""), Ok([false; 3]));
    assert_eq!(guards(",address=10.0.0.5,address=own"), Ok([false; 3]));
    assert_eq!(guards(",address=10.0.0.5"), Ok([true; 3]));
    assert_eq!(guards(",address=10.0.0.5,ra-guard=off"), Ok([true, false, true]));
    assert_eq!(guards(",address=10.0.0.5,dhcp-guard=off,source-guard=off"), Ok([false, true, false]));
    assert_eq!(guards(",ra-guard=on,dhcp-guard=on"), Ok([false, true, true]));
    assert!(guards(",source-guard=on").unwrap_err().contains("list of all addresses"));
    let alone = "name=a,socket=/a,nic-socket=/n,mac=52:54:00:00:00:01";
    assert!(rules(&Config::merge(ConfigSpec::default(), args(&[alone])).unwrap()).alone);
}

/// Configuration that a supervisor sends to its workers is unchanged after decoding.
#[test]
fn a_configuration_travels() {
    let file = r#"
        control = { path = "/run/c", group = 0, mode = "660" }
        isolate = "none"
        sandbox = "strict"
        captures = false
        [congestion]
        line_rate_mbps = 25000
        [[network]]
        name = "a"
        uplink = "vxlan:10.0.0.1"
        remote = ["10.0.0.2"]
        vni = 7
        link-rate = "25G"
        port-threads = 3
        icrc = "agreed"
        fault = "loss:0.01"
        [[network]]
        name = "b"
        uplink = "af_packet:eth0"
        vlan = 42
        [[network]]
        name = "c"
        uplink = "tap:tap0"
        vlan = "trunk"
        [[network]]
        name = "empty"
        [[device]]
        name = "vm0"
        socket = "/run/a"
        mac = "52:54:00:00:00:01"
        network = "a"
        owner = "root"
        nic = "unix-dgram:/x:/y"
        roce = "v1"
        weight = 300
        max-rate = "10G"
        burst = 1000000
        qp-max-rate = "500M"
        min-rate = "1.5G"
        [device.limits]
        max_qp = 100
        [[device]]
        name = "vm1"
        socket = "/run/b"
        mac = "52:54:00:00:00:01"
        network = "b"
        pcp = "always"
        congestion = "off"
        negotiate = "off"
        multipath = "off"
        hold = "off"
        "#;
    let mut config = Config::merge(toml::from_str(file).unwrap(), args(&[])).unwrap();
    // A setting that no file can have, but that a program which embeds a device can make.
    config.networks[0].devices[0].config.limits.verbs.atomics = false;
    let backend =
        "ibverbs,device=a,port=2,gid-index=3,cm=host,untested-infiniband=on,poll=7,addresses=10.0.0.0/8+fd00::/64"
            .parse()
            .unwrap();
    for config in [Config { backend, ..config.clone() }, config] {
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<Config>(&text).unwrap(), config, "{text}");
    }
    assert!(serde_json::from_str::<LinkSpec>(r#"{"tap": "../etc"}"#).is_err());
}
