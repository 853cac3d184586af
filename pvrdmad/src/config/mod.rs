//! What to serve: the configuration file, the command line over it, and the checked result.

mod backend;
mod congestion;
mod device;
mod error;
mod fault;
pub(crate) mod help;
mod keys;
mod link;
mod load;
mod network;
mod pairs;
pub mod reference;
mod spec;
#[cfg(test)]
mod tests;
mod tunnel;
mod words;

pub use self::backend::BackendSpec;
pub use self::device::Device;
pub use self::error::ConfigError;
pub use self::link::LinkSpec;
pub use self::load::{Config, ConfigSpec};
pub use self::network::NetworkSpec;
pub use self::spec::DeviceSpec;
pub use self::words::{Pin, Roce};
#[cfg(test)]
pub(crate) use self::{backend::IbverbsSpec, fault::FaultKeys, keys::Keys, link::LINKS};
pub use crate::socket::SocketAccess;
