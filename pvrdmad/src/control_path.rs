//! Default path of the control socket.

use std::env;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

use anyhow::{Result, bail};

/// Path of a service's socket, in the directory of systemd's `RuntimeDirectory=pvrdmad`.
const SERVICE: &str = "/run/pvrdmad/control";

/// Returns the default path for a daemon: `$RUNTIME_DIRECTORY/control`, in a directory that systemd creates for a
/// service, or otherwise `$XDG_RUNTIME_DIR/pvrdmad/control`, whose directory is created here.
///
/// # Errors
/// The directory cannot be created.
pub(crate) fn for_daemon() -> io::Result<Option<PathBuf>> {
    if let Some(directory) = runtime_directory() {
        return Ok(Some(directory.join("control")));
    }
    let Some(directory) = user_directory() else { return Ok(None) };
    match DirBuilder::new().mode(0o700).create(&directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(Some(directory.join("control"))),
    }
}

/// Returns the path for a client: the given one, or the first default path that exists.
///
/// # Errors
/// No default path exists.
pub fn for_client(given: Option<PathBuf>) -> Result<PathBuf> {
    if let Some(path) = given {
        return Ok(path);
    }
    let directories = runtime_directory().into_iter().chain(user_directory());
    let places: Vec<PathBuf> =
        directories.map(|directory| directory.join("control")).chain([PathBuf::from(SERVICE)]).collect();
    match places.iter().find(|path| path.exists()) {
        Some(path) => Ok(path.clone()),
        None => {
            let places: Vec<_> = places.iter().map(|path| path.display().to_string()).collect();
            bail!("no control socket at {}: give --control PATH", places.join(" or "))
        }
    }
}

fn runtime_directory() -> Option<PathBuf> {
    let directories = env::var_os("RUNTIME_DIRECTORY")?;
    // A unit may have several directories, separated by colons.
    env::split_paths(&directories).next().filter(|directory| directory.is_absolute())
}

fn user_directory() -> Option<PathBuf> {
    let directory = PathBuf::from(env::var_os("XDG_RUNTIME_DIR")?);
    directory.is_absolute().then(|| directory.join("pvrdmad"))
}
