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
use crate::parts::{FIRST_DISK, Parts};
use crate::power::Power;
use crate::saved::departure::{Departure, Left, Running};
use crate::saved::host;
use crate::saved::machine::State;
use crate::saved::messages::{Hello, Ports};
use crate::saved::requests::Request;
use crate::serial::{self, Console, ResetLine, SocketPort};

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
/// Slot of the device through which a guest powers itself off.
const POWER: u8 = 0x0f;

/// Time to wait for a processor to stop before the signal is repeated. A processor that was about to enter the guest
/// may have missed the first signal.
const KICK_AGAIN: Duration = Duration::from_millis(5);

type Subscribers = EventManager<Box<dyn MutEventSubscriber + Send>>;

/// Parts of a machine that do not need KVM: its memory with the loaded kernel, its functions and its disks.
pub(crate) struct Prepared {
    pub(crate) memory: GuestMemoryMmap,
    /// Entry point of the kernel, unless the machine continues from a saved state.
    entry: Option<Entry>,
    slots: Vec<Arc<Slot>>,
    pub(crate) disks: Vec<Arc<Disk>>,
    pair: Pair,
    power: Arc<Power>,
}

impl Prepared {
    /// Loads the kernel, locks the memory and plugs in the functions.
    pub(crate) fn new(vm: &VmOptions, fabric: &Arc<Fabric>) -> Result<Self> {
        let memory = memory::allocate(vm.memory)?;
        let payload = Payload { kernel: &vm.kernel, initramfs: vm.initramfs.as_deref(), command_line: &vm.append };
        let entry = boot::load(&memory, vm.memory, vm.cpus, payload)?;
        Self::with_memory(vm, fabric, memory, Some(entry))
    }

    /// Prepares a machine with zeroed memory, for a saved state.
    pub(crate) fn empty(vm: &VmOptions, fabric: &Arc<Fabric>) -> Result<Self> {
        Self::with_memory(vm, fabric, memory::allocate(vm.memory)?, None)
    }

    fn with_memory(
        vm: &VmOptions,
        fabric: &Arc<Fabric>,
        memory: GuestMemoryMmap,
        entry: Option<Entry>,
    ) -> Result<Self> {
        let (mut slots, mut disks) = (vec![HostBridge::slot()?], Vec::new());
        for (number, disk) in (FIRST_DISK..).zip(&vm.disks) {
            let (disk, slot) = Disk::slot(number, disk, &memory)?;
            disks.push(disk);
            slots.push(slot);
        }
        let power = Power::new(&vm.name).context("power")?;
        slots.push(power.slot(POWER)?);
        let pair = fabric.plug(vm, &memory)?;
        Ok(Self { memory, entry, slots, disks, pair, power })
    }
}

/// A machine that is ready to run.
pub(crate) struct Machine {
    // Fields are dropped in this order, so that no thread serves a function that is gone; the cable goes last.
    events: Subscribers,
    _doorbells: Option<Doorbells>,
    cpus: Vec<Vcpu>,
    io: Arc<IoManager>,
    parts: Parts,
    hello: Hello,
    /// Signalled when a processor has ended or the guest requests a reset.
    end: EventFd,
    ended: Arc<AtomicBool>,
    vm: Arc<Vm>,
    _cable: Cable,
}

/// Reason for the end of a machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ended {
    /// The guest has requested a reset.
    Reset,
    /// The guest has powered itself off.
    Off,
    /// It continues from a file or in another process.
    Left(Left),
}

/// Records an event of the machine, such as its end.
struct Happened(EventFd, Arc<AtomicBool>);

impl MutEventSubscriber for Happened {
    fn process(&mut self, _events: Events, _ops: &mut EventOps<'_>) {
        let _ = self.0.read();
        self.1.store(true, Ordering::Release);
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        if let Err(error) = ops.add(Events::new(&self.0, EventSet::IN)) {
            // Log: once in the life of a machine, and nothing of a guest is in it.
            log::error!("event of the machine: {error}");
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

/// Adds configuration space and the BARs of all slots.
fn add_bus(slots: &[Arc<Slot>], memory: u64, io: &mut IoManager) -> Result<Arc<PciBus>> {
    let bus = PciBus::new(slots.iter().cloned())?;
    let mut room = AddressAllocator::new(BARS, BARS_END - BARS)?;
    // Each BAR takes at least one page of its own.
    bus.place_bars(|size| {
        let size = size.max(4096);
        room.allocate(size, size, AllocPolicy::FirstMatch).map(|range| range.start()).ok()
    })?;
    io.register_pio(ConfigPorts::range(), Arc::new(ConfigPorts::new(Arc::clone(&bus))))?;
    let hole = memory::layout(memory).first().map_or(BARS, |(_, len)| *len);
    let bars = MmioRange::new(MmioAddress(hole), BARS_END - hole)?;
    io.register_mmio(bars, Arc::new(BarMap::new(Arc::clone(&bus))))?;
    Ok(bus)
}

/// Creates the processors. Without an entry point they get their features only.
fn make_cpus(vm: &Vm, cpus: u8, shape: &Shape, entry: Option<Entry>) -> Result<Vec<Vcpu>> {
    let cpus = (0..cpus).map(|number| {
        let cpu = vm.vcpu(number)?;
        match entry {
            Some(entry) => shape.apply(&cpu, number, entry)?,
            None => shape.apply_features(&cpu, number)?,
        }
        Ok(cpu)
    });
    cpus.collect()
}

impl Machine {
    /// Creates the machine with all its processors. It boots a kernel.
    pub(crate) fn new(kvm: &Kvm, options: &VmOptions, prepared: Prepared) -> Result<Self> {
        Self::with_state(kvm, options, prepared, Shape::new(kvm, options.cpus)?, None)
    }

    /// Creates the machine with processors of this shape, and in this state if there is one.
    pub(crate) fn with_state(
        kvm: &Kvm,
        options: &VmOptions,
        prepared: Prepared,
        shape: Shape,
        state: Option<&State>,
    ) -> Result<Self> {
        let Prepared { memory, entry, mut slots, disks, pair, power } = prepared;
        let Pair { slot: pair, nic, rdma, spaces, cable } = pair;
        let mtu = cable.mtu();
        let vm = Arc::new(make_vm(kvm, memory)?);
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
        let bus = add_bus(&slots, options.memory, &mut io)?;
        let saved = state.map(|state| &state.ports);
        let ports = add_ports(options, vm.fd(), &mut io, &mut events, saved)?;
        let AddedPorts { reset: end, console, second } = ports;
        let ended = Arc::new(AtomicBool::new(false));
        for event in [&end, power.event()] {
            events.add_subscriber(Box::new(Happened(event.try_clone()?, Arc::clone(&ended))));
        }
        let cpus = make_cpus(&vm, options.cpus, &shape, entry)?;
        let hello = host::hello(options, mtu, &shape, &disks);
        let parts = Parts { bus, slots, disks, nic, rdma, spaces, power, console, second };
        if let Some(state) = state {
            state.restore(&vm, &cpus, &parts)?;
        }
        let io = Arc::new(io);
        Ok(Self { events, _doorbells: doorbells, cpus, io, parts, hello, end, ended, vm, _cable: cable })
    }

    /// Lets a restored machine access its memory and the network.
    pub(crate) fn resume(&self) -> Result<()> {
        self.parts.resume()
    }

    /// Runs the machine until it is reset or powered off, or has left as requested.
    ///
    /// # Errors
    /// A processor cannot continue, or it is not known whether the machine runs at the destination of a migration.
    pub(crate) fn run(mut self, kvm: &Kvm, request: Option<&Request>) -> Result<Ended> {
        let mut departure = request.map(Departure::new).transpose()?;
        if let (Some(Request { event, .. }), Some(departure)) = (request, &departure) {
            for (event, flag) in [(event, &departure.requested), (&departure.end_of_copy, &departure.copied)] {
                self.events.add_subscriber(Box::new(Happened(event.try_clone()?, Arc::clone(flag))));
            }
        }
        loop {
            let result = self.run_processors(departure.as_mut());
            let ended = self.ended.load(Ordering::Acquire);
            if let (Ok(()), false, Some(departure)) = (&result, ended, &mut departure) {
                if let Some(left) = departure.leave(kvm, self.running(), &self.cpus)? {
                    return Ok(Ended::Left(left));
                }
                self.parts.resume_functions()?;
                continue;
            }
            // A copy that is in progress ends first.
            drop(departure);
            // After this reset no function accesses guest memory.
            self.parts.bus.reset();
            return result.map(|()| if self.parts.power.is_off() { Ended::Off } else { Ended::Reset });
        }
    }

    const fn running(&self) -> Running<'_> {
        Running { hello: &self.hello, vm: &self.vm, parts: &self.parts }
    }

    /// Runs the processors until the machine has ended or is to leave, and stops them.
    fn run_processors(&mut self, mut departure: Option<&mut Departure<'_>>) -> Result<()> {
        let stop = Arc::new(AtomicBool::new(false));
        let (results, ends) = mpsc::channel();
        let mut threads = Vec::new();
        for (number, mut cpu) in self.cpus.drain(..).enumerate() {
            let (io, stop, results) = (Arc::clone(&self.io), Arc::clone(&stop), results.clone());
            let end = self.end.try_clone()?;
            let run = move || {
                let result = cpu::run(&mut cpu, &io, &stop).with_context(|| format!("processor {number}"));
                // A processor that was stopped is not the end of the machine.
                let ended = result.is_err() || !stop.load(Ordering::Acquire);
                // Both calls fail only if the machine is gone.
                let _ = results.send(result);
                if ended {
                    let _ = end.write(1);
                }
                cpu
            };
            threads.push(Builder::new().name(format!("vcpu-{number}")).spawn(run).context("cannot start a thread")?);
        }
        drop(results);
        let mut leaves =
            |machine: &Self| departure.as_mut().is_some_and(|departure| departure.is_due(machine.running()));
        while !self.ended.load(Ordering::Acquire) && !leaves(self) {
            self.events.run().context("cannot wait for events")?;
        }
        stop.store(true, Ordering::Release);
        let result = stop_all(&threads, &ends);
        for thread in threads {
            self.cpus.push(thread.join().map_err(|_| anyhow::anyhow!("the thread of a processor has panicked"))?);
        }
        // A guest may have ended the machine while the processors stopped.
        while self.events.run_with_timeout(0).context("cannot wait for events")? > 0 {}
        result
    }
}

/// Waits for all processors to end, and signals those that are in guest mode to leave it.
fn stop_all(threads: &[JoinHandle<Vcpu>], ends: &mpsc::Receiver<Result<()>>) -> Result<()> {
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

/// Ports that were added, and the event of the reset line.
struct AddedPorts {
    reset: EventFd,
    console: Console,
    second: Option<SocketPort>,
}

/// Adds the serial ports, in their saved state if there is one, and the reset line.
fn add_ports(
    options: &VmOptions,
    vm: &Arc<VmFd>,
    io: &mut IoManager,
    events: &mut Subscribers,
    saved: Option<&Ports>,
) -> Result<AddedPorts> {
    let range = |port, size| PioRange::new(PioAddress(port), size).context("ports");
    let state = saved.and_then(|saved| saved.console.as_ref());
    let (console, event) = serial::console(options.console.as_deref(), state)?;
    io.register_pio(range(CONSOLE.0, 8)?, Arc::clone(&console) as Arc<Mutex<_>>)?;
    vm.register_irqfd(&event, CONSOLE.1).context("interrupt of the console")?;
    let mut second = None;
    if let Some(path) = &options.serial {
        let state = saved.and_then(|saved| saved.second.as_ref());
        let (port, event, input) = serial::connected(path, state)?;
        io.register_pio(range(SECOND_SERIAL.0, 8)?, Arc::clone(&port) as Arc<Mutex<_>>)?;
        vm.register_irqfd(&event, SECOND_SERIAL.1).context("interrupt of the serial port")?;
        events.add_subscriber(Box::new(input));
        second = Some(port);
    }
    let (reset, event) = ResetLine::new()?;
    io.register_pio(range(KEYBOARD, 5)?, Arc::new(Mutex::new(reset)))?;
    Ok(AddedPorts { reset: event, console, second })
}
