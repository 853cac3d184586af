use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;

use rustix::fs::Mode;

use super::error::SocketError;
use super::file::Folder;
use super::*;

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

fn own() -> SocketAccess {
    SocketAccess::default()
}

/// Returns a group that the test may give a file to: its own, as any user may, or another one if it runs as root.
fn group_of_ours() -> u32 {
    if rustix::process::geteuid().is_root() { 4242 } else { rustix::process::getegid().as_raw() }
}

/// Returns a directory for the own user only, independent of the umask that another test may have set.
fn folder() -> tempfile::TempDir {
    tempfile::Builder::new().permissions(fs::Permissions::from_mode(0o700)).tempdir().unwrap()
}

#[test]
fn the_life_of_a_socket_file() {
    let folder = folder();
    let path = folder.path().join("a.sock");
    let socket = SocketFile::bind(&path, own()).unwrap();
    assert_eq!(mode(&path), 0o600);
    assert!(
        matches!(SocketFile::bind(&path, own()), Err(SocketError::InUse { pid: Some(pid), .. }) if pid == rustix::process::getpid())
    );
    drop(socket);
    assert!(!path.exists());

    // A crash leaves the file behind.
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let socket = SocketFile::bind(&path, own()).unwrap();

    // A file that has replaced the socket is not removed.
    fs::remove_file(&path).unwrap();
    fs::write(&path, "precious").unwrap();
    drop(socket);
    assert!(matches!(SocketFile::bind(&path, own()), Err(SocketError::NotASocket(_))));
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");

    let long = folder.path().join("x".repeat(200));
    assert!(matches!(SocketFile::bind(&long, own()), Err(SocketError::TooLong(_))));
    let nowhere = folder.path().join("missing/a.sock");
    assert!(matches!(SocketFile::bind(&nowhere, own()), Err(SocketError::NoDirectory { .. })));
}

/// A check next to a running daemon must not connect: the server would count a client and log its end.
#[test]
fn a_check_of_a_socket_does_not_connect() {
    let folder = folder();
    let path = folder.path().join("a.sock");
    SocketFile::check(&path, own()).unwrap();
    let socket = SocketFile::bind(&path, own()).unwrap();
    socket.listener().set_nonblocking(true).unwrap();
    assert!(matches!(SocketFile::check(&path, own()), Err(SocketError::InUse { .. })));
    assert_eq!(socket.listener().accept().unwrap_err().kind(), io::ErrorKind::WouldBlock, "a client came");
    drop(socket);
    // The file of a process that has ended does not count as in use.
    drop(UnixListener::bind(&path).unwrap());
    SocketFile::check(&path, own()).unwrap();
    fs::remove_file(&path).unwrap();
    let _datagrams = UnixDatagram::bind(&path).unwrap();
    assert!(matches!(SocketFile::check(&path, own()), Err(SocketError::InUse { .. })));
}

#[test]
fn datagram_sockets_are_ours_or_refused() {
    let folder = folder();
    let path = folder.path().join("socket");
    drop(UnixDatagram::bind(&path).unwrap());
    let (socket, file) = bind_datagram(&path, own()).unwrap();
    assert_eq!(mode(&path), 0o600);
    assert!(matches!(bind_datagram(&path, own()), Err(SocketError::InUse { .. })));
    drop((socket, file));
    assert!(!path.exists());
    fs::write(&path, "precious").unwrap();
    assert!(matches!(bind_datagram(&path, own()), Err(SocketError::NotASocket(_))));

    // A file that has replaced the socket is not removed.
    fs::remove_file(&path).unwrap();
    let (socket, file) = bind_datagram(&path, own()).unwrap();
    fs::remove_file(&path).unwrap();
    fs::write(&path, "precious").unwrap();
    drop((socket, file));
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
}

/// The attack uses the moment after `bind`: a user that may write to the file then can send to a datagram socket, or
/// enter the queue of a listening one. So the test examines the file at that moment, with a umask that masks nothing.
#[test]
fn no_other_user_reaches_a_new_socket() {
    let folder = folder();
    let path = folder.path().join("socket");
    let umask = rustix::process::umask(Mode::empty());
    let plain = UnixDatagram::bind(&path).map(|_| mode(&path)).unwrap();
    fs::remove_file(&path).unwrap();
    let socket = UnixDatagram::unbound().unwrap();
    let born = Folder::open(&path).unwrap().born(&socket);
    rustix::process::umask(umask);
    let _born = born.unwrap();
    // The permissions if only `bind` decided.
    assert_eq!(plain, 0o777);
    assert_eq!(mode(&path), 0o600);
}

#[test]
fn owner_group_and_mode_are_as_configured() {
    let folder = folder();
    let path = folder.path().join("socket");
    let group = group_of_ours();
    for (access, expected) in [
        (SocketAccess { group: Some(group), ..own() }, 0o660),
        (SocketAccess { group: Some(group), mode: Some(0o620), ..own() }, 0o620),
        (SocketAccess { mode: Some(0o666), ..own() }, 0o666),
        (SocketAccess { owner: Some(rustix::process::geteuid().as_raw()), ..own() }, 0o600),
    ] {
        let stream = SocketFile::bind(&path, access).unwrap();
        let found = fs::symlink_metadata(&path).unwrap();
        assert_eq!(mode(&path), expected);
        assert_eq!(found.gid(), access.group.unwrap_or_else(|| found.gid()));
        UnixStream::connect(&path).unwrap();
        drop(stream);
        let (receiver, _file) = bind_datagram(&path, access).unwrap();
        assert_eq!(mode(&path), expected);
        UnixDatagram::unbound().unwrap().send_to(b"frame", &path).unwrap();
        assert_eq!(receiver.recv(&mut [0; 8]).unwrap(), 5);
    }
}

#[test]
fn another_owner_takes_root() {
    let folder = folder();
    let path = folder.path().join("socket");
    let access = SocketAccess { owner: Some(4243), group: Some(group_of_ours()), mode: None };
    let bound = SocketFile::bind(&path, access);
    if rustix::process::geteuid().is_root() {
        let _bound = bound.unwrap();
        let found = fs::symlink_metadata(&path).unwrap();
        assert_eq!((found.uid(), found.gid(), mode(&path)), (4243, 4242, 0o660));
    } else {
        // Refused, and no file is left to connect to.
        assert!(matches!(bound, Err(SocketError::Io { .. } | SocketError::NoPermission { .. })));
        assert!(!path.exists());
    }
}

/// A file in the place of the socket does not get the socket's owner and mode: neither the target of a symbolic link
/// nor another file.
#[test]
fn a_file_that_was_exchanged_is_left_alone() {
    let folder = folder();
    let (path, precious) = (folder.path().join("socket"), folder.path().join("precious"));
    let exchanges: [fn(&Path, &Path) -> io::Result<()>; 3] = [
        |precious, path| symlink(precious, path),
        |precious, path| fs::hard_link(precious, path),
        |precious, path| fs::copy(precious, path).map(|_| ()),
    ];
    for exchange in exchanges {
        drop(UnixListener::bind(&precious).unwrap());
        fs::set_permissions(&precious, fs::Permissions::from_mode(0o600)).unwrap();
        let socket = UnixDatagram::unbound().unwrap();
        let exchanged = || {
            fs::remove_file(&path).unwrap();
            // A socket cannot be copied.
            exchange(&precious, &path).or_else(|_| fs::write(&path, "anything")).unwrap();
        };
        let born = Folder::open(&path).unwrap().born_with(&socket, exchanged);
        assert!(matches!(born, Err(SocketError::Exchanged(_))));
        assert_eq!(mode(&precious), 0o600);
        fs::remove_file(&path).unwrap();
        fs::remove_file(&precious).unwrap();
    }
}

/// In such a directory another user could put another socket of this process in the place of this one.
#[test]
fn no_socket_for_others_where_others_rename_files() {
    let folder = folder();
    let path = folder.path().join("socket");
    let shared = SocketAccess { group: Some(group_of_ours()), ..own() };
    for (permissions, allowed) in [(0o755, true), (0o775, false), (0o777, false), (0o1777, true)] {
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(permissions)).unwrap();
        let refused = |result: Result<(), SocketError>| matches!(result, Err(SocketError::OpenDirectory { .. }));
        assert_eq!(refused(SocketFile::bind(&path, shared).map(|_| ())), !allowed, "{permissions:o}");
        assert_eq!(refused(bind_datagram(&path, shared).map(|_| ())), !allowed, "{permissions:o}");
        assert!(!path.exists());
        // A socket for the own user is allowed in all of them.
        SocketFile::bind(&path, own()).unwrap();
    }
}
