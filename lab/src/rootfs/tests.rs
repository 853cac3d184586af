//! Archives of images, as archivers write them and as no archiver does.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use tempfile::TempDir;

use super::*;

const SMALL: Limits = Limits { bytes: 1 << 20, entries: 100, names: 10_000 };

/// Returns an entry: name, kind, target of a link, and content.
fn entry(name: &str, flag: u8, link: &str, content: &[u8]) -> Vec<u8> {
    entry_with(name, flag, link, content, (0o644, 0, 0))
}

fn entry_with(name: &str, flag: u8, link: &str, content: &[u8], (mode, uid, gid): (u32, u32, u32)) -> Vec<u8> {
    let size = u64::try_from(content.len()).unwrap();
    let mut bytes = header(name, flag, link, size, (mode, uid, gid)).to_vec();
    bytes.extend_from_slice(content);
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

fn header(name: &str, flag: u8, link: &str, size: u64, (mode, uid, gid): (u32, u32, u32)) -> [u8; 512] {
    let mut block = [0; 512];
    let mut put = |at: usize, text: &str| block[at..at + text.len()].copy_from_slice(text.as_bytes());
    put(0, name);
    put(100, &format!("{mode:07o}"));
    put(108, &format!("{uid:07o}"));
    put(116, &format!("{gid:07o}"));
    put(124, &format!("{size:011o}"));
    put(136, "00000001750");
    put(148, "        ");
    put(157, link);
    put(257, "ustar\u{0}00");
    block[156] = flag;
    let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
    block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    block
}

fn file(name: &str, content: &str) -> Vec<u8> {
    entry(name, b'0', "", content.as_bytes())
}

fn folder(name: &str) -> Vec<u8> {
    entry(name, b'5', "", b"")
}

fn symlink(name: &str, target: &str) -> Vec<u8> {
    entry(name, b'2', target, b"")
}

/// Returns an entry whose extended header has a record.
fn extended(key: &str, value: &str, then: &[u8]) -> Vec<u8> {
    let rest = key.len() + value.len() + 3;
    let length = (rest..).find(|length| length - rest == length.to_string().len()).unwrap();
    [entry("pax", b'x', "", format!("{length} {key}={value}\n").as_bytes()), then.to_vec()].concat()
}

/// Ends an archive of these entries.
fn tar(entries: &[Vec<u8>]) -> Vec<u8> {
    [entries.concat(), vec![0; 1024]].concat()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

const CONFIG: &str =
    r#"{"architecture":"amd64","os":"linux","config":{"Env":["PATH=/opt/bin:/bin","0=x"],"Cmd":["sh"]}}"#;

/// Returns an archive in the form of `docker save`.
fn saved(layers: &[Vec<u8>]) -> Vec<u8> {
    let names: Vec<_> = (0..layers.len()).map(|number| format!("\"layer-{number}.tar\"")).collect();
    let manifest = format!(r#"[{{"Config":"config.json","RepoTags":[],"Layers":[{}]}}]"#, names.join(","));
    let mut entries = vec![file("manifest.json", &manifest), file("config.json", CONFIG)];
    for (number, layer) in layers.iter().enumerate() {
        entries.push(entry(&format!("layer-{number}.tar"), b'0', "", layer));
    }
    tar(&entries)
}

/// Returns an archive with the layout of OCI, whose image is in an index of its own beside one for other processors.
fn oci(layer: &[u8]) -> Vec<u8> {
    let platform = |architecture| format!(r#""platform":{{"architecture":"{architecture}","os":"linux"}}"#);
    let outer = r#"{"manifests":[{"digest":"sha256:1d"}]}"#;
    let (ours, other) = (platform("amd64"), platform("arm64"));
    let inner = format!(r#"{{"manifests":[{{"digest":"sha256:bad",{other}}},{{"digest":"sha256:2e",{ours}}}]}}"#);
    let manifest = r#"{"config":{"digest":"sha256:3f"},"layers":[{"digest":"sha256:40"}]}"#;
    tar(&[
        file("oci-layout", r#"{"imageLayoutVersion":"1.0.0"}"#),
        folder("blobs/sha256/"),
        entry("blobs/sha256/40", b'0', "", layer),
        file("blobs/sha256/1d", &inner),
        file("blobs/sha256/2e", manifest),
        file("blobs/sha256/3f", CONFIG),
        file("index.json", outer),
    ])
}

/// A place to unpack archives.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn unpack(&self, archive: &[u8]) -> Result<(Tree, Vec<(String, String)>)> {
        fs::write(self.path("archive.tar"), archive).unwrap();
        fs::create_dir(self.path("work")).unwrap();
        unpack(SMALL, &self.path("archive.tar"), &self.path("work"), &self.path("work/rootfs"))
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path("work/rootfs").join(name)).unwrap()
    }

    fn exists(&self, name: &str) -> bool {
        fs::symlink_metadata(self.path("work/rootfs").join(name)).is_ok()
    }
}

/// Asserts that a layer is refused with a text, which names the entry, and that nothing of it was created.
fn assert_refused(layer: &[u8], entry: &str, reason: &str) {
    let place = Place::new();
    let error = place.unpack(&saved(&[layer.to_vec()])).map(drop).expect_err(reason);
    let text = crate::causes(&error);
    assert!(text.contains("layer 'layer-0.tar'"), "{text}");
    assert!(text.contains(&format!("entry '{entry}'")) && text.contains(reason), "{text}");
    assert_harmless(&place);
}

/// Asserts that no name of an archive has become a file.
fn assert_harmless(place: &Place) {
    let names = |path: &Path| {
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    assert_eq!(names(place.0.path()), ["archive.tar", "work"]);
    assert!(names(&place.path("work")).iter().all(|name| name == "contents"));
    assert!(names(&place.path("work/contents")).iter().all(|name| name.bytes().all(|byte| byte.is_ascii_digit())));
}

#[test]
fn layers_become_a_tree() {
    let long = format!("usr/{}/{}", "d".repeat(90), "f".repeat(90));
    let lower = tar(&[
        folder("./"),
        folder("usr/"),
        symlink("lib", "usr/lib"),
        entry_with("usr/bin/tool", b'0', "", b"one", (0o4755, 7, 8)),
        entry("usr/bin/same", b'1', "usr/bin/tool", b""),
        symlink("usr/bin/link", "/usr/bin/tool"),
        file("etc/kept", "kept"),
        file("etc/gone", "gone"),
        file("opt/a/gone", "gone"),
        file("var/old", "old"),
        entry("run/pipe", b'6', "", b""),
        extended("path", &long, &file("short", "long name")),
        [entry("././@LongLink", b'L', "", b"srv/gnu\0"), file("short", "gnu")].concat(),
    ]);
    let upper = gzip(&tar(&[
        file("etc/.wh.gone", ""),
        file("opt/.wh.a", ""),
        file("opt/a/new", "new"),
        file("var/new", "new"),
        file("var/.wh..wh..opq", ""),
        // Through a symbolic link of the layer below.
        file("lib/new", "new"),
        file("etc/kept", "changed"),
    ]));
    for archive in [saved(&[lower.clone(), upper.clone()]), gzip(&saved(&[lower, upper]))] {
        let place = Place::new();
        let (_, environment) = place.unpack(&archive).unwrap();
        assert_eq!(environment, [("PATH".to_owned(), "/opt/bin:/bin".to_owned())]);
        for (name, content) in [
            ("usr/bin/tool", "one"),
            ("usr/bin/same", "one"),
            ("etc/kept", "changed"),
            ("opt/a/new", "new"),
            ("var/new", "new"),
            ("usr/lib/new", "new"),
            (&long, "long name"),
            ("srv/gnu", "gnu"),
        ] {
            assert_eq!(place.read(name), content, "{name}");
        }
        for name in ["etc/gone", "opt/a/gone", "var/old", "etc/.wh.gone", "var/.wh..wh..opq", "short"] {
            assert!(!place.exists(name), "{name}");
        }
        let data = |name: &str| fs::symlink_metadata(place.path("work/rootfs").join(name)).unwrap();
        assert_eq!(data("usr/bin/tool").ino(), data("usr/bin/same").ino());
        assert_eq!(data("usr/bin/tool").permissions().mode(), 0o100_755, "no set-user-ID program on this machine");
        assert_eq!(data("usr/bin/tool").mtime(), 0o1750);
        assert_eq!(fs::read_link(place.path("work/rootfs/lib")).unwrap(), Path::new("usr/lib"));
        assert!(!place.path("work/contents").exists());
    }
}

#[test]
fn an_oci_layout_is_an_image_too() {
    let place = Place::new();
    place.unpack(&oci(&gzip(&tar(&[file("hello", "hello")])))).unwrap();
    assert_eq!(place.read("hello"), "hello");
}

#[test]
fn absolute_paths() {
    assert_refused(&tar(&[file("/etc/passwd", "")]), "/etc/passwd", "absolute");
}

#[test]
fn paths_with_parents() {
    assert_refused(&tar(&[file("a/../../x", "")]), "a/../../x", "'..'");
    assert_refused(&extended("path", "../x", &tar(&[file("a", "")])), "../x", "'..'");
}

#[test]
fn names_that_would_add_lines_to_a_script() {
    assert_refused(&tar(&[file("a\nb", "")]), "a\\nb", "control character");
}

#[test]
fn symbolic_links_that_leave_the_tree() {
    assert_refused(&tar(&[symlink("usr/x", "../../etc")]), "usr/x", "leaves the tree");
    assert_refused(&tar(&[symlink("x", "/../etc")]), "x", "leaves the tree");
}

#[test]
fn hard_links_that_leave_the_tree() {
    for target in ["/etc/shadow", "../shadow"] {
        assert_refused(&tar(&[entry("x", b'1', target, b"")]), "x", "leaves the tree");
    }
}

#[test]
fn hard_links_to_nothing() {
    assert_refused(&tar(&[entry("x", b'1', "etc/shadow", b"")]), "x", "hard link to 'etc/shadow'");
    assert_refused(&tar(&[entry("x", b'1', "x", b"")]), "x", "hard link to 'x'");
    assert_refused(&tar(&[folder("d"), entry("x", b'1', "d", b"")]), "x", "hard link to 'd'");
}

#[test]
fn cyclic_links_in_a_path() {
    let layer = tar(&[symlink("a", "b"), symlink("b", "a"), file("a/x", "")]);
    assert_refused(&layer, "a/x", "cyclic");
}

#[test]
fn entries_below_a_file() {
    assert_refused(&tar(&[file("a", ""), file("a/x", "")]), "a/x", "no folder");
    assert_refused(&tar(&[symlink("./", "x")]), "./", "no folder");
}

/// A symbolic link and an entry below it: the entry goes where the link leads in the tree, never on this machine.
#[test]
fn entries_below_a_link_stay_in_the_tree() {
    let place = Place::new();
    let target = place.path("target");
    fs::create_dir(&target).unwrap();
    let target = target.to_str().unwrap();
    place.unpack(&saved(&[tar(&[symlink("srv/way", target), file("srv/way/x", "content")])])).unwrap();
    assert!(!Path::new(target).join("x").exists());
    assert_eq!(place.read(&format!("{}/x", target.trim_start_matches('/'))), "content");
}

#[test]
fn device_nodes() {
    for flag in [b'3', b'4'] {
        assert_refused(&tar(&[entry("dev/sda", flag, "", b"")]), "dev/sda", "device node");
    }
}

#[test]
fn sparse_files() {
    assert_refused(&tar(&[entry("hole", b'S', "", b"")]), "hole", "sparse");
    assert_refused(&extended("GNU.sparse.major", "1", &tar(&[file("hole", "")])), "(the first)", "sparse");
}

#[test]
fn unknown_kinds() {
    assert_refused(&tar(&[entry("part", b'M', "", b"")]), "part", "kind 'M'");
}

#[test]
fn links_with_content() {
    assert_refused(&tar(&[entry("x", b'2', "y", b"content")]), "x", "content");
}

/// The size of a file is checked before any of it is read.
#[test]
fn a_file_of_any_size() {
    let huge = header("huge", b'0', "", 0o77_777_777_777, (0o644, 0, 0)).to_vec();
    assert_refused(&huge, "huge", "more than 1048576 bytes");
    assert_refused(&extended("size", "18446744073709551615", &file("huge", "")), "huge", "more than 1048576 bytes");
}

/// A few kilobytes unpack to gigabytes.
#[test]
fn many_files_of_any_size() {
    let zeros = "\0".repeat(300_000);
    let layer = gzip(&tar(&["a", "b", "c", "d"].map(|name| file(name, &zeros))));
    assert!(layer.len() < 20_000);
    assert_refused(&layer, "d", "more than 1048576 bytes");
}

/// Zeros after the end cost nothing in the archive.
#[test]
fn padding_of_any_size() {
    let layer = gzip(&[tar(&[file("a", "")]), vec![0; 2 << 20]].concat());
    assert_refused(&layer, "(the end)", "more than 1048576 bytes");
}

#[test]
fn too_many_entries() {
    let entries: Vec<_> = (0..101).map(|number| file(&format!("f{number}"), "")).collect();
    assert_refused(&tar(&entries), "f100", "more than 100 entries");
}

/// An entry creates the folders above it, which the archive does not pay for.
#[test]
fn too_many_folders() {
    let names = ["0", "1", "2"].map(|number| format!("{number}/{}f", "a/".repeat(45)));
    let layer = tar(&names.clone().map(|name| file(&name, "")));
    assert_refused(&layer, &names[2], "more than 100 entries");
}

#[test]
fn names_that_fill_the_memory() {
    let entries: Vec<_> = (0..9).map(|number| symlink(&format!("f{number}"), "t")).collect();
    let long = (0..3).map(|number| extended("linkpath", &"t".repeat(4000), &symlink(&format!("l{number}"), "")));
    let layer = tar(&[entries.concat(), long.collect::<Vec<_>>().concat()]);
    assert_refused(&layer, "l2", "more than 10000 bytes");
}

#[test]
fn duplicate_entries() {
    for second in [file("a", "2"), folder("./a/"), symlink("a", "b")] {
        let text = String::from_utf8_lossy(&second[..4]).trim_end_matches('\0').to_owned();
        assert_refused(&tar(&[file("a", "1"), second]), &text, "twice");
    }
    // The same place by another path, and a folder that is needed.
    assert_refused(&tar(&[symlink("l", "d"), file("d/x", ""), file("l/x", "")]), "l/x", "twice");
    assert_refused(&tar(&[file("d/x", ""), symlink("d", "y")]), "d", "twice");
}

#[test]
fn truncated_archives() {
    let layer = tar(&[file("a", "content"), file("b", "content")]);
    for length in [0, 100, 511] {
        assert_refused(&layer[..length], "(the first)", "truncated");
    }
    for length in [512, 515, 1023, 1024, 1500] {
        assert_refused(&layer[..length], "a", "truncated");
    }
    // Without one of the two blocks at the end.
    assert_refused(&layer[..layer.len() - 1024], "b", "truncated");
    assert_refused(&layer[..layer.len() - 512], "(the end)", "truncated");
    let packed = gzip(&layer);
    assert_refused(&packed[..packed.len() - 4], "(the end)", "truncated");
}

#[test]
fn damaged_archives() {
    let mut layer = tar(&[file("a", "content")]);
    layer[0] = b'b';
    assert_refused(&layer, "(the first)", "checksum");
    let layer = [tar(&[file("a", "")]), file("b", "")].concat();
    assert_refused(&layer, "(the end)", "content after its end");
    assert_refused(b"\x28\xb5\x2f\xfd", "(the first)", "zstd");
}

#[test]
fn archives_that_are_no_image() {
    let refused = |archive: &[u8], reason: &str| {
        let place = Place::new();
        let text = crate::causes(&place.unpack(archive).map(drop).unwrap_err());
        assert!(text.contains(reason), "{text}");
        assert_harmless(&place);
    };
    refused(b"", "too short");
    refused(&tar(&[file("a", "")]), "neither");
    refused(&tar(&[file("a", ""), file("a", "")]), "entry 'a': the archive contains it twice");
    refused(&tar(&[file("/manifest.json", "")]), "absolute");
    refused(&tar(&[file("manifest.json", "[]")]), "0 images");
    refused(&tar(&[file("manifest.json", r#"[{"Config":"../x","Layers":[]}]"#)]), "'..'");
    refused(&tar(&[file("index.json", r#"{"manifests":[{"digest":"sha256:../x"}]}"#)]), "no digest");
    refused(&tar(&[file("index.json", r#"{"manifests":[{"digest":"a:1"},{"digest":"a:2"}]}"#)]), "2 images");
    refused(&tar(&[file("index.json", r#"{"manifests":[{"digest":"a:1"}]}"#), file("blobs/a/1", "{")]), "describe");
    let other = CONFIG.replace("amd64", "arm64");
    let manifest = r#"[{"Config":"config.json","Layers":[]}]"#;
    refused(&tar(&[file("manifest.json", manifest), file("config.json", &other)]), "arm64");
    refused(&gzip(&vec![0; 2 << 20]), "more than 1048576 bytes");
    // An index that contains itself.
    let cycle = r#"{"manifests":[{"digest":"a:1"}]}"#;
    refused(&tar(&[file("index.json", cycle), file("blobs/a/1", cycle)]), "too many indices");
}

/// The file system has the owners and permissions of the archive, which files on this machine do not have.
#[test]
fn owners_and_permissions_in_the_file_system() {
    let place = Place::new();
    let layer = tar(&[
        entry_with("./", b'5', "", b"", (0o755, 0, 0)),
        entry_with("su", b'0', "", b"program", (0o4711, 0, 70_000)),
        entry_with("a \"b\"", b'5', "", b"", (0o1777, 1000, 1001)),
        entry_with("none", b'0', "", b"", (0, 0, 0)),
        symlink("link", "su"),
    ]);
    fs::write(place.path("archive.tar"), saved(&[layer])).unwrap();
    let built = Rootfs::build_within(SMALL, &place.path("archive.tar"), place.0.path()).unwrap();
    let stat = |name: &str| {
        let command = format!("stat \"/{name}\"");
        let output = std::process::Command::new("/usr/sbin/debugfs").args(["-R", &command]).arg(&built.disk).output();
        String::from_utf8(output.unwrap().stdout).unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
    };
    for (name, words) in [
        ("", "directory Mode: 0755"),
        ("", "User: 0 Group: 0"),
        ("su", "regular Mode: 04711"),
        ("su", "User: 0 Group: 70000"),
        ("a \"\"b\"\"", "directory Mode: 01777"),
        ("a \"\"b\"\"", "User: 1000 Group: 1001"),
        ("none", "regular Mode: 0000"),
        ("link", "symlink Mode: 0777"),
    ] {
        assert!(stat(name).contains(words), "{name}: {}", stat(name));
    }
    assert!(!place.path("rootfs").exists());
}

/// The rest of a long line would be a command for the tool that sets owners. With quotes, it is twice as long as the
/// path.
#[test]
fn names_that_would_be_commands() {
    for (name, is_refused) in [("a".repeat(200), false), ("\"".repeat(200), true)] {
        let place = Place::new();
        let path = [name.as_str(); 3].join("/");
        let layer = tar(&[extended("path", &path, &entry_with("x", b'0', "", b"", (0o4711, 7, 7)))]);
        fs::write(place.path("archive.tar"), saved(&[layer])).unwrap();
        let built = Rootfs::build_within(SMALL, &place.path("archive.tar"), place.0.path()).map(drop);
        let text = built.err().map(|error| crate::causes(&error)).unwrap_or_default();
        assert_eq!(text.contains("is too long to set its owner"), is_refused, "{text}");
        assert_eq!(text.is_empty(), !is_refused, "{text}");
    }
}

#[test]
fn a_folder_becomes_a_file_system() {
    let place = Place::new();
    fs::create_dir_all(place.path("tree/etc")).unwrap();
    fs::write(place.path("tree/etc/x"), "content").unwrap();
    fs::create_dir(place.path("out")).unwrap();
    let built = Rootfs::build(&place.path("tree"), &place.path("out")).unwrap();
    assert!(fs::metadata(built.disk).unwrap().len() > 1 << 20);
    for (limits, word) in
        [(Limits { entries: 2, ..SMALL }, "or 2 files"), (Limits { bytes: 9000, ..SMALL }, "9000 bytes")]
    {
        let error = Rootfs::build_within(limits, &place.path("tree"), &place.path("out")).map(drop).unwrap_err();
        assert!(crate::causes(&error).contains(word), "{error:#}");
    }
}

/// `/dev` has other file systems below it nearly everywhere.
#[test]
fn a_folder_with_mounts_is_refused() {
    let device = |path: &str| fs::metadata(path).map(|data| data.dev()).ok();
    if device("/dev/pts").is_none_or(|pts| Some(pts) == device("/dev")) {
        return;
    }
    let place = Place::new();
    let error = Rootfs::build(Path::new("/dev"), place.0.path()).unwrap_err();
    assert!(crate::causes(&error).contains("another file system is mounted at /dev/"), "{error:#}");
}
