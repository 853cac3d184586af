//! The device: its components, register dispatch, and life cycle.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use pvrdma_base::Counter;
use pvrdma_base::locks::Mutex;
use pvrdma_guest_memory::DmaSpace;
use pvrdma_packet::MacAddr;
use pvrdma_pci_function::{
    Bar, CONFIG_SIZE, ConfigLayout, ConfigSpace, Deferred, Doorbell, FIRST_CAPABILITY, Identity, InterruptSink,
    MsixPlace, Outline, PciFunction, StateError, Switches,
};

use crate::abi::command::Coalesce;
use crate::abi::regs::{CLASS, DEVICE_ID, MAX_VECTORS, REVISION_ID, REVISIONS, UPT_VERSIONS, VENDOR_ID};
use crate::cmd::{self, Registers};
use crate::config::Vmxnet3Config;
use crate::core::{Core, pending};
use crate::error::ConfigError;
use crate::frame::{Frame, FramePort};
use crate::intr::Interrupts;
use crate::receive::{self, Received};
use crate::regs::{self, BAR_SIZE, RegRead, RegWrite};
use crate::transmit;
#[cfg(feature = "link")]
use crate::transmit::Outlet;

/// BAR of the MSI-X table, the size of that BAR, and the offset of the pending bits in it.
const MSIX_BAR: u8 = 2;
const MSIX_BAR_SIZE: u64 = 0x2000;
const MSIX_PENDING: u32 = 0x1000;

/// A vmxnet3 function.
///
/// Register accesses and commands run on the calling thread, one at a time. Frames run concurrently with them and with
/// each other. The owner must not post writes (the driver frees memory when RESET returns), and must not call back into
/// registers from its [`InterruptSink`] or its [`FramePort`].
pub struct Vmxnet3Device {
    pub(crate) core: Core,
    pub(crate) control: Mutex<Control>,
    pub(crate) pci: Mutex<ConfigSpace>,
}

/// Registers that hold state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Control {
    pub(crate) registers: Registers,
    /// Result of the last command.
    pub(crate) result: u32,
}

impl Control {
    const POWER_ON: Self = Self { registers: Registers { revision: 1, shared: 0 }, result: 0 };
}

/// Snapshot of a device's state.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Vmxnet3Status {
    /// Name.
    pub name: String,
    /// MAC address currently set by the guest.
    pub mac: MacAddr,
    /// `true` if a driver has activated the device.
    pub active: bool,
    /// `true` if the link is up.
    pub link_up: bool,
    /// Number of interrupts delivered.
    pub interrupts: u64,
    /// Counters.
    pub counters: Vec<Counter>,
}

impl std::fmt::Debug for Vmxnet3Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vmxnet3Device").field("name", &self.core.config.name).finish_non_exhaustive()
    }
}

/// Replaces the low or the high half of an address.
fn set_half(address: &mut u64, value: u32, high: bool) {
    let value = u64::from(value);
    *address = if high { *address & 0xffff_ffff | value << 32 } else { *address & !0xffff_ffff | value };
}

impl Vmxnet3Device {
    /// Creates a device in power-on state, with the link up. Disables its access to `memory` until the guest enables
    /// bus mastering.
    ///
    /// # Errors
    /// The configuration is invalid.
    pub fn new(
        config: Vmxnet3Config,
        memory: Arc<DmaSpace>,
        interrupts: Arc<dyn InterruptSink>,
        port: Arc<dyn FramePort>,
    ) -> Result<Arc<Self>, ConfigError> {
        if !(3..=MAX_VECTORS).contains(&config.vectors) {
            return Err(ConfigError::Vectors(config.vectors));
        }
        memory.set_enabled(false);
        let bar = |size| Some(Bar { size, is_64bit: false });
        let pci = ConfigSpace::new(&ConfigLayout {
            identity: Identity { vendor: VENDOR_ID, device: DEVICE_ID, revision: REVISION_ID, class: CLASS },
            bars: [bar(BAR_SIZE), bar(BAR_SIZE), bar(MSIX_BAR_SIZE), None, None, None],
            msix: Some(MsixPlace {
                capability: FIRST_CAPABILITY,
                vectors: config.vectors,
                bar: MSIX_BAR,
                table: 0,
                pending: MSIX_PENDING,
            }),
            interrupt_pin: config.intx,
            multifunction: config.multifunction,
        });
        let interrupts = Interrupts::new(interrupts, config.vectors, config.intx);
        let core = Core::new(config, memory, interrupts, port);
        Ok(Arc::new(Self { core, control: Mutex::new(Control::POWER_ON), pci: Mutex::new(pci) }))
    }

    /// Delivers a frame to the guest. Callable from any thread, concurrently; frames of one connection keep their order
    /// if they are passed in order.
    pub fn receive(&self, frame: &Frame<'_>) -> Received {
        receive::receive(&self.core, frame)
    }

    /// Ends a batch of [`Self::receive`] calls: interrupts the guest.
    pub fn flush(&self) {
        receive::flush(&self.core);
    }

    /// Resumes transmission after the port has returned [`crate::Sent::Full`] and has room again.
    pub fn resume_transmit(&self) {
        self.core.pending.fetch_or(pending::TX, Ordering::AcqRel);
        self.run_deferred();
    }

    /// Returns `true` if [`PciFunction::run_deferred`] left work because the budget of one call was used up.
    pub fn has_deferred(&self) -> bool {
        self.core.pending.load(Ordering::Acquire) != 0
    }

    /// Moves packets of the guest to an outlet, starting with transmit queue `first`. Returns the queue to start with
    /// next time, for fairness among queues, and `true` if packets may be left. A doorbell that ran in the meantime may
    /// have found its queue's pending bit cleared and done nothing, so the caller must report the remaining packets
    /// itself.
    #[cfg(feature = "link")]
    pub(crate) fn transmit_into(&self, first: u32, outlet: &mut dyn Outlet) -> (u32, bool) {
        let pending = &self.core.pending;
        let mut next = first;
        let found = pending.fetch_and(!pending::TX, Ordering::SeqCst) & pending::TX;
        let mut queues = found;
        for queue in (0..8).map(|number| first.wrapping_add(number) % 8).filter(|queue| found >> queue & 1 == 1) {
            if !outlet.has_room() {
                break;
            }
            if !transmit::run_into(&self.core, queue as usize, outlet) {
                queues &= !(1 << queue);
            }
            next = queue + 1;
        }
        pending.fetch_or(queues, Ordering::SeqCst);
        (next, queues != 0)
    }

    /// Returns `true` if there are transmit completions for which the guest has not been interrupted yet. The caller
    /// should call [`Self::announce_completions`] soon.
    #[cfg(feature = "link")]
    pub(crate) fn has_unannounced(&self) -> bool {
        self.core.tx_vectors.load(Ordering::Acquire) != 0
    }

    /// Interrupts the guest for packets that have been sent.
    #[cfg(feature = "link")]
    pub(crate) fn announce_completions(&self) {
        transmit::announce(&self.core);
    }

    /// Returns `true` if the transmit queues may hold packets.
    pub(crate) fn may_transmit(&self) -> bool {
        self.core.pending.load(Ordering::SeqCst) & pending::TX != 0
    }

    /// Connects or disconnects the link and notifies the guest.
    pub fn set_link(&self, up: bool) {
        let core = &self.core;
        if core.link_up.swap(up, Ordering::AcqRel) == up {
            return;
        }
        let session = core.session().clone();
        if let Some(session) = session {
            core.during(&session, |view| core.report_link(&session, view));
        }
    }

    /// Returns a snapshot of the device's state.
    pub fn status(&self) -> Vmxnet3Status {
        let core = &self.core;
        Vmxnet3Status {
            name: core.config.name.clone(),
            mac: MacAddr(core.mac()),
            active: core.session().is_some() || core.paused.lock().as_ref().is_some_and(|it| it.session.is_some()),
            link_up: core.link_up.load(Ordering::Acquire),
            interrupts: core.interrupts.raised(),
            counters: core.counters.list(),
        }
    }

    fn command(&self, control: &mut Control, number: u32) {
        let core = &self.core;
        control.result = cmd::execute(core, control.registers, number).unwrap_or_else(|error| {
            core.counters.vmxnet3_command_errors.increment();
            core.log.warn(module_path!(), &core.config.name, format_args!("{error}"));
            1
        });
    }

    fn acknowledge(&self, events: u32) {
        let session = self.core.session().clone();
        if let Some(session) = session {
            self.core.during(&session, |view| session.change_events(view, 0, events));
        }
    }

    fn register_write(&self, write: RegWrite) {
        let core = &self.core;
        match write {
            RegWrite::InterruptMask(vector, masked) => {
                if !masked {
                    receive::end_round(core, vector);
                }
                core.interrupts.set_masked(vector, masked);
                if !masked {
                    // Unmasking ends a driver's round, in which the driver may have refilled its rings.
                    core.pending.fetch_or(pending::RX_BUFFERS, Ordering::AcqRel);
                }
            }
            // The written indices are only hints: the device reads the generation bits in the rings instead.
            RegWrite::TxProducer(queue) => {
                core.pending.fetch_or(1 << queue, Ordering::AcqRel);
            }
            RegWrite::RxProducer(_) => {
                core.pending.fetch_or(pending::RX_DOORBELL, Ordering::AcqRel);
            }
            other => self.control_write(&mut self.control.lock(), other),
        }
    }

    fn control_write(&self, control: &mut Control, write: RegWrite) {
        let mac = &self.core.mac;
        match write {
            RegWrite::Revision(chosen) => {
                if chosen & REVISIONS == chosen && chosen.is_power_of_two() {
                    // `chosen` has exactly one of three bits set.
                    control.registers.revision = u8::try_from(chosen.ilog2() + 1).unwrap_or(1);
                }
            }
            RegWrite::SharedLow(value) => set_half(&mut control.registers.shared, value, false),
            RegWrite::SharedHigh(value) => set_half(&mut control.registers.shared, value, true),
            RegWrite::Command(number) => self.command(control, number),
            RegWrite::MacLow(value) | RegWrite::MacHigh(value) => {
                let mut address = mac.load(Ordering::Relaxed);
                set_half(&mut address, value, matches!(write, RegWrite::MacHigh(_)));
                mac.store(address, Ordering::Relaxed);
            }
            RegWrite::Acknowledge(events) => self.acknowledge(events),
            // Only one version is supported, so the write has no effect.
            RegWrite::UptVersion(_)
            | RegWrite::InterruptMask(..)
            | RegWrite::TxProducer(_)
            | RegWrite::RxProducer(_) => {}
        }
    }

    fn register_read(&self, register: RegRead) -> u32 {
        let half = |value: u64, high: bool| {
            let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
            u32::from_le_bytes(if high { [e, f, g, h] } else { [a, b, c, d] })
        };
        let mac = self.core.mac.load(Ordering::Relaxed);
        match register {
            RegRead::InterruptMask(vector) => self.core.interrupts.is_masked(vector).into(),
            RegRead::Revisions => REVISIONS,
            RegRead::UptVersions => UPT_VERSIONS,
            RegRead::SharedLow => half(self.control.lock().registers.shared, false),
            RegRead::SharedHigh => half(self.control.lock().registers.shared, true),
            RegRead::Result => self.control.lock().result,
            RegRead::MacLow => half(mac, false),
            RegRead::MacHigh => half(mac, true) & 0xffff,
            RegRead::InterruptCause => self.core.interrupts.take_cause(),
        }
    }

    /// Returns to the power-on state. Ends a pause.
    pub(crate) fn reset_with(&self, control: &mut Control) {
        let core = &self.core;
        // This must precede `end`, which sets the pending bit that lets a port retry a frame that it holds.
        core.pending.store(0, Ordering::Release);
        *core.paused.lock() = None;
        cmd::end(core);
        core.interrupts.reset();
        core.set_coalesce(Coalesce::default());
        core.reset_mac();
        *control = Control::POWER_ON;
        let mut pci = self.pci.lock();
        let before = pci.switches();
        pci.reset();
        self.apply_command_register(before, pci.switches());
    }

    /// Applies changes of the command register. When bus mastering ends, memory access is disabled first:
    /// [`DmaSpace::set_enabled`] waits until no thread uses the memory, after which no access can raise an interrupt.
    fn apply_command_register(&self, before: Switches, after: Switches) {
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
            core.set_bus_master(true);
        } else if before.bus_master && !after.bus_master {
            core.set_bus_master(false);
            core.memory.set_enabled(false);
            core.interrupts.set_bus_master(false);
        }
    }
}

impl PciFunction for Vmxnet3Device {
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
        // The lock is held until the changes have been applied, so that those of concurrent writes cannot be reordered.
        let mut pci = self.pci.lock();
        let before = pci.switches();
        pci.write(offset, data);
        self.apply_command_register(before, pci.switches());
    }

    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(register) = RegRead::decode(bar, offset, data.len()) {
            data.copy_from_slice(&self.register_read(register).to_le_bytes());
        }
    }

    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]) -> Deferred {
        // BAR 2 holds the MSI-X table, which the VMM maintains. The decoder ignores it.
        let Some(write) = RegWrite::decode(bar, offset, data) else { return Deferred::Nothing };
        self.register_write(write);
        Deferred::Pending
    }

    fn run_deferred(&self) {
        let port = &self.core.port;
        let kept = if port.pulls() { pending::TX } else { 0 };
        let pending = self.core.pending.fetch_and(kept, Ordering::SeqCst);
        if pending & kept != 0 {
            port.pull();
            if self.may_transmit() {
                port.transmit_pending();
            }
        }
        let pending = pending & !kept;
        for queue in (0..8).filter(|queue| pending >> queue & 1 == 1) {
            transmit::run(&self.core, queue);
        }
        if pending & (pending::RX_BUFFERS | pending::RX_DOORBELL) != 0 {
            receive::buffers_may_be_there(&self.core, pending & pending::RX_DOORBELL != 0);
        }
    }

    fn msix(&self) -> Option<MsixPlace> {
        self.pci.lock().msix()
    }

    fn doorbells(&self) -> Vec<Doorbell> {
        regs::doorbells().map(|offset| Doorbell { bar: 0, offset, value: None }).collect()
    }

    fn outline_bar(&self) -> Option<usize> {
        // All of the outline is in configuration space.
        None
    }

    fn outline(&self) -> Option<Outline> {
        let mut outline = Outline { config: [0; CONFIG_SIZE], interrupt_mask: 0, shared_region: 0 };
        self.pci.lock().read(0, &mut outline.config, false);
        Some(outline)
    }

    fn recover(&self, outline: &Outline) -> Result<(), StateError> {
        let mut control = self.control.lock();
        self.reset_with(&mut control);
        let mut identity = [0; 4];
        self.pci.lock().read(0, &mut identity, false);
        if !outline.config.starts_with(&identity) {
            return Err("configuration space is that of another device".into());
        }
        // The driver is not notified: there is no event for this. It notices that the device does not transmit.
        self.config_write(0, &outline.config);
        Ok(())
    }

    fn reset(&self) {
        self.reset_with(&mut self.control.lock());
        self.core.counters.vmxnet3_resets.increment();
    }
}

impl Drop for Vmxnet3Device {
    fn drop(&mut self) {
        cmd::end(&self.core);
        self.core.memory.set_enabled(false);
    }
}
