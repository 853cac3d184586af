//! KVM: interrupts by irqfd, doorbells by ioeventfd, doorbell pages in memory slots. For VMs with in-kernel interrupt
//! controllers.

mod pages;

use std::fmt;
use std::io;
use std::sync::Arc;

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE,
    KvmIrqRouting, kvm_irq_routing_entry, kvm_irq_routing_entry__bindgen_ty_1 as Target, kvm_irq_routing_irqchip,
    kvm_irq_routing_msi,
};
use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use parking_lot::Mutex;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::bells::DoorbellCatcher;
use crate::interrupts::{InterruptLine, Message};

pub use pages::KvmPages;

/// Pins of the I/O APIC, which precede the vectors in KVM's GSI numbers.
const PINS: u32 = 24;
/// Pins of the two 8259 controllers.
const OLD_PINS: u32 = 16;

/// All interrupts of a VM: its pins, and the vectors of its functions.
pub struct KvmInterrupts {
    vm: Arc<VmFd>,
    state: Mutex<Routes>,
}

struct Routes {
    entries: Vec<kvm_irq_routing_entry>,
    next: u32,
}

impl fmt::Debug for KvmInterrupts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvmInterrupts").field("lines", &(self.state.lock().next - PINS)).finish_non_exhaustive()
    }
}

fn pin(gsi: u32, irqchip: u32, pin: u32) -> kvm_irq_routing_entry {
    let target = Target { irqchip: kvm_irq_routing_irqchip { irqchip, pin } };
    kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_IRQCHIP, u: target, ..Default::default() }
}

fn message(gsi: u32, message: Message) -> kvm_irq_routing_entry {
    let [a, b, c, d, e, f, g, h] = message.address.to_le_bytes();
    let msi = kvm_irq_routing_msi {
        address_lo: u32::from_le_bytes([a, b, c, d]),
        address_hi: u32::from_le_bytes([e, f, g, h]),
        data: message.data,
        ..Default::default()
    };
    kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_MSI, u: Target { msi }, ..Default::default() }
}

impl KvmInterrupts {
    /// Creates the interrupts of a VM. Its pins keep KVM's default routes.
    ///
    /// # Errors
    /// KVM refuses: the VM has no interrupt controllers.
    pub fn new(vm: Arc<VmFd>) -> io::Result<Arc<Self>> {
        let old = |gsi| match gsi {
            0..8 => pin(gsi, KVM_IRQCHIP_PIC_MASTER, gsi),
            _ => pin(gsi, KVM_IRQCHIP_PIC_SLAVE, gsi - 8),
        };
        let entries = (0..OLD_PINS).map(old).chain((0..PINS).map(|gsi| pin(gsi, KVM_IRQCHIP_IOAPIC, gsi)));
        let routes = Routes { entries: entries.collect(), next: PINS };
        routes.set(&vm)?;
        Ok(Arc::new(Self { vm, state: Mutex::new(routes) }))
    }

    /// Creates a line for one more vector.
    ///
    /// # Errors
    /// There are no file descriptors left.
    pub fn line(self: &Arc<Self>) -> io::Result<KvmLine> {
        let event = EventFd::new(EFD_NONBLOCK)?;
        let mut state = self.state.lock();
        let gsi = state.next;
        state.next += 1;
        Ok(KvmLine { interrupts: Arc::clone(self), gsi, event, connected: Mutex::new(false) })
    }
}

impl Routes {
    fn set(&self, vm: &VmFd) -> io::Result<()> {
        let routing =
            KvmIrqRouting::from_entries(&self.entries).map_err(|error| io::Error::other(format!("{error:?}")))?;
        Ok(vm.set_gsi_routing(&routing)?)
    }
}

/// A vector as KVM sees it: a signal on its eventfd interrupts the guest.
pub struct KvmLine {
    interrupts: Arc<KvmInterrupts>,
    gsi: u32,
    event: EventFd,
    /// KVM listens to the eventfd.
    connected: Mutex<bool>,
}

impl fmt::Debug for KvmLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvmLine").field("gsi", &self.gsi).finish_non_exhaustive()
    }
}

impl InterruptLine for KvmLine {
    fn route(&self, to: Message) -> io::Result<()> {
        let KvmInterrupts { vm, state } = &*self.interrupts;
        let mut connected = self.connected.lock();
        {
            let mut state = state.lock();
            let entry = message(self.gsi, to);
            match state.entries.iter_mut().find(|entry| entry.gsi == self.gsi) {
                Some(old) => *old = entry,
                None => state.entries.push(entry),
            }
            state.set(vm)?;
        }
        if !*connected {
            vm.register_irqfd(&self.event, self.gsi)?;
            *connected = true;
        }
        Ok(())
    }

    fn trigger(&self) {
        // Fails only if KVM has not consumed 2^64 interrupts.
        let _ = self.event.write(1);
    }
}

impl DoorbellCatcher for VmFd {
    fn catch(&self, address: u64, value: Option<u32>, event: &EventFd) -> io::Result<()> {
        let address = IoEventAddress::Mmio(address);
        let caught = match value {
            Some(value) => self.register_ioevent(event, &address, value),
            None => self.register_ioevent(event, &address, NoDatamatch),
        };
        Ok(caught?)
    }

    fn release(&self, address: u64, value: Option<u32>, event: &EventFd) -> io::Result<()> {
        let address = IoEventAddress::Mmio(address);
        let released = match value {
            Some(value) => self.unregister_ioevent(event, &address, value),
            None => self.unregister_ioevent(event, &address, NoDatamatch),
        };
        Ok(released?)
    }
}
