//! A machine in a file.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufReader, BufWriter};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use vm_memory::GuestMemoryMmap;

use super::frames::{Kind, Receiver, Sender};
use super::machine::State;
use super::messages::Hello;
use super::pages;

/// A file that a machine is read from, after its beginning.
#[derive(Debug)]
pub(crate) struct Saved {
    pub(crate) hello: Hello,
    rest: Receiver<BufReader<File>>,
}

/// Writes a file that only its owner can read. It has its name when it is complete: an older file of that name is kept
/// until then.
pub(crate) fn write(path: &Path, hello: &Hello, memory: &GuestMemoryMmap, state: &State) -> Result<()> {
    let mut name = OsString::from(path);
    name.push(".part");
    let part = PathBuf::from(name);
    let result = write_part(&part, hello, memory, state).and_then(|()| Ok(fs::rename(&part, path)?));
    if result.is_err() {
        // The file may not exist; the first error is the one to report.
        let _ = fs::remove_file(&part);
    }
    result.with_context(|| format!("cannot save to {}", path.display()))
}

fn write_part(part: &Path, hello: &Hello, memory: &GuestMemoryMmap, state: &State) -> Result<()> {
    // A part that an earlier run has left may have other permissions.
    let _ = fs::remove_file(part);
    let file = File::options().write(true).create_new(true).mode(0o600).open(part)?;
    let mut sender = Sender::new(BufWriter::new(file))?;
    sender.message(Kind::Hello, hello)?;
    pages::send_all(memory, &mut sender)?;
    state.send(&mut sender)?;
    let file = sender.finish()?.into_inner().context("cannot write the state")?;
    Ok(file.sync_all()?)
}

/// Opens a file and reads its beginning.
pub(crate) fn open(path: &Path) -> Result<Saved> {
    let open = || -> Result<Saved> {
        let mut rest = Receiver::new(BufReader::new(File::open(path)?))?;
        Ok(Saved { hello: rest.expect(Kind::Hello)?, rest })
    };
    open().with_context(|| format!("cannot restore {}", path.display()))
}

impl Saved {
    /// Reads memory and state.
    pub(crate) fn read(mut self, memory: &GuestMemoryMmap) -> Result<State> {
        State::receive(&self.hello, &mut self.rest, memory)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use vm_memory::{Bytes, GuestAddress};

    use super::*;

    #[test]
    fn a_file_is_complete_or_absent() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.state");
        let memory = crate::memory::allocate(1 << 20).unwrap();
        memory.write_obj(7_u64, GuestAddress(0x3000)).unwrap();
        let hello = Hello { name: "a".to_owned(), ..Hello::default() };
        write(&path, &hello, &memory, &State::default()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let saved = open(&path).unwrap();
        assert_eq!(saved.hello, hello);
        let restored = crate::memory::allocate(1 << 20).unwrap();
        saved.read(&restored).unwrap();
        assert_eq!(restored.read_obj::<u64>(GuestAddress(0x3000)).unwrap(), 7);

        // A folder is in the way of the name.
        let taken = folder.path().join("taken");
        fs::create_dir(&taken).unwrap();
        fs::write(taken.join("file"), []).unwrap();
        let error = format!("{:#}", write(&taken, &hello, &memory, &State::default()).unwrap_err());
        assert!(error.contains("cannot save to "), "{error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing is left");
        assert!(format!("{:#}", open(&folder.path().join("none")).unwrap_err()).contains("cannot restore "));
    }
}
