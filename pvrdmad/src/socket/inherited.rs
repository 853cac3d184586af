//! Listening sockets opened by the process that started this one: systemd's socket activation, or a management layer.

use std::collections::HashMap;
use std::env;
use std::os::unix::net::UnixListener;

use anyhow::{Context, Result, bail};
use listenfd::ListenFd;
use parking_lot::Mutex;
use rustix::net::sockopt::socket_acceptconn;

/// First descriptor that is passed on.
const FIRST: usize = 3;

/// Listening sockets that are not in use yet, by the names that a configuration has for them.
#[derive(Debug, Default)]
pub struct Inherited(Mutex<Vec<Passed>>);

/// An inherited socket.
#[derive(Debug)]
struct Passed {
    /// Its number, and its name in `LISTEN_FDNAMES`.
    names: Vec<String>,
    listener: UnixListener,
}

impl Inherited {
    /// Takes the sockets that `LISTEN_FDS` announces, so that processes started later do not inherit them. This changes
    /// the environment, so it must be called at the start of a program, while it has only one thread.
    ///
    /// # Errors
    /// A descriptor is not a listening Unix stream socket.
    pub fn from_environment() -> Result<Self> {
        // `listenfd` does not support names.
        let names = env::var("LISTEN_FDNAMES").unwrap_or_default();
        let names: Vec<_> = names.split(':').filter(|name| !name.is_empty()).map(str::to_owned).collect();
        let mut announced = ListenFd::from_env();
        let mut passed = Vec::new();
        for index in 0..announced.len() {
            let number = index.saturating_add(FIRST);
            let taken = announced.take_unix_listener(index);
            let taken = taken.with_context(|| format!("LISTEN_FDS: descriptor {number} is no Unix stream socket"))?;
            let Some(listener) = taken else { continue };
            if !socket_acceptconn(&listener)? {
                bail!("LISTEN_FDS: the socket of descriptor {number} does not listen");
            }
            let names = [Some(number.to_string()), names.get(index).cloned()].into_iter().flatten().collect();
            passed.push(Passed { names, listener });
        }
        let mut seen = HashMap::new();
        for name in passed.iter().flat_map(|passed| &passed.names) {
            if seen.insert(name, ()).is_some() {
                bail!("LISTEN_FDNAMES: two descriptors are called {name}");
            }
        }
        Ok(Self(Mutex::new(passed)))
    }

    /// Takes the socket of this number or name. It cannot be taken again.
    pub(crate) fn take(&self, name: &str) -> Option<UnixListener> {
        let mut passed = self.0.lock();
        let at = passed.iter().position(|passed| passed.names.iter().any(|known| known == name))?;
        Some(passed.swap_remove(at).listener)
    }

    /// Checks that every socket has been taken.
    ///
    /// # Errors
    /// A socket was not taken: clients that connect to it would wait forever.
    pub(crate) fn check_taken(&self) -> Result<()> {
        match self.0.lock().first() {
            None => Ok(()),
            Some(passed) => {
                bail!("LISTEN_FDS: descriptor {} is no device's (socket=fd:{0})", passed.names.join(", called "))
            }
        }
    }
}
