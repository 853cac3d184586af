//! A network namespace for tests of this crate.

use std::os::fd::AsFd;
use std::process::Command;

use pvrdma_verbs::testing::skipped;
use rustix::thread::LinkNameSpaceType;

/// A network namespace for a test. Its end deletes all interfaces in it.
pub(crate) struct Namespace(pub(crate) String);

impl Namespace {
    /// Creates a namespace. Prints a message and returns `None` on a machine where this is not possible.
    pub(crate) fn new(name: &str) -> Option<Self> {
        let name = format!("pvrdma-{name}-{}", std::process::id());
        let made = Command::new("ip").args(["netns", "add", &name]).output();
        if !made.is_ok_and(|output| output.status.success()) {
            skipped("no network namespace can be made (not root, or no iproute2)");
            return None;
        }
        Some(Self(name))
    }

    pub(crate) fn ip(&self, arguments: &str) {
        let status = Command::new("ip").args(["-n", &self.0]).args(arguments.split(' ')).status().unwrap();
        assert!(status.success(), "ip {arguments}");
    }

    /// Runs a closure in the namespace.
    pub(crate) fn enter<R: Send>(&self, act: impl FnOnce() -> R + Send) -> R {
        let namespace = std::fs::File::open(format!("/run/netns/{}", self.0)).unwrap();
        std::thread::scope(|scope| {
            let inside = scope.spawn(|| {
                rustix::thread::move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
                act()
            });
            inside.join().unwrap()
        })
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "delete", &self.0]).status();
    }
}
