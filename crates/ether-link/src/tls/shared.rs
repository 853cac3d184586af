//! State that a TLS link and its thread share.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use pvrdma_base::LogLimit;
use pvrdma_link::Bell;

use super::counters::TlsCounters;
use super::session::{End, Session};

/// State that the link and its thread share.
#[derive(Debug)]
pub(super) struct Shared {
    /// Link as its user specified it, for the log.
    pub(super) name: String,
    pub(super) session: Mutex<Option<Arc<Session>>>,
    /// Readable when a connection was established after there was none.
    pub(super) arrived: Bell,
    /// Makes the thread check its state.
    pub(super) wake: Bell,
    pub(super) stopping: AtomicBool,
    pub(super) lost: AtomicU64,
    pub(super) counters: TlsCounters,
    log: LogLimit,
}

impl Shared {
    pub(super) fn new(name: String) -> io::Result<Self> {
        Ok(Self {
            name,
            session: Mutex::default(),
            arrived: Bell::new()?,
            wake: Bell::new()?,
            stopping: AtomicBool::new(false),
            lost: AtomicU64::new(0),
            counters: TlsCounters::default(),
            log: LogLimit::new(),
        })
    }

    pub(super) fn note(&self, level: log::Level, message: fmt::Arguments<'_>) {
        self.log.log(module_path!(), level, &self.name, message);
    }

    pub(super) fn session(&self) -> Option<Arc<Session>> {
        self.session.lock().clone()
    }

    pub(super) fn lose(&self, frames: u64) {
        self.lost.fetch_add(frames, Ordering::Relaxed);
    }

    /// Makes a connection the present one.
    pub(super) fn install(&self, new: Session) {
        let peer = new.peer;
        self.counters.tls_connected.increment();
        let mut session = self.session.lock();
        match session.replace(Arc::new(new)) {
            Some(old) => {
                self.lose(old.end());
                self.note(log::Level::Info, format_args!("connected with {peer} in place of {}", old.peer));
            }
            None => self.note(log::Level::Info, format_args!("connected with {peer}")),
        }
        drop(session);
        self.arrived.ring();
    }

    /// Ends a connection, unless it has been replaced.
    pub(super) fn hang_up(&self, old: &Arc<Session>, end: &End) {
        let mut session = self.session.lock();
        if !session.as_ref().is_some_and(|now| Arc::ptr_eq(now, old)) {
            return;
        }
        *session = None;
        self.counters.tls_malformed.add(u64::from(end.is_malformed()));
        self.note(log::Level::Info, format_args!("disconnected from {}: {end}", old.peer));
        self.lose(old.end());
        drop(session);
        self.wake.ring();
    }
}
