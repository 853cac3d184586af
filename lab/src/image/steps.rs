//! Named, resumable steps: a stamp per step, keyed by everything the step depends on.

use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use super::log_command::StepLog;

/// Runs steps in order and records which are done.
#[derive(Debug)]
pub(crate) struct Steps {
    dir: PathBuf,
    /// Hash over the keys of all steps so far. A changed step makes every later one run again.
    chain: u64,
    started: Instant,
    ran: u32,
    /// Held while the image is built, because two programs must not build it at once.
    _lock: File,
}

impl Steps {
    /// Opens the step record in `image`, waiting for another builder to finish.
    pub(crate) fn open(image: &Path) -> Result<Self> {
        let dir = image.join("steps");
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let path = dir.join("lock");
        // A user with read access only can use the image if it is complete.
        let lock = File::create(&path).or_else(|error| match error.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => File::open(&path),
            _ => Err(error),
        });
        let lock = lock.with_context(|| format!("cannot create {}", path.display()))?;
        if lock.try_lock().is_err() {
            eprintln!("waiting for another program that builds the image in {}", image.display());
            lock.lock().context("cannot lock the image")?;
        }
        Ok(Self { dir, chain: 0, started: Instant::now(), ran: 0, _lock: lock })
    }

    /// Runs `action` unless it was done with the same key and the same steps before it.
    pub(crate) fn run(&mut self, name: &str, key: &str, action: impl FnOnce(&StepLog) -> Result<()>) -> Result<()> {
        let mut hasher = DefaultHasher::new();
        (self.chain, name, key).hash(&mut hasher);
        self.chain = hasher.finish();
        let file_name = name.replace(' ', "-");
        let stamp = self.dir.join(format!("{file_name}.done"));
        let value = format!("{:016x}\n", self.chain);
        if std::fs::read_to_string(&stamp).is_ok_and(|old| old == value) {
            log::debug!("image: {name} is up to date");
            return Ok(());
        }
        if rustix::fs::access(&self.dir, rustix::fs::Access::WRITE_OK).is_err() {
            bail!(
                "the image in {} lacks the step '{name}', and is not yours to change: build it as its owner",
                self.dir.display()
            );
        }
        // The stamp is removed first, so that an interrupted step runs again.
        match std::fs::remove_file(&stamp) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", stamp.display()));
            }
            _ => {}
        }
        let log = StepLog::new(self.dir.join(format!("{file_name}.log")))?;
        let started = Instant::now();
        eprintln!("image: {name} ...");
        let result = action(&log);
        let seconds = started.elapsed().as_secs_f64();
        match result {
            Ok(()) => eprintln!("image: {name:<20} {seconds:6.1} s"),
            Err(error) => {
                eprintln!("image: {name:<20} {seconds:6.1} s  FAILED");
                return Err(error).with_context(|| format!("the image's step '{name}' failed"));
            }
        }
        self.ran += 1;
        std::fs::write(&stamp, value).with_context(|| format!("cannot write {}", stamp.display()))
    }

    /// Reports the total time when anything was built.
    pub(crate) fn finish(&self) {
        if self.ran > 0 {
            eprintln!("image: built in {:.1} s", self.started.elapsed().as_secs_f64());
        }
    }
}
