//! Two guests with a PVRDMA device and a daemon each, as on separate hosts: the daemons reach each other over a wire.

use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::shared::Machines;
use crate::endpoints::Endpoints;
use crate::guest_with_daemon::{GuestWithDaemon, HostOptions, IPV4, MAC, addresses};
use crate::image::GuestImage;
use crate::namespaces::Namespaces;
use crate::pair::PVRDMA_DEVICE;
use crate::vm::Vm;

/// Two guests, each with a daemon of its own.
#[derive(Debug)]
pub(crate) struct TwoDaemons {
    // Declared in the order in which they must be dropped.
    guests: [GuestWithDaemon; 2],
    _network: Option<Namespaces>,
    directory: TempDir,
}

impl TwoDaemons {
    /// Boots both guests on a network with this MTU. All files go into the given directory.
    pub(crate) fn boot(image: &GuestImage, mtu: u32, options: impl Fn(&Path, usize) -> HostOptions) -> Result<Self> {
        Self::boot_in(None, image, mtu, options)
    }

    /// Same as [`boot`](Self::boot), with the daemons in these network namespaces, if there are any.
    pub(crate) fn boot_in(
        network: Option<Namespaces>,
        image: &GuestImage,
        mtu: u32,
        options: impl Fn(&Path, usize) -> HostOptions,
    ) -> Result<Self> {
        let directory =
            tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
        let start = |end: usize| {
            let namespace = network.as_ref().map(|network| network.name(end).to_owned());
            let options = HostOptions { namespace, ..options(directory.path(), end) };
            GuestWithDaemon::start(image, &directory.path().join(NAMES[end]), NAMES[end], MAC[end], &options)
        };
        let guests = [start(0)?, start(1)?];
        for (end, guest) in guests.iter().enumerate() {
            guest.bring_up(&addresses(end), mtu)?;
        }
        Ok(Self { guests, _network: network, directory })
    }

    /// Returns the sum of a counter over both ends.
    pub(crate) fn counter(&self, name: &str) -> Result<u64> {
        self.guests.iter().map(|guest| guest.counter(name)).sum()
    }

    /// Both guests with their daemons.
    pub(crate) fn guests(&self) -> &[GuestWithDaemon; 2] {
        &self.guests
    }

    /// Returns the directory of the sockets of both.
    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Returns the endpoints for programs, with GIDs of these addresses.
    pub(crate) fn endpoints(&self, ip: [IpAddr; 2], path_mtu: Option<u32>) -> Result<Endpoints<'_>> {
        let endpoints = Endpoints::new(self.vms(), PVRDMA_DEVICE, IPV4, Duration::from_secs(60));
        Endpoints { path_mtu, ..endpoints }.with_gids(ip)
    }
}

impl Machines for TwoDaemons {
    fn vms(&self) -> [&Vm; 2] {
        [self.guests[0].vm(), self.guests[1].vm()]
    }

    fn diagnosis(&self) -> String {
        self.guests.iter().map(GuestWithDaemon::diagnosis).collect::<Vec<_>>().join("\n")
    }
}

const NAMES: [&str; 2] = ["a", "b"];
