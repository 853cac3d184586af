//! A virtual machine: its parts, and its life from boot to reset.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result};
use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
use kvm_bindings::{KVM_PIT_SPEAKER_DUMMY, kvm_pit_config};
use kvm_ioctls::{Kvm, VmFd};
use pvrdma_pci_slot::kvm::KvmInterrupts;
use pvrdma_pci_slot::{BarMap, ConfigPorts, HostBridge, PciBus, Slot};
use vm_allocator::{AddressAllocator, AllocPolicy};
use vm_device::bus::{MmioAddress, MmioRange, PioAddress, PioRange};
use vm_device::device_manager::{IoManager, MmioManager, PioManager};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::signal::Killable;

use crate::boot::{self, Entry, Payload};
use crate::cpu::{self, Shape};
use crate::disk::Disk;
use crate::doorbells::Doorbells;
use crate::fabric::{Cable, Fabric, Pair};
use crate::memory::{self, Vcpu, Vm};
use crate::options::VmOptions;
use crate::power::Power;
use crate::serial::{self, ResetLine};

/// Initial address of the BARs. The guest may move them down to the end of its memory.
const BARS: u64 = 0xc000_0000;
const BARS_END: u64 = 0xf000_0000;
/// Pages that KVM needs for itself on Intel processors. There is no guest memory at this address.
const IDENTITY_MAP: u64 = 0xfffb_c000;
const TASK_STATE: usize = 0xfffb_d000;

// Ports and interrupts of a PC.
const CONSOLE: (u16, u32) = (0x3f8, 4);
const SECOND_SERIAL: (u16, u32) = (0x2f8, 3);
const KEYBOARD: u16 = 0x60;
/// Slot of the first disk.
const FIRST_DISK: u8 = 1;
/// Slot of the device through which a guest powers itself off.
const POWER: u8 = 0x0f;

/// Time to wait for a processor to stop before the signal is repeated. A processor that was about to enter the guest
/// may have missed the first signal.
const KICK_AGAIN: Duration = Duration::from_millis(5);

type Subscribers = EventManager<Box<dyn MutEventSubscriber + Send>>;

/// Parts of a machine that do not need KVM: its memory with the loaded kernel, its functions and its disks.
pub(crate) struct Prepared {
    memory: GuestMemoryMmap,
    entry: Entry,
    slots: Vec<Arc<Slot>>,
    pair: Pair,
    power: Arc<Power>,
}

impl Prepared {
    /// Loads the kernel, locks the memory and plugs in the functions.
    pub(crate) fn new(vm: &VmOptions, fabric: &Arc<Fabric>) -> Result<Self> {
        let memory = memory::allocate(vm.memory)?;
        let payload = Payload { kernel: &vm.kernel, initramfs: vm.initramfs.as_deref(), command_line: &vm.append };
        let entry = boot::load(&memory, vm.memory, vm.cpus, payload)?;
        let mut slots = vec![HostBridge::slot()?];
        for (number, disk) in (FIRST_DISK..).zip(&vm.disks) {
            slots.push(Disk::slot(number, disk, &memory)?);
        }
        let power = Power::new(&vm.name).context("power")?;
        slots.push(power.slot(POWER)?);
        let pair = fabric.plug(vm, &memory)?;
        Ok(Self { memory, entry, slots, pair, power })
    }
}

/// A machine that is ready to run.
pub(crate) struct Machine {
    // Fields are dropped in this order, so that no thread serves a function that is gone; the cable goes last.
    events: Subscribers,
    _doorbells: Option<Doorbells>,
    cpus: Vec<Vcpu>,
    io: Arc<IoManager>,
    bus: Arc<PciBus>,
    /// Signalled when a processor has ended or the guest requests a reset.
    end: EventFd,
    ended: Arc<AtomicBool>,
    power: Arc<Power>,
    _vm: Vm,
    _cable: Cable,
}

/// Reason for the end of a machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ended {
    /// The guest has requested a reset.
    Reset,
    /// The guest has powered itself off.
    Off,
}

/// Records the end of the machine and signals it.
struct End(EventFd, Arc<AtomicBool>);

impl MutEventSubscriber for End {
    fn process(&mut self, _events: Events, _ops: &mut EventOps<'_>) {
        let _ = self.0.read();
        self.1.store(true, Ordering::Release);
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        if let Err(error) = ops.add(Events::new(&self.0, EventSet::IN)) {
            // Log: once in the life of a machine, and nothing of a guest is in it.
            log::error!("end of the machine: {error}");
        }
    }
}

/// Creates a VM with the interrupt controllers and the timer of a PC.
fn make_vm(kvm: &Kvm, memory: GuestMemoryMmap) -> Result<Vm> {
    let vm = Vm::new(kvm, memory)?;
    let fd = vm.fd();
    fd.set_identity_map_address(IDENTITY_MAP).context("KVM does not take an address for itself")?;
    fd.set_tss_address(TASK_STATE).context("KVM does not take an address for itself")?;
    fd.create_irq_chip().context("cannot make interrupt controllers")?;
    let timer = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
    fd.create_pit2(timer).context("cannot make a timer")?;
    Ok(vm)
}

impl Machine {
    /// Creates the machine with all its processors.
    pub(crate) fn new(kvm: &Kvm, options: &VmOptions, prepared: Prepared) -> Result<Self> {
        let Prepared { memory, entry, mut slots, pair: Pair { slot: pair, rdma, cable }, power } = prepared;
        let vm = make_vm(kvm, memory)?;
        let interrupts = KvmInterrupts::new(Arc::clone(vm.fd()))?;
        let mut events = Subscribers::new().context("cannot wait for events")?;
        for slot in &slots {
            slot.connect(|| interrupts.line()).context("interrupts")?;
            let work = slot.deferred(Some(Arc::clone(vm.fd()) as _)).context("doorbells")?;
            events.add_subscriber(Box::new(work));
        }
        // An access to a disk may block the processor, so another thread does it. An access to the pair of functions is
        // bounded and finishes sooner than another thread would wake up.
        pair.connect(|| interrupts.line()).context("interrupts")?;
        let work = pair.doorbells(Arc::clone(vm.fd()) as _).context("doorbells")?;
        events.add_subscriber(Box::new(work));
        let start = |policy| Doorbells::start(policy, vm.fd(), &pair, &rdma);
        let doorbells = options.doorbells.map(start).transpose()?;
        slots.push(pair);
        let mut io = IoManager::new();
        let bus = PciBus::new(slots)?;
        let mut room = AddressAllocator::new(BARS, BARS_END - BARS)?;
        // Each BAR takes at least one page of its own.
        bus.place_bars(|size| {
            let size = size.max(4096);
            room.allocate(size, size, AllocPolicy::FirstMatch).map(|range| range.start()).ok()
        })?;
        io.register_pio(ConfigPorts::range(), Arc::new(ConfigPorts::new(Arc::clone(&bus))))?;
        let hole = memory::layout(options.memory).first().map_or(BARS, |(_, len)| *len);
        let bars = MmioRange::new(MmioAddress(hole), BARS_END - hole)?;
        io.register_mmio(bars, Arc::new(BarMap::new(Arc::clone(&bus))))?;
        let end = add_ports(options, vm.fd(), &mut io, &mut events)?;
        let ended = Arc::new(AtomicBool::new(false));
        for event in [&end, power.event()] {
            events.add_subscriber(Box::new(End(event.try_clone()?, Arc::clone(&ended))));
        }
        let shape = Shape::new(kvm, options.cpus)?;
        let cpus = (0..options.cpus).map(|number| {
            let cpu = vm.vcpu(number)?;
            shape.apply(&cpu, number, entry)?;
            Ok(cpu)
        });
        let cpus = cpus.collect::<Result<Vec<_>>>()?;
        let io = Arc::new(io);
        Ok(Self { events, _doorbells: doorbells, cpus, io, bus, end, ended, power, _vm: vm, _cable: cable })
    }

    /// Runs the machine until it is reset or powered off.
    ///
    /// # Errors
    /// A processor cannot continue.
    pub(crate) fn run(mut self) -> Result<Ended> {
        let stop = Arc::new(AtomicBool::new(false));
        let (results, ends) = mpsc::channel();
        let mut threads = Vec::new();
        for (number, mut cpu) in self.cpus.drain(..).enumerate() {
            let (io, stop, results) = (Arc::clone(&self.io), Arc::clone(&stop), results.clone());
            let end = self.end.try_clone()?;
            let run = move || {
                let result = cpu::run(&mut cpu, &io, &stop).with_context(|| format!("processor {number}"));
                // Both calls fail only if the machine is gone.
                let _ = results.send(result);
                let _ = end.write(1);
            };
            threads.push(Builder::new().name(format!("vcpu-{number}")).spawn(run).context("cannot start a thread")?);
        }
        drop(results);
        while !self.ended.load(Ordering::Acquire) {
            self.events.run().context("cannot wait for events")?;
        }
        stop.store(true, Ordering::Release);
        let result = stop_all(&threads, &ends);
        // After this reset no function accesses guest memory.
        self.bus.reset();
        result.map(|()| if self.power.is_off() { Ended::Off } else { Ended::Reset })
    }
}

/// Waits for all processors to end, and signals those that are in guest mode to leave it.
fn stop_all(threads: &[JoinHandle<()>], ends: &mpsc::Receiver<Result<()>>) -> Result<()> {
    let mut result = Ok(());
    let mut left = threads.len();
    while left > 0 {
        for thread in threads.iter().filter(|thread| !thread.is_finished()) {
            // The signal fails if the thread has ended in the meantime, which is the intended result.
            let _ = thread.kill(cpu::kick_signal());
        }
        match ends.recv_timeout(KICK_AGAIN) {
            Ok(end) => {
                left -= 1;
                result = result.and(end);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    result
}

/// Adds the serial ports and the reset line. Returns the event of the reset line.
fn add_ports(options: &VmOptions, vm: &Arc<VmFd>, io: &mut IoManager, events: &mut Subscribers) -> Result<EventFd> {
    let range = |port, size| PioRange::new(PioAddress(port), size).context("ports");
    let (console, event) = serial::console(options.console.as_deref())?;
    io.register_pio(range(CONSOLE.0, 8)?, console as Arc<Mutex<_>>)?;
    vm.register_irqfd(&event, CONSOLE.1).context("interrupt of the console")?;
    if let Some(path) = &options.serial {
        let (port, event, input) = serial::connected(path)?;
        io.register_pio(range(SECOND_SERIAL.0, 8)?, port)?;
        vm.register_irqfd(&event, SECOND_SERIAL.1).context("interrupt of the serial port")?;
        events.add_subscriber(Box::new(input));
    }
    let (reset, event) = ResetLine::new()?;
    io.register_pio(range(KEYBOARD, 5)?, Arc::new(Mutex::new(reset)))?;
    Ok(event)
}
