//! Why there is nothing sensible to serve.

use std::path::PathBuf;

use thiserror::Error;

/// Why there is nothing sensible to serve. What the system said is the source, and not repeated here.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}", path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not what it should be.
    #[error("{}: {problem}", path.display())]
    Parse {
        /// Which file.
        path: PathBuf,
        /// Line, column and what is wrong there.
        problem: String,
    },
    /// A device is not described completely or not correctly.
    #[error("device {name}: {problem}")]
    Device {
        /// Which device.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// A network is not described correctly.
    #[error("network {name}: {problem}")]
    Network {
        /// Which network.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// The parameters of congestion control make no sense.
    #[error("congestion: {0}")]
    Congestion(String),
    /// The place of metrics is somebody else's.
    #[error("{0}")]
    Metrics(String),
    /// There is no device.
    #[error(
        "no device: give --device name=NAME,socket=PATH,mac=MAC or a configuration file with [[device]] (try: pvrdmad --help)"
    )]
    Nothing,
}
