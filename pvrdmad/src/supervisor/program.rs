//! What the processes of networks run.

use std::path::PathBuf;

use crate::keeper;

/// What a worker's process runs.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    /// The file.
    pub(crate) path: PathBuf,
    /// In front of the name of the network, which is there to be seen in lists of processes.
    pub(crate) arguments: Vec<String>,
    /// What makes it a keeper.
    pub(crate) keeper: Vec<String>,
}

impl Program {
    /// This program, as a worker. As it is now: the file may be replaced while we run.
    pub(crate) fn own() -> Self {
        let [arguments, keeper] = ["worker", keeper::ARGUMENT].map(|word| vec![word.to_owned()]);
        Self { path: PathBuf::from("/proc/self/exe"), arguments, keeper }
    }
}
