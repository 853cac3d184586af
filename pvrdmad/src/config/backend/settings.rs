//! Descriptions of backends: keys, features and needs.

use std::sync::Arc;

use pvrdma_ibverbs::HostAddresses;

use crate::config::error::ConfigError;
use crate::config::keys::Key;
use crate::config::network::Network;
use crate::sandbox::Profile;

/// Description of a kind of backend.
pub(crate) struct About {
    /// Word for it.
    pub(crate) name: &'static str,
    /// Its shortest form.
    pub(crate) syntax: &'static str,
    /// Line for `--help`.
    pub(crate) help: &'static str,
    /// Its section of the reference page. A table of the keys follows, if there are any.
    pub(crate) section: &'static str,
    /// Its keys, which follow the name and a comma.
    pub(crate) keys: &'static [Key],
}

/// A feature that some backends lack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Feature {
    /// The link of one device can be set down.
    Links,
    /// Devices have shares of common resources.
    Shares,
    /// Faults of devices on request.
    Faults,
    /// Mapped doorbells have been measured, so that `doorbells=auto` can choose them.
    MeasuredDoorbells,
}

/// A configured backend. The defaults are those of a backend that has all features.
pub(crate) trait Settings {
    /// Returns the backend in a few words, for the log and the status.
    fn describe(&self) -> String;

    /// Checks that it can serve these networks.
    ///
    /// # Errors
    /// A network or a device has a setting that this backend lacks.
    fn check(&self, _networks: &[Network]) -> Result<(), ConfigError> {
        Ok(())
    }

    /// Checks that it has a feature.
    ///
    /// # Errors
    /// The reason why it lacks the feature.
    fn has(&self, _feature: Feature) -> Result<(), &'static str> {
        Ok(())
    }

    /// Returns the sandbox profile of a worker. `addressed`: it has links that name a destination in the system calls
    /// that send frames.
    fn profile(&self, addressed: bool) -> Profile;

    /// Returns the RDMA device of the host that it uses, if it uses one.
    fn adapter(&self) -> Option<&str> {
        None
    }

    /// Opens the interface to which the supervisor adds guests' addresses, if this backend needs them there.
    ///
    /// # Errors
    /// The interface does not exist, another process manages addresses on it, or it may not be changed.
    fn host_addresses(&self) -> Result<Option<Arc<HostAddresses>>, String> {
        Ok(None)
    }
}
