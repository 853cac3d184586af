use std::os::unix::fs::PermissionsExt;
use std::thread;

use pvrdma_verbs::testing::skipped;
use rustix::process::geteuid;
use rustix::thread::set_thread_uid;

use super::*;

/// User without rights.
const NOBODY: u32 = 65_534;

fn socket() -> OwnedFd {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

fn places() -> (tempfile::TempDir, KeeperPlaces) {
    let folder = tempfile::tempdir().unwrap();
    let places = KeeperPlaces::beside(&folder.path().join("control"));
    (folder, places)
}

/// Makes a socket of which `name` says that it is a keeper, and leaves it.
fn left(places: &KeeperPlaces, device: &str) -> (OwnedFd, PathBuf) {
    let socket = socket();
    let place = places.bind(&socket, device).unwrap();
    let path = places.path.join(&place.name);
    place.leave();
    (socket, path)
}

#[test]
fn names_of_sockets() {
    assert_eq!(device_of("1@vm1@7-0"), Some("vm1"));
    let long = format!("1@{}@7-0", "a".repeat(NAME_LENGTH + 1));
    for wrong in ["", "1", "1@vm1", "1@@7-0", "1@vm1@", "2@vm1@7-0", "1@vm1@7-0@", &long] {
        assert_eq!(device_of(wrong), None, "{wrong}");
    }
}

/// The process that listens belongs to another user, to which the next daemon must not give a VM, and which it must
/// not kill either: it is this test.
#[test]
fn a_keeper_of_another_user_is_refused() {
    if !geteuid().is_root() {
        return skipped("only root can become another user");
    }
    let (_folder, places) = places();
    let (socket, path) = left(&places, "vm1");
    let listens = || {
        set_thread_uid(rustix::process::Uid::from_raw(NOBODY)).unwrap();
        rustix::net::listen(&socket, 4).unwrap();
    };
    thread::scope(|scope| scope.spawn(listens).join().unwrap());
    assert!(places.find(|_| true).is_empty());
    assert!(!path.exists());
}

/// A process that is no keeper is not killed: its number may be that of any process.
#[test]
fn a_process_that_answers_wrongly_is_refused() {
    let (_folder, places) = places();
    for answer in [&[0; 18][..], &[0xff; 18], b""] {
        let (socket, path) = left(&places, "vm1");
        rustix::net::listen(&socket, 4).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let worker = rustix::net::accept(&socket).unwrap();
                rustix::io::read(&worker, &mut [0; 64]).unwrap();
                rustix::io::write(&worker, answer).unwrap();
            });
            assert!(places.find(|_| true).is_empty());
        });
        assert!(!path.exists());
    }
}

#[test]
fn a_directory_of_others_is_not_used() {
    let (folder, places) = places();
    drop(places.bind(&socket(), "vm1").unwrap());
    std::fs::set_permissions(&places.path, std::fs::Permissions::from_mode(0o710)).unwrap();
    assert!(places.bind(&socket(), "vm1").unwrap_err().to_string().contains("other users"));
    std::fs::remove_dir(&places.path).unwrap();
    // A link that another user has put there.
    std::os::unix::fs::symlink(folder.path(), &places.path).unwrap();
    assert!(places.bind(&socket(), "vm1").is_err() && places.find(|_| true).is_empty());
    std::fs::remove_file(&places.path).unwrap();
    if geteuid().is_root() {
        std::fs::create_dir(&places.path).unwrap();
        std::fs::set_permissions(&places.path, std::fs::Permissions::from_mode(0o700)).unwrap();
        std::os::unix::fs::chown(&places.path, Some(NOBODY), None).unwrap();
        assert!(places.bind(&socket(), "vm1").is_err());
    }
}
