//! Reads the captures.

#![expect(clippy::panic, reason = "a test may fail")]

use std::fs;
use std::path::{Path, PathBuf};

use pcap_parser::PcapCapture;

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/captures")
}

/// The frames of one capture.
pub(crate) fn load(name: &str) -> Vec<Vec<u8>> {
    read(&directory().join(name).with_extension("pcap"))
}

fn read(path: &Path) -> Vec<Vec<u8>> {
    let bytes = fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let capture = PcapCapture::from_file(&bytes).unwrap_or_else(|e| panic!("{}: {e:?}", path.display()));
    assert!(capture.blocks.iter().all(|block| block.caplen == block.origlen), "{}: cut packets", path.display());
    capture.blocks.iter().map(|block| block.data.to_vec()).collect()
}

/// All captures, with their file names.
pub(crate) fn all() -> Vec<(String, Vec<Vec<u8>>)> {
    let mut paths: Vec<PathBuf> = fs::read_dir(directory())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "pcap"))
        .collect();
    paths.sort();
    paths.iter().map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), read(path))).collect()
}
