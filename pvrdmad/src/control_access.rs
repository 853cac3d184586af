//! Access control of the control socket, by user and by request.
//!
//! The first check is the mode of the socket's file, which the kernel enforces. This is the second one, in case the
//! mode is too wide: a client must be root, the user of this daemon, or a user that the configuration names. `group=`
//! admits all users that the mode of the file admits. The daemon cannot check membership itself: the system reports
//! only the primary group of a peer process, whereas the kernel's check of the mode covers all of its groups.

use std::os::unix::net::UnixStream;

use log::Level;
use pvrdma_base::{LogLimit, counters};
use rustix::process::geteuid;

use pvrdma_vfio_user_server::socket::{SocketAccess, user};

counters! {
    /// Counts of the control socket.
    pub struct ControlCounters {
        /// Connections to the control socket that were closed because their user has no access.
        control_connections_refused,
        /// Captures that were refused because captures are off.
        control_captures_refused,
        /// Replacements of the daemon that were refused because of the caller's user.
        control_replacements_refused,
    }
}

/// Access control of the control socket.
#[derive(Debug)]
pub(crate) struct ControlAccess {
    own: u32,
    access: SocketAccess,
    captures: bool,
    refusals: LogLimit,
    /// Counters of refusals.
    pub(crate) counters: ControlCounters,
}

impl ControlAccess {
    /// Creates the access control of a socket that was created with `access`. Without `captures`, captures are refused,
    /// because they contain guest memory.
    pub(crate) fn new(access: SocketAccess, captures: bool) -> Self {
        let own = geteuid().as_raw();
        Self { own, access, captures, refusals: LogLimit::new(), counters: ControlCounters::default() }
    }

    /// Returns `true` if the client may send requests. A refusal is counted and logged here; the caller closes the
    /// connection.
    pub(crate) fn admits(&self, stream: &UnixStream) -> bool {
        let peer = rustix::net::sockopt::socket_peercred(stream);
        if peer.as_ref().is_ok_and(|peer| self.admits_user(peer.uid.as_raw())) {
            return true;
        }
        self.counters.control_connections_refused.increment();
        let who = match peer {
            Ok(peer) => format!("process {} of user {}", peer.pid.as_raw_nonzero(), user(peer.uid.as_raw())),
            Err(errno) => format!("a process of an unknown user ({errno})"),
        };
        self.refusals.log(module_path!(), Level::Warn, "control socket", format_args!("{who} is refused"));
        false
    }

    fn admits_user(&self, uid: u32) -> bool {
        uid == 0 || uid == self.own || self.access.owner == Some(uid) || self.access.group.is_some()
    }

    /// Checks whether the client may replace the daemon: only root and the user of the daemon, because the client gets
    /// all sockets. Returns the number of its process.
    ///
    /// # Errors
    /// It may not.
    pub(crate) fn permits_replacement(&self, stream: &UnixStream) -> Result<u32, String> {
        let peer = rustix::net::sockopt::socket_peercred(stream).map_err(|errno| errno.to_string())?;
        let uid = peer.uid.as_raw();
        if uid == 0 || uid == self.own {
            return Ok(peer.pid.as_raw_nonzero().get().unsigned_abs());
        }
        self.counters.control_replacements_refused.increment();
        let who = user(uid);
        self.refusals.log(
            module_path!(),
            Level::Warn,
            "control socket",
            format_args!("a replacement of the daemon by {who} is refused"),
        );
        Err(format!("only root and {} may replace the daemon", user(self.own)))
    }

    /// Checks whether `device` may be captured.
    ///
    /// # Errors
    /// Captures are disabled.
    pub(crate) fn permits_capture(&self, device: &str) -> Result<(), String> {
        if self.captures {
            return Ok(());
        }
        self.counters.control_captures_refused.increment();
        self.refusals.log(
            module_path!(),
            Level::Warn,
            "control socket",
            format_args!("a capture of {device:?} is refused"),
        );
        Err("captures are off here (captures=off)".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::thread;

    use rustix::process::Uid;

    use super::*;

    fn access(owner: Option<u32>, group: Option<u32>, mode: Option<u32>) -> ControlAccess {
        ControlAccess { own: 1000, ..ControlAccess::new(SocketAccess { owner, group, mode }, true) }
    }

    #[test]
    fn root_the_daemon_and_named_users() {
        // Even a file that all users can open does not admit all users.
        for control in [access(None, None, None), access(None, None, Some(0o666))] {
            assert_eq!([0, 1000, 1001, u32::MAX].map(|uid| control.admits_user(uid)), [true, true, false, false]);
        }
        assert_eq!([1001, 1002].map(|uid| access(Some(1001), None, None).admits_user(uid)), [true, false]);
        // The kernel has checked the group.
        assert!(access(None, Some(7), None).admits_user(1001));
    }

    #[test]
    fn captures_may_be_off() {
        let on = access(None, None, None);
        assert_eq!((on.permits_capture("vm0"), on.counters.control_captures_refused.get()), (Ok(()), 0));
        let off = ControlAccess { captures: false, ..on };
        assert!(off.permits_capture("vm0").unwrap_err().contains("captures=off"));
        assert_eq!(off.counters.control_captures_refused.get(), 1);
    }

    /// Attack: `chmod` has opened the file to all users without the daemon's knowledge.
    #[test]
    fn another_user_is_refused() {
        if !geteuid().is_root() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let open = |path| std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        open(folder.path());
        let listener = UnixListener::bind(&path).unwrap();
        open(&path);
        let connected = |uid: u32| {
            let path = path.clone();
            let connect = thread::spawn(move || {
                // Changes only this thread.
                let uid = Uid::from_raw(uid);
                rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
                UnixStream::connect(path).unwrap()
            });
            let (accepted, _) = listener.accept().unwrap();
            (accepted, connect.join().unwrap())
        };
        let control = ControlAccess::new(SocketAccess::default(), true);
        assert!(control.admits(&connected(0).0));
        assert!(!control.admits(&connected(4242).0));
        assert_eq!(control.counters.control_connections_refused.get(), 1);
    }
}
