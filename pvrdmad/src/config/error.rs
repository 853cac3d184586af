//! Errors of the configuration.

use std::path::PathBuf;

use thiserror::Error;

/// Reason why a configuration cannot be used. A system error is attached as the source and not repeated in the text.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// The content of the file is invalid.
    #[error("{}: {problem}", path.display())]
    Parse {
        /// Path of the file.
        path: PathBuf,
        /// Line, column and description.
        problem: String,
    },
    /// The description of a device is incomplete or invalid.
    #[error("device {name}: {problem}")]
    Device {
        /// Name of the device.
        name: String,
        /// Description of the problem.
        problem: String,
    },
    /// The description of a network is invalid.
    #[error("network {name}: {problem}")]
    Network {
        /// Name of the network.
        name: String,
        /// Description of the problem.
        problem: String,
    },
    /// The parameters of congestion control are invalid.
    #[error("congestion: {0}")]
    Congestion(String),
    /// The address of the metrics server is used otherwise.
    #[error("{0}")]
    Metrics(String),
    /// There is no device.
    #[error(
        "no device: give --device name=NAME,socket=PATH,mac=MAC or a configuration file with [[device]] (try: pvrdmad --help)"
    )]
    Nothing,
}
