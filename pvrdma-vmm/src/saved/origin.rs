//! A machine that continues here: from a file, or from another process.

use std::time::Duration;

use anyhow::{Context, Result};
use kvm_ioctls::Kvm;

use super::destination::Arrival;
use super::file::{self, Saved};
use super::host;
use super::link::Listener;
use super::messages::Hello;
use crate::cpu::Shape;
use crate::machine::{Machine, Prepared};
use crate::options::{Options, VmOptions};

/// The place that a machine comes from.
#[derive(Debug)]
pub(crate) enum Origin {
    File(Box<Saved>),
    /// The socket of `--incoming`, and the maximum time for the migration.
    Socket(Listener, Duration),
}

impl Origin {
    /// Opens the file or the socket of these options, if they name one.
    pub(crate) fn open(options: &Options) -> Result<Option<Self>> {
        match (&options.restore, &options.incoming) {
            (Some(path), _) => Ok(Some(Self::File(Box::new(file::open(path)?)))),
            (None, Some(path)) => Ok(Some(Self::Socket(Listener::bind(path)?, options.limit()))),
            (None, None) => Ok(None),
        }
    }

    /// Creates the machine, which is ready to run. Waits for a source.
    pub(crate) fn machine(self, here: &Here<'_>, empty: Prepared) -> Result<Machine> {
        match self {
            Self::File(saved) => here.restore(*saved, empty).context("cannot restore"),
            Self::Socket(listener, limit) => here.receive(listener, limit, empty).context("nothing runs here"),
        }
    }
}

/// The host, and the machine as the command line describes it.
pub(crate) struct Here<'a> {
    pub(crate) kvm: &'a Kvm,
    pub(crate) vm: &'a VmOptions,
    pub(crate) mtu: u32,
}

impl Here<'_> {
    /// Compares the machine with the one here, and returns the shape of its processors.
    fn check(&self, found: &Hello, empty: &Prepared) -> Result<Shape> {
        let shape = Shape::new(self.kvm, self.vm.cpus)?;
        host::check_machine(found, &host::hello(self.vm, self.mtu, &shape, &empty.disks))?;
        let features = host::check_processor(found, shape.features())?;
        shape.with_features(&features)
    }

    fn restore(&self, saved: Saved, empty: Prepared) -> Result<Machine> {
        let shape = self.check(&saved.hello, &empty)?;
        let state = saved.read(&empty.memory)?;
        let machine = Machine::with_state(self.kvm, self.vm, empty, shape, Some(&state))?;
        machine.resume()?;
        Ok(machine)
    }

    fn receive(&self, listener: Listener, limit: Duration, empty: Prepared) -> Result<Machine> {
        println!("{}: waits for a source", self.vm.name);
        let mut arrival = Arrival::new(listener.accept(limit)?)?;
        let result = self.arrive(&mut arrival, empty);
        match &result {
            Ok(_) => arrival.confirm(),
            Err(error) => arrival.refuse(error),
        }
        result
    }

    fn arrive(&self, arrival: &mut Arrival, empty: Prepared) -> Result<Machine> {
        let shape = self.check(arrival.hello(), &empty)?;
        let state = arrival.read(&empty.memory)?;
        let machine = Machine::with_state(self.kvm, self.vm, empty, shape, Some(&state))?;
        arrival.wait_for_commit()?;
        machine.resume()?;
        Ok(machine)
    }
}
