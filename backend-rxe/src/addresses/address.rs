//! The addresses whose owners the rules are about.

use pvrdma_verbs_types::Gid;

/// A GID and its VLAN.
pub(crate) type Address = (Gid, Option<u16>);
