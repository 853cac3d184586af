//! Configuration: the file, the command line that overrides it, and the checked result.

mod access;
mod address;
mod backend;
mod congestion;
mod control;
mod device;
mod device_fault;
mod error;
mod fault;
pub(crate) mod help;
mod keys;
mod load;
mod metrics;
mod network;
mod pairs;
mod place;
mod ports;
mod rate;
pub mod reference;
mod resolve;
mod share;
mod spec;
#[cfg(test)]
mod tests;
mod tunnel;
mod vlan;
mod words;

pub use self::access::{GroupId, Mode, UserId};
pub use self::backend::BackendSpec;
pub use self::control::ControlSpec;
pub use self::device::{Device, MemoryRules};
pub use self::device_fault::{FaultArg, FaultFile};
pub use self::error::ConfigError;
#[cfg(test)]
pub(crate) use self::fault::FaultKeys;
pub use self::fault::{FaultSpec, FaultWord};
pub use self::load::{Config, ConfigSpec, STANDARD_INPUT};
pub use self::metrics::{MetricsAddress, MetricsSpec};
pub use self::network::Network;
pub use self::place::SocketPlace;
pub use self::rate::BitRate;
pub use self::share::{change_share, share_words};
pub use self::spec::{DEFAULT_NETWORK, DeviceSpec, NetworkSpec};
pub(crate) use self::spec::{Mac, NAME_LENGTH};
pub use self::vlan::VlanWord;
pub use self::words::{DoorbellMode, Isolate, LinkState, MemoryFiles, Pin, Roce, SandboxMode, Switch};
pub(crate) use self::{
    backend::{BACKENDS, Feature},
    control::ControlKeys,
    keys::{Key, Keys},
};
pub use crate::socket::Inherited;
