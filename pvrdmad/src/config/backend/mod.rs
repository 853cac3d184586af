//! The backend, as written on the command line and in the file: a file for each kind, and this registry.

mod ibverbs;
mod rxe;
mod settings;

use std::fmt;
use std::str::FromStr;

use pvrdma_ibverbs::IbverbsConfig;
use serde::{Deserialize, Serialize};

pub(crate) use self::settings::Feature;
use self::settings::{About, Settings};

/// The adapter that carries the traffic.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BackendSpec {
    /// The software adapter.
    #[default]
    Rxe,
    /// The host's adapter.
    Ibverbs(IbverbsConfig),
}

/// A kind of backend.
pub(crate) struct BackendKind {
    /// Description.
    pub(crate) about: About,
    /// Parses the keys that follow its name.
    parse: fn(Option<&str>) -> Result<BackendSpec, String>,
}

/// All kinds of backends.
pub(crate) const BACKENDS: &[BackendKind] = &[
    BackendKind { about: rxe::ABOUT, parse: |keys| rxe::parse(keys).map(|()| BackendSpec::Rxe) },
    BackendKind { about: ibverbs::ABOUT, parse: |keys| ibverbs::parse(keys).map(BackendSpec::Ibverbs) },
];

impl BackendSpec {
    /// Returns the settings. Only this function and the registry of workers tell the backends apart.
    pub(crate) fn settings(&self) -> &dyn Settings {
        match self {
            Self::Rxe => &rxe::Software,
            Self::Ibverbs(config) => config,
        }
    }
}

impl FromStr for BackendSpec {
    type Err = String;

    /// Parses a kind, and its keys after a comma: `rxe` or `ibverbs,device=NAME,key=value…`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, keys) = text.split_once(',').map_or((text, None), |(name, keys)| (name, Some(keys)));
        let Some(kind) = BACKENDS.iter().find(|kind| kind.about.name == name) else {
            let known: Vec<_> = BACKENDS.iter().map(|kind| kind.about.syntax).collect();
            return Err(format!("'{name}' is not one of {}", known.join(" or ")));
        };
        (kind.parse)(keys)
    }
}

impl fmt::Display for BackendSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.settings().describe())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use pvrdma_ibverbs::{CmMode, GidIndex};

    use super::*;
    use crate::sandbox::Profile;

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
            ("ibverbs,device=a,cm=yes", "cm: 'yes' is not one of auto, umad, host, local"),
            ("ibverbs,device=a,device=b", "twice"),
            ("ibverbs,device=a,addresses=10.0.0.1", "network"),
            ("ibverbs,device=a,addresses=10.0.0.0/8+", "network"),
            ("ibverbs,device=a,speed=9", "speed"),
        ] {
            let error = text.parse::<BackendSpec>().unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }

    #[test]
    fn features_and_needs() {
        let host: BackendSpec = "ibverbs,device=mlx5_0".parse().unwrap();
        let (rxe, host) = (BackendSpec::Rxe.settings(), host.settings());
        for feature in [Feature::Links, Feature::Shares, Feature::Faults, Feature::MeasuredDoorbells] {
            assert_eq!(rxe.has(feature), Ok(()));
            assert!(host.has(feature).unwrap_err().contains("the host's adapter"), "{feature:?}");
        }
        assert_eq!([false, true].map(|addressed| rxe.profile(addressed)), [Profile::Rxe, Profile::RxeAddressed]);
        assert_eq!([false, true].map(|addressed| host.profile(addressed)), [Profile::Ibverbs; 2]);
        assert_eq!((rxe.adapter(), host.adapter()), (None, Some("mlx5_0")));
    }
}
