//! Program of the processes of a network.

use std::path::PathBuf;

use crate::keeper;

/// Program of a worker process.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    /// Path of the executable.
    pub(crate) path: PathBuf,
    /// Path at which the executable was installed when this process started. An upgrade of the package puts the next
    /// version there.
    pub(crate) installed: Option<PathBuf>,
    /// Arguments in front of the network's name, which is included so that lists of processes show it.
    pub(crate) arguments: Vec<String>,
    /// Arguments that start a keeper.
    pub(crate) keeper: Vec<String>,
}

impl Program {
    /// Returns this program as a worker. The path refers to the executable that runs now, even if the file is replaced
    /// meanwhile.
    pub(crate) fn own() -> Self {
        let [arguments, keeper] = ["worker", keeper::ARGUMENT].map(|word| vec![word.to_owned()]);
        let installed = std::env::current_exe().ok();
        Self { path: PathBuf::from("/proc/self/exe"), installed, arguments, keeper }
    }
}
