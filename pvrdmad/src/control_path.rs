//! Where the control socket is when nobody says so.

use std::env;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

use anyhow::{Result, bail};

/// Where systemd's `RuntimeDirectory=pvrdmad` puts the socket of a service.
const SERVICE: &str = "/run/pvrdmad/control";

/// The place for a daemon that was given none: `$RUNTIME_DIRECTORY/control`, which systemd makes for a service, else
/// `$XDG_RUNTIME_DIR/pvrdmad/control`, whose folder is made here.
///
/// # Errors
/// The folder cannot be made.
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

/// The place where a daemon is asked: the one that was given, else the first of a daemon's places where there is
/// something.
///
/// # Errors
/// There is nothing.
pub(crate) fn for_client(given: Option<PathBuf>) -> Result<PathBuf> {
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
    // A unit may have several, separated by colons.
    env::split_paths(&directories).next().filter(|directory| directory.is_absolute())
}

fn user_directory() -> Option<PathBuf> {
    let directory = PathBuf::from(env::var_os("XDG_RUNTIME_DIR")?);
    directory.is_absolute().then(|| directory.join("pvrdmad"))
}
