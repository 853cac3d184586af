//! The device: its parts, the routing of accesses, and its life cycle (section 3).

use std::sync::Arc;

use log::{Level, debug};
use parking_lot::Mutex;
use pvrdma_guest_memory::DmaSpace;
use pvrdma_verbs::{Backend, Hca, VerbsError};

use crate::abi::regs::ctl;
use crate::adapter::Adapter;
use crate::cmd;
use crate::config::DeviceConfig;
use crate::dsr::{self, Session};
use crate::error::RegisterError;
use crate::events::EventRings;
use crate::intr::{Interrupts, VECTORS};
use crate::pci::{CONFIG_SIZE, ConfigSpace, Switches};
use crate::pci_function::{Bar, InterruptSink, PciFunction};
use crate::regs::{Readable, Write};
use crate::stats::{DeviceStatus, Phase};

/// A PVRDMA function with its adapter.
///
/// Registers and commands run on the calling thread, one at a time. Doorbells run concurrently with them and with each
/// other. The owner must call [`PciFunction::run_deferred`] after each write to BAR 2, and must not call back into the
/// device from its [`InterruptSink`].
pub struct PvrdmaDevice<B: Backend> {
    adapter: Adapter<B::Hca>,
    control: Mutex<Control>,
    pci: Mutex<ConfigSpace>,
}

/// The registers that have a memory, and the state they lead to.
#[derive(Debug)]
struct Control {
    state: State,
    dsr_low: u32,
    err: u32,
    mac: [u32; 2],
}

#[derive(Debug)]
enum State {
    /// No shared region.
    Reset,
    /// The shared region was accepted. The rings wait here, so that nothing can write to them before ACTIVATE.
    Ready(Session, Box<EventRings>),
    /// Commands are served.
    Active(Session),
}

impl Control {
    fn new(config: &DeviceConfig) -> Self {
        let [a, b, c, d, e, f] = config.mac.0;
        let mac = [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, 0, 0])];
        Self { state: State::Reset, dsr_low: 0, err: 0, mac }
    }
}

impl<B: Backend> std::fmt::Debug for PvrdmaDevice<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PvrdmaDevice").field("name", &self.adapter.config.name).finish_non_exhaustive()
    }
}

impl<B: Backend> PvrdmaDevice<B> {
    /// Makes a device in power-on state. Its access to `memory` is switched off until the guest enables bus mastering.
    ///
    /// # Errors
    /// The configuration makes no sense, or the backend cannot serve another device.
    pub fn new(
        config: DeviceConfig,
        memory: Arc<DmaSpace>,
        interrupts: Arc<dyn InterruptSink>,
        backend: &B,
    ) -> Result<Arc<Self>, VerbsError> {
        memory.set_enabled(false);
        let interrupts = Interrupts::new(interrupts, config.intx);
        let adapter = Adapter::new(config, memory, interrupts, backend)?;
        let control = Control::new(&adapter.config);
        let pci = ConfigSpace::new(adapter.limits.max_uar, adapter.config.intx);
        Ok(Arc::new(Self { adapter, control: Mutex::new(control), pci: Mutex::new(pci) }))
    }

    /// The device as it is now.
    pub fn status(&self) -> DeviceStatus {
        let adapter = &self.adapter;
        let phase = match self.control.lock().state {
            State::Reset => Phase::Reset,
            State::Ready(..) => Phase::Handshake,
            State::Active(_) => Phase::Active,
        };
        let counts = [adapter.stats.counts.list(), adapter.interrupts.counters(), adapter.hub.counters()];
        DeviceStatus {
            name: adapter.config.name.clone(),
            mac: adapter.config.mac,
            version: adapter.config.version,
            roce: adapter.config.roce,
            phase,
            bus_master: adapter.gate.is_bus_master(),
            port: adapter.hca.port(),
            objects: adapter.objects.counts(),
            page_list_extents: adapter.objects.budget.used(),
            mapped_bytes: adapter.memory.mapped_bytes(),
            pinned_bytes: adapter.memory.pinned_bytes(),
            commands: adapter.stats.commands(),
            counters: counts.concat(),
            adapter: adapter.hca.counters(),
        }
    }

    /// CTL=RESET, and the first half of a handshake: everything ends before this returns (section 3.4 S3).
    fn forget(&self, control: &mut Control) {
        self.adapter.gate.set_active(false);
        control.state = State::Reset;
        self.adapter.end_all();
    }

    /// A write to DSRHIGH. There is no answer but the capabilities; a refusal shows when the driver tries to go on.
    fn show_region(&self, control: &mut Control, high: u32) {
        let adapter = &self.adapter;
        self.forget(control);
        let address = u64::from(high) << 32 | u64::from(control.dsr_low);
        let accepted = {
            let view = adapter.memory.view();
            dsr::handshake(&view, address, adapter.config.version, &adapter.caps, &adapter.interrupts)
        };
        match accepted {
            Ok((session, rings)) => {
                adapter.stats.counts.handshakes.increment();
                debug!("{}: shared region at {address:#x} accepted: {session:x?}", adapter.config.name);
                control.state = State::Ready(session, Box::new(rings));
            }
            Err(error) => {
                adapter.stats.counts.handshakes_refused.increment();
                adapter.log.warn(&adapter.config.name, format_args!("handshake refused: {error}"));
            }
        }
    }

    fn control(&self, control: &mut Control, value: u32) -> Result<(), RegisterError> {
        match value {
            ctl::ACTIVATE => self.activate(control),
            // The driver announces PORT_ACTIVE to its consumers itself; QUERY_PORT asks the adapter each time.
            ctl::UNQUIESCE => match control.state {
                State::Active(_) => Ok(()),
                _ => Err(RegisterError::NotReady("active")),
            },
            ctl::RESET => {
                self.forget(control);
                self.adapter.stats.counts.resets.increment();
                Ok(())
            }
            other => Err(RegisterError::Control(other)),
        }
    }

    fn activate(&self, control: &mut Control) -> Result<(), RegisterError> {
        let adapter = &self.adapter;
        if !adapter.gate.is_bus_master() {
            return Err(RegisterError::Masked);
        }
        match std::mem::replace(&mut control.state, State::Reset) {
            State::Reset => Err(RegisterError::NotReady("ready: no shared region was accepted")),
            State::Active(session) => {
                control.state = State::Active(session);
                Ok(())
            }
            State::Ready(session, rings) => {
                if let Err(error) = adapter.memory.pin_status() {
                    control.state = State::Ready(session, rings);
                    return Err(error.into());
                }
                adapter.hub.install(*rings);
                control.state = State::Active(session);
                adapter.gate.set_active(true);
                adapter.stats.counts.activations.increment();
                // A guest can do this in a loop.
                let name = &adapter.config.name;
                adapter.log.log(Level::Info, name, format_args!("active, interface version {}", session.version));
                Ok(())
            }
        }
    }

    fn request(&self, control: &Control) -> Result<(), RegisterError> {
        let State::Active(session) = control.state else { return Err(RegisterError::NotReady("active")) };
        if !self.adapter.gate.is_open() {
            return Err(RegisterError::Masked);
        }
        cmd::execute(&self.adapter, &session)
    }

    /// Stores the result of a CTL or REQUEST write where the driver looks for it.
    fn conclude(&self, control: &mut Control, result: Result<(), RegisterError>) {
        control.err = match result {
            Ok(()) => 0,
            Err(error) => {
                self.adapter.stats.counts.register_errors.increment();
                self.adapter.log.warn(&self.adapter.config.name, format_args!("{error}"));
                error.code().into()
            }
        };
    }

    fn register_write(&self, write: Write) {
        let control = &mut *self.control.lock();
        match write {
            Write::DsrLow(value) => control.dsr_low = value,
            Write::DsrHigh(value) => self.show_region(control, value),
            Write::Ctl(value) => {
                let result = self.control(control, value);
                self.conclude(control, result);
            }
            Write::Request => {
                let result = self.request(control);
                self.conclude(control, result);
            }
            Write::Imr(value) => self.adapter.interrupts.set_mask(value),
            Write::MacLow(value) => control.mac[0] = value,
            Write::MacHigh(value) => control.mac[1] = value,
        }
    }

    /// Reads go through the control lock too: what ERR says follows every write before it.
    fn register_read(&self, register: Readable) -> u32 {
        let control = self.control.lock();
        match register {
            Readable::Version => self.adapter.config.version,
            Readable::Err => control.err,
            Readable::Icr => self.adapter.interrupts.take_cause(),
            Readable::Imr => self.adapter.interrupts.mask(),
            Readable::MacLow => control.mac[0],
            Readable::MacHigh => control.mac[1],
        }
    }

    /// Lets what the guest switched take effect. Memory is cut off first: [`DmaSpace::set_enabled`] waits for whoever is
    /// using it, and after that nothing can produce an interrupt either.
    fn switch(&self, before: Switches, after: Switches) {
        let adapter = &self.adapter;
        if after.msix != before.msix {
            adapter.interrupts.set_msix(after.msix);
        }
        if after.intx_disabled != before.intx_disabled {
            adapter.interrupts.set_line_disabled(after.intx_disabled);
        }
        if after.bus_master && !before.bus_master {
            adapter.interrupts.set_bus_master(true);
            adapter.memory.set_enabled(true);
            adapter.gate.set_bus_master(true);
        } else if before.bus_master && !after.bus_master {
            adapter.gate.set_bus_master(false);
            adapter.memory.set_enabled(false);
            adapter.interrupts.set_bus_master(false);
        }
    }
}

impl<B: Backend> PciFunction for PvrdmaDevice<B>
where
    B: Send + Sync,
{
    fn bars(&self) -> [Option<Bar>; 6] {
        self.pci.lock().bars()
    }

    fn config_size(&self) -> usize {
        CONFIG_SIZE
    }

    fn config_read(&self, offset: usize, data: &mut [u8]) {
        let pending = self.adapter.interrupts.is_pending();
        self.pci.lock().read(offset, data, pending);
    }

    fn config_write(&self, offset: usize, data: &[u8]) {
        // Held until the switches have taken effect, so that two writers cannot overtake each other.
        let mut pci = self.pci.lock();
        let before = pci.switches();
        pci.write(offset, data);
        self.switch(before, pci.switches());
    }

    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if bar == 1
            && let Some(register) = Readable::decode(offset, data.len())
        {
            data.copy_from_slice(&self.register_read(register).to_le_bytes());
        }
    }

    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]) {
        match bar {
            1 => {
                if let Some(write) = Write::decode(offset, data) {
                    self.register_write(write);
                }
            }
            2 => self.adapter.doorbell(offset, data),
            // BAR 0 holds the MSI-X table, which the VMM keeps.
            _ => {}
        }
    }

    fn run_deferred(&self) {
        self.adapter.run_deferred();
    }

    fn msix_vectors(&self) -> u16 {
        VECTORS
    }

    fn reset(&self) {
        let mut control = self.control.lock();
        self.forget(&mut control);
        self.adapter.stats.counts.resets.increment();
        *control = Control::new(&self.adapter.config);
        let mut pci = self.pci.lock();
        let before = pci.switches();
        pci.reset();
        self.switch(before, pci.switches());
    }
}

impl<B: Backend> Drop for PvrdmaDevice<B> {
    fn drop(&mut self) {
        let adapter = &self.adapter;
        adapter.gate.set_active(false);
        adapter.end_all();
        adapter.memory.set_enabled(false);
    }
}

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
