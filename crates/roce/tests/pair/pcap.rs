//! Reads the captures.
#![expect(clippy::disallowed_types, reason = "captures are files")]

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use pcap_file::pcap::PcapReader;

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/captures")
}

/// The frames of one capture.
pub(crate) fn load(name: &str) -> Vec<Vec<u8>> {
    read(&directory().join(name).with_extension("pcap"))
}

fn read(path: &Path) -> Vec<Vec<u8>> {
    let file = File::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut capture = PcapReader::new(file).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut frames = Vec::new();
    while let Some(packet) = capture.next_packet() {
        let packet = packet.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        assert_eq!(packet.data.len(), packet.orig_len as usize, "{}: a cut packet", path.display());
        frames.push(packet.data.into_owned());
    }
    frames
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
