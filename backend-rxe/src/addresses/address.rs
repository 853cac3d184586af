//! The addresses whose owners the rules are about.

use pvrdma_verbs::Gid;

/// A GID and its VLAN.
pub(crate) type Address = (Gid, Option<u16>);
