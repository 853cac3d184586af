//! Addresses, as the rules of ownership identify them.

use pvrdma_verbs_types::Gid;

/// A GID and its VLAN.
pub(crate) type Address = (Gid, Option<u16>);
