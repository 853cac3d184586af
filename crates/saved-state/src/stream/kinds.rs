//! The kinds of records of all modules.

use crate::{pvrdma, vmxnet3};

/// A module of messages that are records.
pub(crate) struct Module {
    pub(crate) name: &'static str,
    /// High byte of its kinds.
    pub(crate) high: u8,
    pub(crate) records: &'static [(u16, &'static str)],
}

pub(crate) const MODULES: [Module; 2] = [
    Module { name: "pvrdma", high: 1, records: pvrdma::RECORDS },
    Module { name: "vmxnet3", high: 4, records: vmxnet3::RECORDS },
];

/// Returns the name of the message of a kind, with its module, for example `pvrdma::Cq`. `None`: this release
/// does not know the kind.
pub fn kind_name(kind: u16) -> Option<String> {
    let [high, _] = kind.to_be_bytes();
    let module = MODULES.iter().find(|module| module.high == high)?;
    let (_, name) = module.records.iter().find(|(its, _)| *its == kind)?;
    Some(format!("{}::{name}", module.name))
}

/// Returns `true` if this release knows a kind.
pub(crate) fn is_known(kind: u16) -> bool {
    MODULES.iter().any(|module| module.records.iter().any(|(its, _)| *its == kind))
}
