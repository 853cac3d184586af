//! Guests with RDMA applications.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::cases::exchange::{Exchange, Programs, Ready};
use crate::cases::shared::Machines;
use crate::endpoints::Endpoints;
use crate::image::{ApplicationsDisk, GuestImage};
use crate::pair::{LinkKind, Pair, PairOptions};
use crate::vm::Vm;

/// Time limit of a program on emulated processors.
pub(super) const LONG: Duration = Duration::from_secs(300);

/// Two guests, each of which may log in at the other.
pub(super) struct ApplicationsPair(Pair);

impl ApplicationsPair {
    /// Boots both and starts their SSH servers.
    pub(super) fn boot(image: &GuestImage) -> Result<Self> {
        Self::boot_with(image, "")
    }

    /// Same as [`boot`](Self::boot), with further options for each device.
    pub(super) fn boot_with(image: &GuestImage, device_options: &str) -> Result<Self> {
        let disk = ApplicationsDisk::build(image)?;
        let root_disk = Some(disk.disk().to_owned());
        let device_options = device_options.to_owned();
        let pair = Pair::boot(image, &PairOptions { rxe: false, root_disk, device_options, ..PairOptions::default() })?;
        for vm in pair.vms() {
            // Libraries treat machines of the same name as one.
            vm.run(&format!("hostname {} && mkdir -p /run/sshd && /usr/sbin/sshd", vm.name()))?;
        }
        Ok(Self(pair))
    }

    /// Returns the endpoints by which programs reach each other.
    pub(super) fn endpoints(&self) -> Result<Endpoints<'_>> {
        Ok(self.0.endpoints(&self.0.link(LinkKind::Pvrdma)?))
    }

    /// Runs a server in guest b, and when it listens a client in guest a.
    pub(super) fn run(&self, server: &str, ready: Ready, client: &str) -> Result<Exchange> {
        self.programs(server, ready, client).run()
    }

    /// Same as [`run`](Self::run), but the client must fail. Returns its output.
    pub(super) fn refused(&self, server: &str, ready: Ready, client: &str) -> Result<String> {
        let (_server, client) = self.programs(server, ready, client).start()?;
        let output = client.wait(LONG)?;
        ensure!(output.code != 0, "the client has not failed: {}", output.text);
        Ok(output.text)
    }

    fn programs(&self, server: &str, ready: Ready, client: &str) -> Programs<'_> {
        let [client_vm, server_vm] = self.vms();
        let (server, client) = (server.to_owned(), client.to_owned());
        Programs { server_vm, server, ready, client_vm, client, timeout: LONG }
    }

    /// Runs a script in guest b, the server.
    pub(super) fn prepare(&self, script: &str) -> Result<String> {
        self.0.b().spawn(script)?.wait_success(LONG).context("in guest b")
    }

    /// Runs a command in guest a.
    pub(super) fn command(&self, command: &str) -> Result<String> {
        self.0.a().spawn(command)?.wait_success(LONG).context("in guest a")
    }
}

impl Machines for ApplicationsPair {
    fn vms(&self) -> [&Vm; 2] {
        self.0.vms().each_ref()
    }

    fn diagnosis(&self) -> String {
        self.0.diagnosis()
    }
}
