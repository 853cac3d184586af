//! The two functions in one slot, accessed by their drivers only through ports and memory.
#![expect(clippy::unwrap_used, reason = "a panic fails the test")]

mod common;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{BehindSlot, Line, Machine, SLOT};
use event_manager::{EventManager, SubscriberOps};
use parking_lot::Mutex;
use pvrdma_dev::testing::{Driver, GuestMemory, Irqs, QpInit, TestDevice, access};
use pvrdma_pci_function::DoorbellWindow;
use pvrdma_pci_slot::{DeferredWork, DoorbellCatcher, Ecam, HostBridge, PageMapper, PciBus, Slot, SlotError};
use pvrdma_rxe::{Rxe, RxeConfig};
use pvrdma_verbs::testing::LogLines;
use pvrdma_vmxnet3::testing::frames::Flow;
use pvrdma_vmxnet3::testing::{DriverConfig, Guest, RecordingPort, TxPacket};
use vm_device::DeviceMmio;
use vm_device::bus::MmioAddress;
use vmm_sys_util::eventfd::EventFd;

const NET: usize = 0;
const RDMA: usize = 1;

/// The parts of a test's machine.
struct Pair {
    machine: Machine,
    bus: Arc<PciBus>,
    slot: Arc<Slot>,
    net: Guest,
    port: Arc<RecordingPort>,
    memory: Arc<GuestMemory>,
    irqs: Arc<Irqs>,
}

/// Interrupts of the network function arrive at `net.irqs` through the function itself; those of the RDMA device go
/// through the slot.
fn pair() -> Pair {
    let backend = Rxe::new(RxeConfig::default()).unwrap();
    let (net, port) = Guest::recording();
    let (memory, irqs) = (GuestMemory::new(64 << 20), Irqs::new());
    let builder = Slot::builder(SLOT);
    let (config, station) = (TestDevice::<Rxe>::config(1), backend.station(TestDevice::<Rxe>::mac(1)));
    let rdma =
        pvrdma_dev::PvrdmaDevice::new(config, Arc::clone(memory.space()), builder.interrupts(RDMA), &station).unwrap();
    let slot = builder.with(NET, net.device.clone()).with(RDMA, rdma).build().unwrap();
    slot.connect(|| Ok(Line::to(&irqs))).unwrap();
    let bus = PciBus::new([HostBridge::slot().unwrap(), Arc::clone(&slot)]).unwrap();
    Pair { machine: Machine::new(&bus), bus, slot, net, port, memory, irqs }
}

/// Places all BARs from here on.
fn place(bus: &PciBus) {
    let mut next = 0xc000_0000_u64;
    bus.place_bars(|size| {
        let address = next.next_multiple_of(size);
        next = address + size;
        Some(address)
    })
    .unwrap();
}

/// Enables memory accesses and bus mastering of a function.
fn enable(machine: &Machine, function: usize) {
    machine.config_write(SLOT, function, 4, &[6, 0]);
}

/// Unmasks vectors of the RDMA function, with their numbers as data.
fn unmask(machine: &Machine, count: u32) {
    let table = machine.bar(SLOT, RDMA, 0);
    for vector in 0..count {
        let entry = table + u64::from(vector) * 16;
        for (offset, value) in [(0, 0xfee0_0000), (4, 0), (8, vector), (12, 0)] {
            machine.write(entry + offset, value);
        }
    }
}

/// Linux's test for these ports, and the functions that it then finds.
#[test]
fn a_guest_finds_the_functions() {
    let Pair { machine, .. } = pair();
    machine.port_write(0xcfb, &[1]);
    machine.port_write(0xcf8, &0x8000_0000_u32.to_le_bytes());
    let mut address = [0; 4];
    machine.port_read(0xcf8, &mut address);
    assert_eq!(u32::from_le_bytes(address), 0x8000_0000);

    let found: Vec<_> = (0..32)
        .flat_map(|slot| (0..8).map(move |function| (slot, function)))
        .filter(|(slot, function)| machine.config(*slot, *function, 0) != u32::MAX)
        .collect();
    assert_eq!(found, [(0, 0), (SLOT, NET), (SLOT, RDMA)]);
    assert_eq!(machine.config(0, 0, 8) >> 16, 0x0600, "a host bridge");
    let header = |slot, function| machine.config(slot, function, 0x0c) >> 16 & 0xff;
    assert_eq!([header(0, 0), header(SLOT, NET), header(SLOT, RDMA)], [0, 0x80, 0]);
    assert_eq!([machine.config(SLOT, NET, 0), machine.config(SLOT, RDMA, 0)], [0x07b0_15ad, 0x0820_15ad]);
    // The header type in each width that reaches it.
    for (offset, len) in [(0x0e, 1), (0x0e, 2), (0x0c, 4)] {
        let mut data = [0; 4];
        machine.port_write(0xcf8, &(0x8000_000c | u32::from(SLOT) << 11).to_le_bytes());
        machine.port_read(0xcfc + (offset & 3), &mut data[..len]);
        assert_eq!(data[usize::from(0x0e - offset)], 0x80, "{offset:#x} {len}");
    }
    // The mechanism is disabled, or the access crosses the end of a register.
    for (select, port, len) in [(0, 0xcfc, 4), (0x8000_0000_u32, 0xcfe, 4), (0x8000_0000, 0xcff, 2)] {
        machine.port_write(0xcf8, &select.to_le_bytes());
        let mut data = vec![0; len];
        machine.port_read(port, &mut data);
        assert!(data.iter().all(|byte| *byte == 0xff), "{select:#x} {port:#x} {len}");
        machine.port_write(port, &data);
    }
    // Another bus has no functions.
    machine.port_write(0xcf8, &0x8001_0000_u32.to_le_bytes());
    machine.port_read(0xcfc, &mut address);
    assert_eq!(address, [0xff; 4]);
}

/// Both mechanisms show the same configuration space, and zeros beyond it.
#[test]
fn memory_mapped_configuration_space_is_the_same() {
    let Pair { machine, bus, .. } = pair();
    place(&bus);
    let ecam = Ecam::new(bus);
    let read = |address: u64, len: usize| {
        let mut data = vec![0; len];
        ecam.mmio_read(MmioAddress(0xe000_0000), address, &mut data);
        data
    };
    for function in [NET, RDMA] {
        let base = u64::from(SLOT) << 15 | (function as u64) << 12;
        for register in (0..256_usize).step_by(4) {
            assert_eq!(read(base + register as u64, 4), machine.config(SLOT, function, register).to_le_bytes());
        }
        assert_eq!(read(base + 0x100, 4), [0; 4]);
        ecam.mmio_write(MmioAddress(0xe000_0000), base + 0x3c, &[7]);
        assert_eq!(machine.config(SLOT, function, 0x3c) & 0xff, 7);
        assert_eq!(read(base + 0xffe, 4), [0xff; 4], "from one function to the next");
    }
    for (address, len) in [(2 << 12, 4), (Ecam::SIZE - 4, 4), (Ecam::SIZE, 4), (u64::MAX - 1, 4)] {
        assert_eq!(read(address, len), [0xff; 4], "{address:#x}");
        ecam.mmio_write(MmioAddress(0xe000_0000), address, &[0; 4]);
    }
}

#[test]
fn bars_answer_where_they_are_and_when_they_may() {
    let Pair { machine, bus, .. } = pair();
    place(&bus);
    let revisions = machine.bar(SLOT, NET, 1);
    let version = machine.bar(SLOT, RDMA, 1);
    assert_eq!(machine.read(revisions), u32::MAX, "memory space is not enabled");
    enable(&machine, NET);
    assert_eq!((machine.read(revisions), machine.read(version)), (7, u32::MAX));
    enable(&machine, RDMA);
    assert_eq!((machine.read(revisions), machine.read(version)), (7, 20));

    // The guest moves the BAR, also above 4 GiB.
    machine.config_write(SLOT, NET, 0x14, &0xd123_4000_u32.to_le_bytes());
    assert_eq!((machine.read(revisions), machine.read(0xd123_4000)), (u32::MAX, 7));
    let doorbells = machine.bar(SLOT, RDMA, 2);
    machine.config_write(SLOT, RDMA, 0x1c, &[1, 0, 0, 0]);
    assert_eq!((machine.read(doorbells), machine.read(doorbells + (1 << 32))), (u32::MAX, 0));

    // An access beyond the end of the BAR.
    let mut data = [0; 8];
    machine.read_bytes(0xd123_4ffc, &mut data);
    assert_eq!(data, [0xff; 8]);
    machine.read_bytes(u64::MAX - 3, &mut data);
    assert_eq!(data, [0xff; 8]);
    machine.write_bytes(u64::MAX - 3, &data);

    // A BAR at address 0, where memory is, does not respond.
    machine.config_write(SLOT, NET, 0x14, &[0; 4]);
    assert_eq!(machine.read(0), u32::MAX);
    machine.config_write(SLOT, RDMA, 4, &[0, 0]);
    assert_eq!(machine.read(version), u32::MAX);
}

/// The driver finds, sizes and places the BARs, and gets the interrupts of its commands.
#[test]
fn an_rdma_driver_works_through_the_slot() {
    let Pair { machine, bus, memory, irqs, .. } = pair();
    place(&bus);
    let function = Arc::new(BehindSlot { machine: machine.clone(), function: RDMA });
    enable(&machine, RDMA);
    // The driver places BAR 0 itself, not at the address of the table.
    let driver = {
        let behind = Arc::clone(&function);
        // As the kernel does, the driver writes the MSI-X table before it enables MSI-X.
        machine.config_write(SLOT, RDMA, 0x10, &0xfebd_0000_u32.to_le_bytes());
        unmask(&machine, 3);
        Driver::probe(behind, &memory, &irqs).unwrap()
    };
    driver.query_port().unwrap();
    assert!(irqs.count(0) > 0, "responses are interrupts");
    let context = driver.open().unwrap();
    let pd = driver.create_pd(Some(&context)).unwrap();
    let (buffer, mr) = driver.registered_buffer(&pd, 8192, access::ALL).unwrap();
    let cq = driver.create_cq(Some(&context), 16).unwrap();
    let qp = driver.create_qp(&QpInit::rc(&pd, &cq)).unwrap();
    qp.destroy().unwrap();
    cq.destroy().unwrap();
    mr.destroy().unwrap();
    buffer.free();
    let before = irqs.count(0);
    driver.remove();
    assert!(irqs.count(0) >= before);
    bus.reset();
    assert_eq!(machine.config(SLOT, RDMA, 4) & 7, 0);
    assert_eq!(machine.read(0xfebe_0000), u32::MAX, "no BAR answers after a reset");
}

/// The intercepted doorbells: address and event.
#[derive(Default)]
struct Recording(Mutex<Vec<(u64, EventFd)>>);

impl DoorbellCatcher for Recording {
    fn catch(&self, address: u64, value: Option<u32>, event: &EventFd) -> io::Result<()> {
        assert_eq!(value, None);
        self.0.lock().push((address, event.try_clone()?));
        Ok(())
    }

    fn release(&self, address: u64, _value: Option<u32>, _event: &EventFd) -> io::Result<()> {
        let mut caught = self.0.lock();
        let index = caught.iter().position(|(caught, _)| *caught == address);
        caught.swap_remove(index.unwrap());
        Ok(())
    }
}

impl Recording {
    fn addresses(&self) -> Vec<u64> {
        let mut list: Vec<_> = self.0.lock().iter().map(|(address, _)| *address).collect();
        list.sort_unstable();
        list
    }

    fn ring(&self, address: u64) {
        self.0.lock().iter().find(|(caught, _)| *caught == address).unwrap().1.write(1).unwrap();
    }
}

/// Doorbells are intercepted at the BAR's address, and a subscriber does their work.
#[test]
fn doorbells_are_caught_and_served() {
    let Pair { machine, bus, slot, net, port, .. } = pair();
    place(&bus);
    let catcher = Arc::new(Recording::default());
    let mut events: EventManager<DeferredWork> = EventManager::new().unwrap();
    let id = events.add_subscriber(slot.deferred(Some(catcher.clone())).unwrap());
    assert!(catcher.addresses().is_empty(), "nothing answers yet");
    let mut driver = pvrdma_vmxnet3::testing::Driver::up(&net, DriverConfig::default());
    enable(&machine, NET);
    let base = machine.bar(SLOT, NET, 0);
    let expected = |base: u64| -> Vec<_> {
        [0x600, 0x800, 0xa00].into_iter().flat_map(|at| (0..8).map(move |queue| base + at + queue * 8)).collect()
    };
    assert_eq!(catcher.addresses(), expected(base));

    let packet = TxPacket::plain(&Flow::TO_PEER.udp(&[7; 100]));
    driver.tx[0].post(&net.memory, &packet);
    assert!(port.take().is_empty(), "no doorbell was written");
    catcher.ring(base + 0x600);
    assert_eq!(events.run_with_timeout(10_000), Ok(1));
    assert_eq!(port.take().len(), 1);
    assert_eq!(driver.reap(0), 1);

    // A write that stops the processor returns at once, and the subscriber does the work.
    driver.tx[0].post(&net.memory, &packet);
    machine.write(base + 0x600, 2);
    machine.write(base + 0x600, 2);
    assert!(port.take().is_empty());
    assert_eq!(events.run_with_timeout(10_000), Ok(1));
    assert_eq!(port.take().len(), 1);

    machine.config_write(SLOT, NET, 0x10, &0xd000_0000_u32.to_le_bytes());
    assert_eq!(catcher.addresses(), expected(0xd000_0000));
    bus.reset();
    assert!(catcher.addresses().is_empty(), "no BAR answers after a reset");

    enable(&machine, NET);
    machine.config_write(SLOT, NET, 0x10, &0xd000_0000_u32.to_le_bytes());
    assert_eq!(catcher.addresses().len(), 24);
    drop(events.remove_subscriber(id).unwrap());
    assert!(catcher.addresses().is_empty(), "without a subscriber nothing is signalled");
}

/// Without a subscriber, the writing thread does the work.
#[test]
fn a_write_does_the_work_itself_without_a_subscriber() {
    let Pair { machine, bus, slot, net, port, .. } = pair();
    place(&bus);
    let mut driver = pvrdma_vmxnet3::testing::Driver::up(&net, DriverConfig::default());
    enable(&machine, NET);
    let doorbell = machine.bar(SLOT, NET, 0) + 0x600;
    let packet = TxPacket::plain(&Flow::TO_PEER.udp(&[7; 100]));
    driver.tx[0].post(&net.memory, &packet);
    machine.write(doorbell, 1);
    assert_eq!(port.take().len(), 1);
    // A subscriber that leaves has done all its work.
    let work = slot.deferred(None).unwrap();
    driver.tx[0].post(&net.memory, &packet);
    machine.write(doorbell, 2);
    assert!(port.take().is_empty());
    drop(work);
    assert_eq!(port.take().len(), 1);
    drop(driver);
}

/// With a subscriber for doorbells only: the subscriber handles intercepted doorbells, and any other write does its
/// work itself.
#[test]
fn a_write_does_the_work_itself_beside_caught_doorbells() {
    let Pair { machine, bus, slot, net, port, .. } = pair();
    place(&bus);
    let catcher = Arc::new(Recording::default());
    let mut events: EventManager<DeferredWork> = EventManager::new().unwrap();
    let id = events.add_subscriber(slot.doorbells(catcher.clone()).unwrap());
    let mut driver = pvrdma_vmxnet3::testing::Driver::up(&net, DriverConfig::default());
    enable(&machine, NET);
    let doorbell = machine.bar(SLOT, NET, 0) + 0x600;
    let packet = TxPacket::plain(&Flow::TO_PEER.udp(&[7; 100]));
    driver.tx[0].post(&net.memory, &packet);
    catcher.ring(doorbell);
    assert!(port.take().is_empty(), "the subscriber has not run");
    assert_eq!(events.run_with_timeout(10_000), Ok(1));
    assert_eq!((port.take().len(), driver.reap(0)), (1, 1));

    driver.tx[0].post(&net.memory, &packet);
    machine.write(doorbell, 2);
    assert_eq!(port.take().len(), 1, "done by the writing thread");
    assert_eq!(events.run_with_timeout(0), Ok(0), "and nothing is left");
    drop(events.remove_subscriber(id).unwrap());
    assert!(catcher.addresses().is_empty());
}

/// An intercepted doorbell that a leaving subscriber has not read is not lost.
#[test]
fn a_leaving_subscriber_rings_intercepted_doorbells() {
    let Pair { machine, bus, slot, net, port, .. } = pair();
    place(&bus);
    let mut driver = pvrdma_vmxnet3::testing::Driver::up(&net, DriverConfig::default());
    enable(&machine, NET);
    let doorbell = machine.bar(SLOT, NET, 0) + 0x600;
    let packet = TxPacket::plain(&Flow::TO_PEER.udp(&[7; 100]));
    for all in [true, false] {
        let catcher = Arc::new(Recording::default());
        let work = if all { slot.deferred(Some(catcher.clone())) } else { slot.doorbells(catcher.clone()) }.unwrap();
        driver.tx[0].post(&net.memory, &packet);
        catcher.ring(doorbell);
        assert!(port.take().is_empty(), "no thread has read it");
        drop(work);
        assert!(catcher.addresses().is_empty());
        assert_eq!((port.take().len(), driver.reap(0)), (1, 1));
    }
}

#[test]
fn slots_that_cannot_be() {
    let bridge = || HostBridge::slot().unwrap();
    assert!(matches!(PciBus::new([bridge(), bridge()]), Err(SlotError::Taken(0))));
    assert!(matches!(Slot::builder(1).build(), Err(SlotError::NoFunction(1))));
    let (net, _) = Guest::recording();
    let with = |slot: u8, function| Slot::builder(slot).with(function, net.device.clone()).build();
    assert!(matches!(with(32, 0), Err(SlotError::Slot(32))));
    assert!(matches!(with(3, 8), Err(SlotError::Function(8))));
    assert!(matches!(with(3, 1), Err(SlotError::NoFunction(3))));
    let bus = PciBus::new([with(3, 0).unwrap()]).unwrap();
    assert!(matches!(bus.place_bars(|_| None), Err(SlotError::NoRoom(0x1000))));
    assert!(matches!(bus.place_bars(|_| Some(1 << 32)), Err(SlotError::NoRoom(_))), "a BAR of 32 bits");
}

/// Places of doorbell pages in the guest's memory, and a record of the requests.
#[derive(Default)]
struct Places {
    at: Mutex<BTreeMap<u32, u64>>,
    refuses: AtomicBool,
}

impl PageMapper for Places {
    fn map(&self, page: u32, address: u64) -> io::Result<()> {
        self.refuse()?;
        assert_eq!(self.at.lock().insert(page, address), None, "the page is mapped already");
        Ok(())
    }

    fn unmap(&self, page: u32) -> io::Result<()> {
        self.refuse()?;
        assert!(self.at.lock().remove(&page).is_some(), "the page is not mapped");
        Ok(())
    }
}

impl Places {
    fn refuse(&self) -> io::Result<()> {
        if self.refuses.load(Ordering::SeqCst) { Err(io::Error::other("as the test wants")) } else { Ok(()) }
    }

    fn all(&self) -> Vec<(u32, u64)> {
        self.at.lock().iter().map(|(page, address)| (*page, *address)).collect()
    }
}

/// Doorbell pages are mapped at their BAR, and unmapped when it moves, is disabled or disappears.
#[test]
fn doorbell_pages_follow_their_bar() {
    let Pair { machine, bus, slot, .. } = pair();
    place(&bus);
    let places = Arc::new(Places::default());
    assert!(slot.doorbell_window(NET, places.clone()).is_none(), "a card has none");
    assert!(slot.doorbell_window(5, places.clone()).is_none(), "no device is there");
    let window = slot.doorbell_window(RDMA, places.clone()).unwrap();
    assert!(slot.doorbell_window(RDMA, places.clone()).is_none(), "they have been taken");
    assert!(window.map(1).is_err(), "no BAR answers yet");
    enable(&machine, RDMA);
    let base = machine.bar(SLOT, RDMA, 2);
    for page in [1, 7, 1023, 7] {
        window.map(page).unwrap();
    }
    assert_eq!(places.all(), [(1, base + 0x1000), (7, base + 0x7000), (1023, base + 0x3f_f000)]);
    for page in [0, 1024, u32::MAX] {
        assert!(window.map(page).is_err(), "page {page} is the kernel's or does not exist");
        window.unmap(page).unwrap();
    }
    window.unmap(7).unwrap();
    window.unmap(7).unwrap();
    assert_eq!(places.all().len(), 2);

    // A write to another register, or of the same address again, changes nothing.
    machine.config_write(SLOT, RDMA, 0x14, &0xd123_4000_u32.to_le_bytes());
    machine.config_write(SLOT, RDMA, 0x18, &(u32::try_from(base).unwrap() | 4).to_le_bytes());
    assert_eq!(places.all().len(), 2);
    machine.config_write(SLOT, RDMA, 0x1c, &[1, 0, 0, 0]);
    assert!(places.all().is_empty(), "the page is unmapped from its old address before the processor continues");
    window.map(1).unwrap();
    assert_eq!(places.all(), [(1, base + (1 << 32) + 0x1000)]);
    machine.config_write(SLOT, RDMA, 4, &[4, 0]);
    assert!(places.all().is_empty() && window.map(1).is_err(), "memory space is disabled");
    enable(&machine, RDMA);
    window.map(1).unwrap();
    bus.reset();
    assert!(places.all().is_empty(), "no BAR answers after a reset");

    // A page that could not be unmapped is unmapped as soon as that is possible.
    machine.config_write(SLOT, RDMA, 0x18, &0xd000_0000_u32.to_le_bytes());
    enable(&machine, RDMA);
    window.map(3).unwrap();
    places.refuses.store(true, Ordering::SeqCst);
    let log = LogLines::watch();
    bus.reset();
    // The guest can repeat this any number of times, and the log reports it once.
    for _ in 0..100 {
        enable(&machine, RDMA);
        bus.reset();
    }
    let said = log.with("doorbell page 3 stays where its BAR was: as the test wants");
    assert_eq!(said.len(), 1);
    assert!(window.unmap(3).is_err() && places.all().len() == 1);
    window.map(3).unwrap();
    places.refuses.store(false, Ordering::SeqCst);
    window.unmap(3).unwrap();
    assert!(places.all().is_empty());
    machine.config_write(SLOT, RDMA, 0x18, &0xd000_0000_u32.to_le_bytes());
    enable(&machine, RDMA);
    window.map(3).unwrap();
    drop((window, machine, bus, slot));
    assert!(places.all().is_empty(), "no page stays mapped after the end of the machine");
}
