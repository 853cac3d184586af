//! The backend in the words of the command line and of the file.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use pvrdma_ibverbs::{CmMode, GidIndex, IbverbsConfig};
use serde::{Deserialize, Deserializer};

/// What carries the traffic.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum BackendSpec {
    /// The software adapter.
    #[default]
    Rxe,
    /// The host's adapter.
    Ibverbs(IbverbsConfig),
}

const KEYS: &str = "device, port, gid-index, addresses, max-pinned, cm, poll";

impl FromStr for BackendSpec {
    type Err = String;

    /// Parses `rxe` or `ibverbs,device=NAME,key=value…`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, rest) = text.split_once(',').map_or((text, None), |(kind, rest)| (kind, Some(rest)));
        match (kind, rest) {
            ("rxe", None) => Ok(Self::Rxe),
            ("rxe", Some(_)) => Err("the backend rxe has no options".to_owned()),
            ("ibverbs", rest) => ibverbs(rest.unwrap_or_default()).map(Self::Ibverbs),
            _ => Err(format!("'{kind}' is not one of rxe or ibverbs,device=NAME")),
        }
    }
}

fn ibverbs(text: &str) -> Result<IbverbsConfig, String> {
    let mut config = IbverbsConfig::new("");
    let mut seen = Vec::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        if value.is_empty() {
            return Err(format!("'{part}': expected KEY=VALUE (the keys of ibverbs are {KEYS})"));
        }
        let wrong = || format!("{key}: '{value}' is not a number that fits");
        match key {
            "device" => value.clone_into(&mut config.device),
            "port" => config.port = value.parse().ok().filter(|&port| port != 0).ok_or_else(wrong)?,
            "gid-index" if value == "auto" => config.gid_index = GidIndex::Auto,
            "gid-index" => config.gid_index = GidIndex::Fixed(value.parse().map_err(|_| wrong())?),
            "addresses" if value == "given" => config.add_addresses.clear(),
            "addresses" => config.add_addresses = value.split('+').map(str::parse).collect::<Result<_, _>>()?,
            "max-pinned" => config.max_pinned = value.parse().map_err(|_| wrong())?,
            "cm" => {
                config.cm = match value {
                    "auto" => CmMode::Auto,
                    "umad" => CmMode::Umad,
                    "local" => CmMode::Local,
                    _ => return Err(format!("cm: '{value}' is not one of auto, umad or local")),
                }
            }
            "poll" => config.poll = Duration::from_micros(value.parse::<u32>().map_err(|_| wrong())?.into()),
            _ => return Err(format!("unknown key '{key}' (the keys of ibverbs are {KEYS})")),
        }
        if seen.contains(&key) {
            return Err(format!("'{key}' is given twice"));
        }
        seen.push(key);
    }
    // The name becomes part of a path in /sys.
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    if config.device.is_empty() || !config.device.chars().all(plain) {
        return Err(
            "the backend ibverbs needs the name of an RDMA device, as `rdma link` shows it (device=NAME)".into()
        );
    }
    Ok(config)
}

impl fmt::Display for BackendSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rxe => f.write_str("rxe"),
            Self::Ibverbs(config) => write!(f, "ibverbs ({} port {})", config.device, config.port),
        }
    }
}

impl<'de> Deserialize<'de> for BackendSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        assert_eq!("rxe".parse(), Ok(BackendSpec::Rxe));
        let text = "ibverbs,device=mlx5_0,port=2,gid-index=3,max-pinned=4096,poll=0,cm=umad";
        let Ok(BackendSpec::Ibverbs(config)) = text.parse() else { panic!("{text}") };
        assert_eq!((config.device.as_str(), config.port, config.gid_index), ("mlx5_0", 2, GidIndex::Fixed(3)));
        assert_eq!((config.max_pinned, config.poll, config.cm), (4096, Duration::ZERO, CmMode::Umad));
        let Ok(BackendSpec::Ibverbs(config)) = "ibverbs,device=a,addresses=10.0.0.0/8+fd00::/64".parse() else {
            panic!()
        };
        let networks: Vec<_> = config.add_addresses.iter().map(ToString::to_string).collect();
        assert_eq!(networks, ["10.0.0.0/8", "fd00::/64"]);
        let given = "ibverbs,device=rxe0,addresses=given";
        assert_eq!(given.parse(), Ok(BackendSpec::Ibverbs(IbverbsConfig::new("rxe0"))));
        assert_eq!("ibverbs,device=rxe0,gid-index=auto".parse(), Ok(BackendSpec::Ibverbs(IbverbsConfig::new("rxe0"))));
    }

    #[test]
    fn mistakes() {
        for (text, word) in [
            ("verbs", "rxe"),
            ("rxe,device=a", "no options"),
            ("ibverbs", "device=NAME"),
            ("ibverbs,device=../a", "device=NAME"),
            ("ibverbs,device", "KEY=VALUE"),
            ("ibverbs,device=a,port=0", "port"),
            ("ibverbs,device=a,port=999", "port"),
            ("ibverbs,device=a,gid-index=x", "gid-index"),
            ("ibverbs,device=a,cm=yes", "auto, umad or local"),
            ("ibverbs,device=a,device=b", "twice"),
            ("ibverbs,device=a,addresses=10.0.0.1", "network"),
            ("ibverbs,device=a,addresses=10.0.0.0/8+", "network"),
            ("ibverbs,device=a,speed=9", "speed"),
        ] {
            let error = text.parse::<BackendSpec>().unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
