//! Device: its parts, the dispatch of accesses, and its life cycle (section 3).

use std::collections::BTreeMap;
use std::sync::Arc;

use log::debug;
use parking_lot::Mutex;
use pvrdma_guest_memory::{DmaSpace, MemoryBudget};
use pvrdma_packet::MacAddr;
use pvrdma_pci_function::{
    Bar, CONFIG_SIZE, ConfigSpace, Deferred, DoorbellPages, InterruptSink, MsixPlace, Outline, PciFunction, StateError,
    Switches,
};
use pvrdma_verbs::{AsyncEvent, EventSink, Hca, PortEvent, Station, VerbsError};
use pvrdma_verbs_types::PortState;

use crate::abi::regs::ctl;
use crate::cmd;
use crate::config::DeviceConfig;
use crate::control::{Control, State};
use crate::core::Core;
use crate::dsr;
use crate::error::{HandshakeError, RegisterError};
use crate::intr::Interrupts;
use crate::limits::{LimitError, LimitStatus};
use crate::pci::config_space;
use crate::regs::{RegRead, RegWrite};
use crate::stats::{DeviceStatus, KeptStatus, MemoryStatus, Phase, RecoveryStatus};
use crate::watcher::MappedDoorbells;

/// PVRDMA function with its core.
///
/// Registers and commands run on the calling thread, one at a time. Doorbells run concurrently with them and with each
/// other. The owner must call [`PciFunction::run_deferred`] after each write to BAR 2, and must not call back into the
/// device from its [`InterruptSink`].
pub struct PvrdmaDevice<H: Hca> {
    core: Core<H>,
    pub(crate) control: Mutex<Control>,
    /// Phase after the last completed register write. No other lock is taken while this one is held, so a reader does
    /// not wait for a command.
    phase: Mutex<Phase>,
    /// Set by a recovery, until a driver starts the device again. As for `phase`, no other lock is taken.
    pub(crate) recovery: Mutex<Option<RecoveryStatus>>,
    pub(crate) pci: Mutex<ConfigSpace>,
}

impl<H: Hca> std::fmt::Debug for PvrdmaDevice<H> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PvrdmaDevice").field("name", &self.core.config.name).finish_non_exhaustive()
    }
}

impl<H: Hca> PvrdmaDevice<H> {
    /// Creates the device of a station in power-on state. Its access to `memory` is disabled until the guest enables
    /// bus mastering.
    ///
    /// # Errors
    /// The configuration is invalid, or the backend cannot serve another device.
    pub fn new<S: Station<Hca = H>>(
        config: DeviceConfig,
        memory: Arc<DmaSpace>,
        interrupts: Arc<dyn InterruptSink>,
        station: &S,
    ) -> Result<Arc<Self>, VerbsError> {
        memory.set_enabled(false);
        let interrupts = Interrupts::new(interrupts, config.intx);
        let core = Core::new(config, memory, interrupts, station)?;
        let control = Control::new(core.mac);
        let pci = config_space(core.limits().max_uar, core.config.intx);
        let phase = Mutex::new(Phase::Reset);
        let recovery = Mutex::default();
        Ok(Arc::new(Self { core, control: Mutex::new(control), phase, recovery, pci: Mutex::new(pci) }))
    }

    /// Waits for the command in progress, and keeps others out.
    pub(crate) fn lock_commands(&self) -> impl Drop + '_ {
        self.control.lock()
    }

    /// Returns the core, on which commands and doorbells operate.
    pub(crate) const fn core(&self) -> &Core<H> {
        &self.core
    }

    /// Returns the memory that the device may keep for its guest and peers.
    pub fn memory_budget(&self) -> &Arc<MemoryBudget> {
        &self.core.budget
    }

    /// Returns the MAC address.
    pub const fn mac(&self) -> MacAddr {
        self.core.mac
    }

    /// Returns the current status. Its phase is the one after the last completed register write: this does not wait for
    /// a command.
    pub fn status(&self) -> DeviceStatus {
        let core = &self.core;
        let kept = KeptStatus::from(&*core.budget);
        let counts = [
            core.stats.counts.list(),
            core.interrupts.counters(),
            core.hub.counters(),
            core.watch.counters(),
            kept.counters(),
        ];
        DeviceStatus {
            name: core.config.name.clone(),
            mac: core.mac,
            version: core.config.version,
            roce: core.config.roce,
            phase: *self.phase.lock(),
            recovery: self.recovery.lock().clone(),
            bus_master: core.gate.is_bus_master(),
            port: core.hca.port(),
            objects: core.objects.counts(),
            kept,
            memory: MemoryStatus { mapped_bytes: core.memory.mapped_bytes(), pinned_bytes: core.memory.pinned_bytes() },
            commands: core.stats.commands(),
            counters: counts.concat(),
            adapter: core.hca.counters(),
        }
    }

    /// Sets the link of the device up or down, and informs the driver by a port event. While the link is down, the port
    /// is down, and no packet leaves or enters the device. Returns `true` if the state changed.
    ///
    /// # Errors
    /// Other devices share the link of the adapter ([`VerbsError::Unsupported`]).
    pub fn set_link(&self, up: bool) -> Result<bool, VerbsError> {
        let core = &self.core;
        let changed = core.hca.set_link(up)?;
        // A driver that starts later queries the state.
        if changed && core.gate.is_open() {
            self.port_event(if up { PortEvent::Active } else { PortEvent::Error });
        }
        Ok(changed)
    }

    /// Sets the MTU of the uplink: the largest IP packet, in bytes, that reaches other hosts. `None` restores the
    /// configured MTU. If the path MTU of the port changes, the driver gets a port event, after which programs query it
    /// again. Returns `true` if it changes.
    pub fn set_uplink_mtu(&self, bytes: Option<u32>) -> bool {
        let core = &self.core;
        let changed = core.hca.set_uplink_mtu(bytes);
        if changed && core.gate.is_open() && core.hca.port().state == PortState::Active {
            self.port_event(PortEvent::Active);
        }
        changed
    }

    /// Informs the driver that its adapter has changed the GID table, which no command has caused.
    pub fn gid_table_changed(&self) {
        if self.core.gate.is_open() {
            self.port_event(PortEvent::GidChange);
        }
    }

    /// Informs the driver. The calling thread may serve other devices, so it does not access slow memory.
    fn port_event(&self, event: PortEvent) {
        let (core, event) = (&self.core, AsyncEvent::Port(event));
        if core.memory.is_slow() {
            core.hub.event_later(event);
        } else {
            core.hub.event(&core.memory.view(), event);
        }
    }

    /// Sets limits by their names. Existing objects and limits that the guest has already read stay: see
    /// [`LimitChange`].
    ///
    /// # Errors
    /// A limit is unknown or cannot be changed now, or the value is out of range; nothing has changed then.
    ///
    /// [`LimitChange`]: crate::LimitChange
    pub fn set_limits(&self, values: &BTreeMap<String, u64>) -> Result<(), LimitError> {
        let mut limits = self.core.wanted_limits();
        limits.set_all(values)?;
        self.core.set_limits(limits);
        Ok(())
    }

    /// Returns the limits: those in force and those of the next driver.
    pub fn limits(&self) -> Vec<LimitStatus> {
        self.core.limit_status()
    }

    /// Handles CTL=RESET and the first half of a handshake: everything is destroyed before this returns (section 3.4
    /// S3).
    fn teardown(&self, control: &mut Control) {
        self.core.gate.set_active(false);
        control.state = State::Reset;
        control.restored = None;
        *self.recovery.lock() = None;
        self.core.end_all();
    }

    /// Returns to the power-on state. The caller shows the new phase ([`Self::publish_phase`]).
    pub(crate) fn power_on(&self, control: &mut Control) {
        self.teardown(control);
        *control = Control::new(self.core.mac);
        let mut pci = self.pci.lock();
        let before = pci.switches();
        pci.reset();
        self.apply_command_register(before, pci.switches());
    }

    /// Shows the phase after a change.
    pub(crate) fn publish_phase(&self, control: &Control) {
        *self.phase.lock() = control.phase();
    }

    /// Handles a write to DSRHIGH. The capabilities are the only response; the driver notices a refusal at its next
    /// step.
    fn load_dsr(&self, control: &mut Control, high: u32) {
        let core = &self.core;
        self.teardown(control);
        core.renew_offer();
        let address = u64::from(high) << 32 | u64::from(control.dsr_low);
        let accepted = match core.view_unless_paused() {
            Some(view) => dsr::handshake(&view, address, core.config.version, &core.offer().caps, &core.interrupts),
            None => Err(HandshakeError::Paused),
        };
        match accepted {
            Ok((session, rings)) => {
                core.stats.counts.handshakes.increment();
                debug!("{}: shared region at {address:#x} accepted: {session:x?}", core.config.name);
                control.state = State::Ready(session, Box::new(rings));
            }
            Err(error) => {
                core.stats.counts.handshakes_refused.increment();
                core.log.warn(module_path!(), format_args!("handshake refused: {error}"));
            }
        }
    }

    fn control(&self, control: &mut Control, value: u32) -> Result<(), RegisterError> {
        match value {
            ctl::ACTIVATE if self.core.is_paused() => Err(RegisterError::Paused),
            ctl::ACTIVATE => self.activate(control),
            // Nothing else is to be done: the driver itself announces PORT_ACTIVE to its consumers, and QUERY_PORT asks
            // the adapter each time.
            ctl::UNQUIESCE => match control.state {
                State::Active(_) => Ok(()),
                _ => Err(RegisterError::NotReady("active")),
            },
            ctl::RESET => {
                self.teardown(control);
                self.core.stats.counts.resets.increment();
                Ok(())
            }
            other => Err(RegisterError::Control(other)),
        }
    }

    fn activate(&self, control: &mut Control) -> Result<(), RegisterError> {
        let core = &self.core;
        if !core.gate.is_bus_master() {
            return Err(RegisterError::Masked);
        }
        match std::mem::replace(&mut control.state, State::Reset) {
            State::Reset => Err(RegisterError::NotReady("ready: no shared region was accepted")),
            State::Active(session) => {
                control.state = State::Active(session);
                Ok(())
            }
            State::Ready(session, rings) => {
                if let Err(error) = core.memory.lock_all() {
                    control.state = State::Ready(session, rings);
                    return Err(error.into());
                }
                core.hub.install(*rings);
                control.state = State::Active(session);
                core.gate.set_active(true);
                core.stats.counts.activations.increment();
                // A guest can do this in a loop, so the line is rate limited.
                core.log.info(module_path!(), format_args!("active, interface version {}", session.version));
                Ok(())
            }
        }
    }

    fn request(&self, control: &Control) -> Result<(), RegisterError> {
        let State::Active(session) = control.state else { return Err(RegisterError::NotReady("active")) };
        if !self.core.gate.is_open() {
            return Err(RegisterError::Masked);
        }
        if self.core.is_paused() {
            return Err(RegisterError::Paused);
        }
        cmd::execute(&self.core, &session)
    }

    /// Stores the result of a CTL or REQUEST write in the ERR register, which the driver reads.
    fn set_err(&self, control: &mut Control, result: Result<(), RegisterError>) {
        control.err = match result {
            Ok(()) => 0,
            Err(error) => {
                self.core.stats.counts.register_errors.increment();
                self.core.log.warn(module_path!(), format_args!("{error}"));
                error.code().into()
            }
        };
    }

    fn register_write(&self, write: RegWrite) {
        let control = &mut *self.control.lock();
        match write {
            RegWrite::DsrLow(value) => control.dsr_low = value,
            RegWrite::DsrHigh(value) => self.load_dsr(control, value),
            RegWrite::Ctl(value) => {
                let result = self.control(control, value);
                self.set_err(control, result);
            }
            RegWrite::Request => {
                let result = self.request(control);
                self.set_err(control, result);
            }
            RegWrite::Imr(value) => self.core.interrupts.set_mask(value),
            RegWrite::MacLow(value) => control.mac[0] = value,
            RegWrite::MacHigh(value) => control.mac[1] = value,
        }
        *self.phase.lock() = control.phase();
    }

    /// Reads a register. Reads take the control lock as well, because ERR must reflect every earlier write.
    fn register_read(&self, register: RegRead) -> u32 {
        let control = self.control.lock();
        match register {
            RegRead::Version => self.core.config.version,
            RegRead::Err => control.err,
            RegRead::Icr => self.core.interrupts.take_cause(),
            RegRead::Imr => self.core.interrupts.mask(),
            RegRead::MacLow => control.mac[0],
            RegRead::MacHigh => control.mac[1],
        }
    }

    /// Applies changes of the command register, except that the caller destroys the objects when bus mastering ends.
    /// Memory access is disabled before interrupts: [`DmaSpace::set_enabled`] waits for all views, so nothing can
    /// produce an interrupt after it either.
    pub(crate) fn apply_command_register(&self, before: Switches, after: Switches) {
        let core = &self.core;
        if after.msix != before.msix {
            core.interrupts.set_msix(after.msix);
        }
        if after.intx_disabled != before.intx_disabled {
            core.interrupts.set_line_disabled(after.intx_disabled);
        }
        if after.bus_master && !before.bus_master {
            core.interrupts.set_bus_master(true);
            core.memory.set_enabled(true);
            core.gate.set_bus_master(true);
        } else if before.bus_master && !after.bus_master {
            core.gate.set_bus_master(false);
            core.memory.set_enabled(false);
            core.interrupts.set_bus_master(false);
        }
    }
}

impl<H: Hca> PciFunction for PvrdmaDevice<H> {
    fn bars(&self) -> [Option<Bar>; 6] {
        self.pci.lock().bars()
    }

    fn config_size(&self) -> usize {
        CONFIG_SIZE
    }

    fn config_read(&self, offset: usize, data: &mut [u8]) {
        let pending = self.core.interrupts.is_pending();
        self.pci.lock().read(offset, data, pending);
    }

    fn config_write(&self, offset: usize, data: &[u8]) {
        // The lock is held until the changes are applied, so that two writers cannot overtake each other.
        let control = &mut *self.control.lock();
        let [before, after] = {
            let mut pci = self.pci.lock();
            let before = pci.switches();
            pci.write(offset, data);
            [before, pci.switches()]
        };
        self.apply_command_register(before, after);
        if before.bus_master && !after.bus_master {
            // Linux disables bus mastering before it starts another kernel (kexec), whose driver enables it before its
            // handshake (section 3.2). By then the memory of the first kernel's objects belongs to the second kernel,
            // so the objects must be destroyed now.
            self.teardown(control);
            *self.phase.lock() = control.phase();
        }
    }

    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if bar == 1
            && let Some(register) = RegRead::decode(offset, data.len())
        {
            data.copy_from_slice(&self.register_read(register).to_le_bytes());
        }
    }

    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]) -> Deferred {
        match bar {
            1 => {
                let Some(write) = RegWrite::decode(offset, data) else { return Deferred::Nothing };
                self.register_write(write);
            }
            2 => self.core.doorbell(offset, data),
            // BAR 0 holds the MSI-X table, which the VMM emulates.
            _ => return Deferred::Nothing,
        }
        Deferred::Pending
    }

    fn run_deferred(&self) {
        self.core.run_deferred();
    }

    fn msix(&self) -> Option<MsixPlace> {
        self.pci.lock().msix()
    }

    fn doorbell_window(&self) -> Option<DoorbellPages> {
        Some(DoorbellPages { bar: 2, pages: MappedDoorbells::doorbell_pages(self) })
    }

    fn outline_bar(&self) -> Option<usize> {
        Some(1)
    }

    fn outline(&self) -> Option<Outline> {
        Some(self.read_outline())
    }

    fn recover(&self, outline: &Outline) -> Result<(), StateError> {
        Ok(self.recover_from(outline)?)
    }

    fn reset(&self) {
        let mut control = self.control.lock();
        self.power_on(&mut control);
        self.core.stats.counts.resets.increment();
        self.publish_phase(&control);
    }
}

impl<H: Hca> Drop for PvrdmaDevice<H> {
    fn drop(&mut self) {
        let core = &self.core;
        core.gate.set_active(false);
        core.end_all();
        core.memory.set_enabled(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspect::ObjectKind;
    use crate::testing::typed::TypedDriver;

    #[test]
    fn the_status_does_not_wait_for_a_command() {
        let guest = TypedDriver::up();
        let command = guest.device.control.lock();
        assert_eq!(guest.device.status().phase, Phase::Active);
        drop(command);
    }

    /// C4, S11: the status is available whatever locks are held, and marks the parts that it cannot read as busy.
    #[test]
    fn the_status_waits_for_no_lock() {
        let guest = TypedDriver::up();
        let core = guest.device.core();
        let command = (guest.device.control.lock(), guest.device.pci.lock(), core.objects.gids.lock());
        let view = core.memory.view();
        std::thread::scope(|scope| {
            // A waiting writer blocks new readers.
            let writer = scope.spawn(|| core.memory.barrier());
            while core.memory.try_view().is_some() {
                std::thread::yield_now();
            }
            let status = guest.device.status();
            assert_eq!((status.phase, status.objects.gids), (Phase::Active, None));
            assert!(status.memory.mapped_bytes > 0);
            assert_eq!(serde_json::to_value(&status).unwrap()["objects"]["gids"], "busy");
            drop(view);
            writer.join().unwrap();
        });
        drop(command);
        assert_eq!(guest.device.status().objects.gids, Some(0));
    }

    /// Regression: this waited for the GID table, and for the map of guest memory with each ring.
    #[test]
    fn showing_objects_waits_for_no_lock() {
        let guest = TypedDriver::up();
        let pd = guest.create_pd(0);
        let cq = guest.create_cq(0);
        let _objects = (guest.create_qp(pd, cq), guest.create_srq(pd), guest.create_mr(pd));
        let core = guest.device.core();
        let heads = |kind| guest.device.inspect_objects(kind).to_string().matches("\"head\":0").count();
        let rings = [ObjectKind::Qp, ObjectKind::Cq, ObjectKind::Srq, ObjectKind::Ring];
        assert!(rings.iter().all(|&kind| heads(kind) > 0));
        let command = (guest.device.control.lock(), guest.device.pci.lock(), core.objects.gids.lock());
        let view = core.memory.view();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| core.memory.barrier());
            while core.memory.try_view().is_some() {
                std::thread::yield_now();
            }
            for kind in ObjectKind::ALL {
                let shown = guest.device.inspect_objects(kind);
                assert_eq!(shown == "busy", kind == ObjectKind::Gid, "{shown}");
            }
            assert!(rings.iter().all(|&kind| heads(kind) == 0));
            drop(view);
            writer.join().unwrap();
        });
        drop(command);
        assert!(guest.device.inspect_objects(ObjectKind::Gid).is_array());
    }
}
