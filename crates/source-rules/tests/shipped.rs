//! Each file that packages are made of is named in the sources of a test.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::fs;
use std::path::{Path, PathBuf};

/// Folder with shipped files. Another test loads every file of `pvrdmad/examples`.
const SHIPPED: &str = "pvrdmad/packaging";

/// Folders whose sources contain the tests.
const TESTS: [&str; 3] = ["pvrdmad/tests", "pvrdmad/src", "guest-tests/src"];

/// Files that no test names, with the tests that use them nevertheless.
const UNNAMED: [(&str, &str); 6] = [
    ("pvrdmad/packaging/copyright", "`slow/package`: lintian reads it"),
    ("pvrdmad/packaging/debian/postinst", "`slow/package`: dpkg runs it"),
    ("pvrdmad/packaging/dkms/dkms.conf", "`guests/`: the driver is built with it"),
    ("pvrdmad/packaging/dkms/postinst", "`slow/package`: lintian reads it"),
    ("pvrdmad/packaging/dkms/prerm", "`slow/package`: lintian reads it"),
    ("pvrdmad/packaging/pvrdma-guest-check.1", "`slow/package`: lintian formats it"),
];

/// Returns the files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// Returns the shipped files that no source names.
fn unused(root: &Path, shipped: &[PathBuf], sources: &[String]) -> Vec<String> {
    let is_named = |path: &Path| {
        let name = path.file_name().unwrap().to_string_lossy();
        sources.iter().any(|source| source.contains(&*name))
    };
    let unnamed = shipped.iter().filter(|path| !is_named(path));
    let names = unnamed.map(|path| path.strip_prefix(root).unwrap().to_string_lossy().into_owned());
    names.collect()
}

#[test]
fn every_shipped_file_is_named_in_a_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let shipped = files(&root.join(SHIPPED));
    assert!(shipped.len() > 25, "{shipped:?}");
    let sources = TESTS.iter().flat_map(|folder| files(&root.join(folder)));
    let sources = sources.filter(|path| path.extension().is_some_and(|extension| extension == "rs"));
    let sources: Vec<_> = sources.map(|path| fs::read_to_string(path).unwrap()).collect();
    let mut unused = unused(&root, &shipped, &sources);
    unused.sort();
    assert_eq!(unused, UNNAMED.map(|(file, _)| file));
}

#[test]
fn a_file_that_no_test_names_is_found() {
    let shipped = ["/r/a/used.conf", "/r/a/unused.conf"].map(PathBuf::from);
    assert_eq!(unused(Path::new("/r"), &shipped, &["read(\"used.conf\")".to_owned()]), ["a/unused.conf"]);
}
