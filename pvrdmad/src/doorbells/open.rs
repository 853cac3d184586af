//! Creation of a file of doorbell pages, in a FUSE file system that is mounted nowhere.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use pvrdma_base::threads::{self, ThreadKind};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen,
};
use rustix::process::{getgid, getuid};

use super::fuse::{Connection, NAME, REQUEST, Served};

/// A file whose pages are served by the holder of its FUSE connection.
#[derive(Debug)]
pub struct PageFile {
    /// The FUSE connection, from which the kernel's requests are read. Reads do not block.
    pub device: OwnedFd,
    /// The file.
    pub file: OwnedFd,
}

impl PageFile {
    /// Creates a file of `pages` pages. It has no path, so no other process can open it.
    ///
    /// # Errors
    /// There is no `/dev/fuse`, it cannot be opened, or this process lacks the privilege to mount.
    pub fn make(pages: u32) -> io::Result<Self> {
        let said = |what: &'static str| move |errno: rustix::io::Errno| io::Error::other(format!("{what}: {errno}"));
        let device = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        let device = device.map_err(said("/dev/fuse"))?;
        let mount = mount(&device).map_err(said("mounting with FUSE"))?;
        // Opening the file causes requests. A thread answers them, because the process that will serve the file does
        // not exist yet.
        let connection = Connection::new(device.try_clone()?, pages);
        let serving = threads::spawn(ThreadKind::Supervisor, "doorbells open", move || {
            let mut buffer = vec![0; REQUEST];
            while matches!(connection.serve(&mut buffer, |_| ()), Ok(Served::Other)) {}
        })?;
        let file = rustix::fs::openat(&mount, NAME, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        // The open file keeps the file system alive. Without the file, this ends the connection and with it the thread.
        drop(mount);
        let served = serving.join();
        let file = file.map_err(said("opening the file of doorbell pages"))?;
        served.map_err(|_| io::Error::other("the thread that opens doorbell pages ended"))?;
        // Processes that share the connection must not wait in a read for a request that another one has read.
        let flags = rustix::fs::fcntl_getfl(&device)?;
        rustix::fs::fcntl_setfl(&device, flags | OFlags::NONBLOCK)?;
        Ok(Self { device, file })
    }
}

fn mount(device: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    let context = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "fd", device.as_raw_fd().to_string())?;
    fsconfig_set_string(&context, "rootmode", "40000")?;
    fsconfig_set_string(&context, "user_id", getuid().as_raw().to_string())?;
    fsconfig_set_string(&context, "group_id", getgid().as_raw().to_string())?;
    // A VMM of another user may read the attributes of the file that it was given.
    fsconfig_set_flag(&context, "allow_other")?;
    fsconfig_create(&context)?;
    let attributes =
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}
