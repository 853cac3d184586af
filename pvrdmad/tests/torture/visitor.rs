//! A well-behaved guest that reboots. While it is away, and after it has come back as another one, its peer still has a
//! connection to the earlier guest.

use pvrdma_dev::{
    ObjectCounts,
    testing::{GuestMemory, register, status},
};
use pvrdma_pci_function::PciFunction;
use pvrdma_verbs::testing::gid;
use pvrdma_verbs_types::Gid;
use pvrdmad::testing::{Dice, Targets};

use crate::machine::Machine;
use crate::network::{ACK_TIMEOUT, Network, VISITOR};
use crate::tenant::{End, Flow, MEMORY, Tenant};

/// Addresses that the guest uses in turn, unless it gets its previous one again.
const ADDRESSES: std::ops::Range<u8> = 100..200;

pub(crate) struct Visitor {
    tenant: Tenant,
    /// Its traffic, while the guest runs.
    pub(crate) flow: Option<Flow>,
    left: Option<Left>,
    targets: Targets,
    dice: Dice,
    pub(crate) lives: u64,
    /// Bytes charged to the device before it had a driver: the buffers of its port.
    idle_bytes: u64,
}

/// The end that remains at the peer.
struct Left {
    end: End,
    /// The guest left between two batches. The bytes at its peer are therefore known, and no further request must be
    /// accepted.
    is_sound: bool,
    /// The peer has sent a request since.
    has_asked: bool,
}

impl Visitor {
    pub(crate) fn new(network: &Network, targets: Targets, seed: u64) -> Self {
        let machine = network.machine(VISITOR, GuestMemory::new(MEMORY), seed);
        let idle_bytes = machine.test.device.status().kept.used_bytes;
        let tenant = Tenant::begin(machine, VISITOR);
        tenant.machine.test.device.reset();
        tenant.machine.test.memory.free_all();
        Self { tenant, flow: None, left: None, targets, dice: Dice::new(seed, 7), lives: 0, idle_bytes }
    }

    pub(crate) const fn machine(&self) -> &Machine {
        &self.tenant.machine
    }

    /// Does the next step of the guest or of its peer.
    pub(crate) fn step(&mut self, network: &Network, host: &Tenant) {
        match &mut self.flow {
            Some(flow) => {
                flow.step(network.now());
                if self.dice.one_in(6) && (flow.is_idle() || self.dice.one_in(3)) {
                    self.go();
                }
            }
            None if self.dice.one_in(6) => self.come(host),
            None => {}
        }
        self.look_back();
    }

    /// Starts the guest.
    pub(crate) fn come(&mut self, host: &Tenant) {
        self.lives += 1;
        let driver = self.tenant.machine.driver();
        let fresh = gid(ADDRESSES.start + (self.lives % ADDRESSES.len() as u64) as u8);
        let wanted = if self.dice.one_in(2) { self.tenant.gid } else { fresh };
        // Another guest may have the address by now.
        let waits = || {
            let device = serde_json::to_value(self.tenant.machine.test.device.inspect()).unwrap();
            device["backend"]["waiting_gids"].as_array().is_some_and(|waiting| !waiting.is_empty())
        };
        let bind = |gid: Gid| driver.bind_gid(0, gid).ok().filter(|()| !waits()).map(|()| gid);
        self.tenant.gid = bind(wanted).or_else(|| bind(fresh)).unwrap();
        self.tenant.driver = driver;
        let (left, right) = if self.dice.one_in(2) { (&self.tenant, host) } else { (host, &self.tenant) };
        let dice = Dice::new(self.dice.long(), 8);
        let flow = Flow::new(left, right, ACK_TIMEOUT, dice);
        self.targets.come(flow.targets());
        self.flow = Some(flow);
    }

    /// Ends the guest, whatever requests are outstanding.
    fn go(&mut self) {
        self.forget();
        let Some(flow) = self.flow.take() else { return };
        let is_sound = flow.is_settled();
        let (driver, device) = (&self.tenant.driver, &self.tenant.machine.test);
        match self.dice.below(3) {
            0 => device.device.reset(),
            1 => driver.pci().set_bus_master(false),
            _ => driver.pci().set_register(register::CTL, 2),
        }
        // A later write to this memory would corrupt the next life's data, and so be found.
        device.memory.free_all();
        let (mut end, target) = flow.part(self.tenant.number);
        self.targets.go(target);
        if !is_sound {
            end.fail();
        }
        self.left = Some(Left { end, is_sound, has_asked: false });
    }

    /// Checks the end that remains at the peer.
    fn look_back(&mut self) {
        let Some(left) = &mut self.left else { return };
        let statuses = left.end.poll_any();
        if left.is_sound {
            assert!(!statuses.contains(&status::SUCCESS), "a device accepts a forged sender");
            left.end.check();
        } else {
            left.end.check_private();
        }
        match self.dice.below(24) {
            0 | 1 if left.is_sound && !left.has_asked => {
                left.end.send_into_the_void(self.lives);
                left.has_asked = true;
            }
            2 if left.end.is_idle() => self.forget(),
            _ => {}
        }
    }

    /// The peer closes the connection.
    fn forget(&mut self) {
        if let Some(left) = self.left.take() {
            self.targets.forget();
            left.end.end();
        }
    }

    /// Checks traffic in progress without starting more.
    pub(crate) fn look(&mut self, network: &Network) {
        if let Some(flow) = &mut self.flow {
            flow.look(network.now());
        }
        self.look_back();
    }

    /// Returns `true` if the peer still has a connection to the earlier guest.
    pub(crate) fn has_left(&self) -> bool {
        self.left.is_some()
    }

    /// Returns `true` if no request is outstanding at the guest or its peer.
    pub(crate) fn is_idle(&self) -> bool {
        self.flow.as_ref().is_none_or(Flow::is_idle) && self.left.as_ref().is_none_or(|left| left.end.is_idle())
    }

    /// Ends the guest, and checks that no resources remain.
    pub(crate) fn end(&mut self) {
        self.go();
        self.forget();
        self.tenant.machine.test.device.reset();
        let status = self.tenant.status();
        assert_eq!((status.objects, status.kept.used_bytes), (ObjectCounts::default(), self.idle_bytes));
    }
}
