use pvrdma_rxe::PortRules;

use std::path::Path;

use pvrdma_dev::Limits;
use pvrdma_rxe::Congestion;

use super::*;

fn args(devices: &[&str]) -> ConfigSpec {
    ConfigSpec { devices: devices.iter().map(|text| text.parse().unwrap()).collect(), ..ConfigSpec::default() }
}

#[test]
fn the_command_line_alone() {
    let config = Config::merge(ConfigSpec::default(), args(&["name=vm0,socket=/run/a,mac=52:54:00:00:00:01"])).unwrap();
    let device = &config.devices[0];
    assert_eq!((device.pin, device.roce(), device.config.version), (Pin::All, Roce::V2, 20));
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
        version = 17
        intx = true
        uplink = "unix:/run/u"
        fault = "loss:0.01/seed:7"
        "#,
    )
    .unwrap();
    let args = args(&["name=vm0,pin=off,roce=v1,intx", "name=vm2,socket=/run/c,mac=52:54:00:00:00:03"]);
    let config = Config::merge(file, args).unwrap();
    assert_eq!(config.control.as_deref(), Some(Path::new("/run/control")));
    let [a, b, c] = &config.devices[..] else { panic!("{config:?}") };
    assert_eq!((a.pin, a.roce(), a.config.limits.max_qp, a.config.intx), (Pin::Off, Roce::V1, 100, true));
    assert_eq!(a.config.limits.max_cq, Limits::default().max_cq);
    assert_eq!((b.roce(), b.config.version, b.config.intx), (Roce::V1, 17, true));
    assert_eq!(b.network.as_ref().unwrap().fault, "seed:7/loss:0.01".parse().ok());
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
        ("name=a,roce=v3", "expected `v1` or `v2`"),
        ("name=a,pin=yes", "registered"),
        ("name=a,version=new", "not a number"),
        ("name=a,intx=perhaps", "true or false"),
        ("name=a,vlan=x", "not a number"),
        ("name=a,pcp=never", "tagged"),
        ("name=a,forged=yes", "refuse"),
        ("name=a,uplink=wifi:0", "uplink: 'wifi:0' is not one of af_packet:"),
        ("name=a,uplink=vxlan:here", "uplink: 'here' is not an IP address"),
        ("name=a,remote=there", "remote: 'there' is not an IP address"),
        ("name=a,vni=blue", "vni: 'blue' is not a number"),
        ("name=a,learn=french", "expected `stations` or `remotes`"),
        ("name=a,vni=1,vni=2", "twice"),
        ("name=a,fault=loss:2", "rate of 0.0001 to 1"),
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
        (&["name=a,socket=/a,mac=52:54:00:00:00:01,forged=allow"], "uplink=LINK"),
        (&["name=a,socket=/a,mac=52:54:00:00:00:01,uplink=unix:/n,vlan=0"], "1 to 4094"),
        (&["name=a,socket=/a,mac=52:54:00:00:00:01,uplink=unix:/n,vlan=4095"], "1 to 4094"),
        (&["name=a,socket=/a,mac=52:54:00:00:00:01,version=17,roce=v2"], "RoCE v2"),
        (&["name=a,socket=/a,mac=52:54:00:00:00:01", "name=a,socket=/b,mac=52:54:00:00:00:02"], "name is taken"),
        (&["name=a,socket=/a,mac=52:54:00:00:00:01", "name=b,socket=/a,mac=52:54:00:00:00:02"], "same socket"),
        (&["name=a,socket=/a,mac=52:54:00:00:00:01", "name=b,socket=/b,mac=52:54:00:00:00:01"], "same MAC"),
        (&["name=a,socket=/a,mac=52:54:00:00:00:01,fault=loss:0.1"], "uplink"),
    ] {
        let error = Config::merge(ConfigSpec::default(), args(devices)).unwrap_err().to_string();
        assert!(error.contains(word), "{devices:?}: {error}");
    }
}

#[test]
fn a_tunnel_in_both_languages() {
    let file: ConfigSpec = toml::from_str(
        r#"
        [[device]]
        name = "vm0"
        socket = "/run/a"
        mac = "52:54:00:00:00:01"
        uplink = "vxlan:10.0.0.1"
        remote = ["10.0.0.2", "10.0.0.3:8472"]
        vni = 7
        mtu = 8950
        "#,
    )
    .unwrap();
    let words = "name=vm0,socket=/run/a,mac=52:54:00:00:00:01,uplink=vxlan:10.0.0.1,remote=10.0.0.2,remote=10.0.0.3:8472,\
                 vni=7,mtu=8950";
    let from_file = Config::merge(file.clone(), args(&[])).unwrap();
    let from_words = Config::merge(ConfigSpec::default(), args(&[words])).unwrap();
    assert_eq!(from_file.devices[0].network, from_words.devices[0].network);
    let changed = Config::merge(file, args(&["name=vm0,remote=10.0.0.9,learn=remotes"])).unwrap();
    let Some(LinkSpec::Vxlan(tunnel)) = changed.devices[0].network.clone().map(|network| network.uplink) else {
        panic!("{changed:?}")
    };
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
        ("[[device]]\nname = \"a\"\nmac = \"zz\"", "MAC"),
        ("[[device]]\nname = \"a\"\nremote = [\"there\"]", "IP address"),
    ] {
        let error = toml::from_str::<ConfigSpec>(text).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
    let error = Config::load(Some(Path::new("/nonexistent.toml")), args(&[])).unwrap_err();
    assert!(error.to_string().contains("/nonexistent.toml"));
}

#[test]
fn rules_of_the_network() {
    let file = |text: &str| -> Result<Config, ConfigError> {
        let device = "[[device]]\nname = \"a\"\nsocket = \"/a\"\nmac = \"52:54:00:00:00:01\"\nuplink = \"unix:/n\"\n";
        Config::merge(toml::from_str(&format!("{text}\n{device}")).unwrap(), args(&[]))
    };
    let rules = |config: &Config| config.devices[0].network.as_ref().unwrap().rules.clone();
    let plain = rules(&file("").unwrap());
    assert_eq!(plain, PortRules { congestion: Some(Congestion::default()), ..PortRules::default() });
    let text = "[congestion]\nline_rate_mbps = 25000\ncut_interval_us = 300\ncnp_dscp = 46";
    let tuned = rules(&file(text).unwrap()).congestion.unwrap();
    assert_eq!((tuned.line_rate, tuned.cut_interval.as_micros(), tuned.cnp_dscp), (25_000 * 125_000, 300, 46));
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
    let device = "name=a,socket=/a,mac=52:54:00:00:00:01,uplink=unix:/n,vlan=42,pcp=always,forged=allow,congestion=off";
    let rules = rules(&Config::merge(ConfigSpec::default(), args(&[device])).unwrap());
    assert_eq!(rules, PortRules { vlan: Some(42), priority_tags: true, allow_forged: true, congestion: None });
}
