//! A file whose `close(2)` does not return in the processes under test.
//!
//! The file is on a FUSE file system that this process serves, and that answers everything but the FLUSH requests of
//! other processes. The kernel sends such a request for every `close(2)`, and waits for its answer even when the
//! process is killed: its thread stays in the state D until then. Dropping [`EndlessClose`] sends the answers.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use pvrdma_verbs::testing::skipped;
use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen};

use super::PATIENCE;
use super::frozen::{ENOSYS, GETATTR, INIT, LOOKUP, OPEN, attributes, number, reply, words};

const RELEASE: u32 = 18;
const FLUSH: u32 = 25;

/// The file system. Dropping it completes all blocked calls.
///
/// The thread that serves it is not joined, and ends with the last open file. If it ended earlier, a child process
/// between `fork` and `exec` could hang: the child has copies of the file and of the connection's descriptor, which
/// keep the connection open, and waits for an answer to its `close(2)`.
pub struct EndlessClose {
    /// Signals the thread to complete all calls.
    release: OwnedFd,
    held: Arc<Held>,
    /// Attached to no folder, so that no other process finds it.
    mount: OwnedFd,
}

/// Processes blocked in `close(2)`, in the order of their calls.
#[derive(Default)]
struct Held {
    processes: Mutex<Vec<u32>>,
    changed: Condvar,
}

impl EndlessClose {
    /// Mounts the file system.
    ///
    /// # Errors
    /// This process lacks the permission. A test passes the error to `skipped`.
    pub fn mount() -> Result<Self, String> {
        let failed = |errno| format!("no FUSE file system can be mounted here: {errno}");
        Self::at(open_connection().map_err(failed)?).map_err(failed)
    }

    fn at(connection: OwnedFd) -> rustix::io::Result<Self> {
        let mount = mount(&connection)?;
        let release = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        let (released, held) = (release.try_clone().unwrap(), Arc::<Held>::default());
        let noted = Arc::clone(&held);
        thread::spawn(move || serve(&File::from(connection), released, &noted));
        Ok(Self { release, held, mount })
    }

    /// Opens the file. This process and its children close it without delay.
    pub fn open(&self) -> File {
        rustix::fs::openat(&self.mount, "memory", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap().into()
    }

    /// Waits until `count` calls of `close(2)` are blocked, and returns the ids of their processes.
    #[track_caller]
    pub fn wait_held(&self, count: usize) -> Vec<u32> {
        let held = self.held.processes.lock().unwrap();
        let few = |held: &mut Vec<u32>| held.len() < count;
        let (held, result) = self.held.changed.wait_timeout_while(held, PATIENCE, few).unwrap();
        assert!(!result.timed_out(), "only {held:?} close the file");
        held.clone()
    }

    /// Completes all blocked calls, and answers later ones at once.
    pub fn release(&self) {
        rustix::io::write(&self.release, &1_u64.to_ne_bytes()).unwrap();
    }
}

impl Drop for EndlessClose {
    fn drop(&mut self) {
        self.release();
    }
}

fn open_connection() -> rustix::io::Result<OwnedFd> {
    rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())
}

fn mount(device: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    let context = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "fd", device.as_raw_fd().to_string())?;
    for (key, value) in [("rootmode", "40000"), ("user_id", "0"), ("group_id", "0")] {
        fsconfig_set_string(&context, key, value)?;
    }
    fsconfig_create(&context)?;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
}

/// Answers requests until the file system ends. Holds none once `released` is readable.
fn serve(mut device: &File, released: OwnedFd, held: &Held) {
    let mut request = vec![0; 1 << 17];
    let mut released = Some(released);
    let mut blocked: Vec<Vec<u8>> = Vec::new();
    loop {
        let fd = device.as_fd();
        let mut poll = vec![PollFd::new(&fd, PollFlags::IN)];
        poll.extend(released.iter().map(|event| PollFd::new(event, PollFlags::IN)));
        rustix::io::retry_on_intr(|| rustix::event::poll(&mut poll, None)).unwrap();
        if poll.get(1).is_some_and(|event| !event.revents().is_empty()) {
            released = None;
            for answer in blocked.drain(..) {
                send(device, &answer);
            }
            continue;
        }
        match device.read(&mut request) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            // The request was withdrawn meanwhile.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => continue,
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return,
            Err(error) => panic!("{error}"),
        }
        let node = u64::from_le_bytes(request[16..24].try_into().unwrap());
        let (error, body) = match number(&request, 4) {
            // Version 7.31, no flags, 12 bits of requests, 64 KiB of data.
            INIT => (0, words(&[7, 31, 0, 0, 12 << 16, 1 << 16, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0])),
            LOOKUP => (0, [words(&[2, 0, 0, 0, 1, 0, 1, 0, 0, 0]), attributes(2)].concat()),
            GETATTR => (0, [words(&[1, 0, 0, 0]), attributes(node)].concat()),
            OPEN => (0, words(&[1, 0, 0, 0])),
            RELEASE => (0, Vec::new()),
            FLUSH => {
                if let Some(process) = stranger(number(&request, 32)).filter(|_| released.is_some()) {
                    blocked.push(reply(&request, 0, &[]));
                    held.processes.lock().unwrap().push(process);
                    held.changed.notify_all();
                    continue;
                }
                (0, Vec::new())
            }
            _ => (-ENOSYS, Vec::new()),
        };
        send(device, &reply(&request, error, &body));
    }
}

fn send(mut device: &File, answer: &[u8]) {
    // The write fails if the caller is gone.
    let _ = device.write(answer);
}

/// Returns the process of a thread, unless it is this process or a child of it.
///
/// A child has this process's descriptors until it executes its program, which closes them: that must not block, or
/// `Command::spawn` would.
fn stranger(thread: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u32>().ok());
    let (process, parent) = (field("Tgid:")?, field("PPid:")?);
    let own = std::process::id();
    (process != own && parent != own).then_some(process)
}

/// A process that has not executed its program yet has a copy of each descriptor of this process.
#[test]
fn a_blocked_call_completes_although_the_connection_has_another_descriptor() {
    if let Err(reason) = EndlessClose::mount() {
        return skipped(&reason);
    }
    let connection = open_connection().unwrap();
    let copy = connection.try_clone().unwrap();
    let files = EndlessClose::at(connection).unwrap();
    // The second shell is no child of this process.
    let mut shell = Command::new("sh").args(["-c", "(:); :"]).stdin(files.open()).spawn().unwrap();
    files.wait_held(1);
    drop(files);
    assert!(shell.wait().unwrap().success());
    drop(copy);
}
