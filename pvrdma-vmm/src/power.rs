//! Power-off for guests without ACPI: the pvpanic device, which Linux supports as `pvpanic-pci` (its interface is
//! described in QEMU's `docs/specs/pvpanic.rst`).

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use parking_lot::Mutex;
use pvrdma_pci_function::{Bar, CONFIG_SIZE, ConfigLayout, ConfigSpace, Deferred, Identity, MsixPlace, PciFunction};
use pvrdma_pci_slot::Slot;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Red Hat; pvpanic; a system peripheral of no special kind.
const IDENTITY: Identity = Identity { vendor: 0x1b36, device: 0x0011, revision: 1, class: [0, 0x80, 8] };
/// Size of the BAR. The only register is one byte, but the BAR takes a whole page so that nothing else shares it.
const BAR_SIZE: u64 = 0x1000;

// Bits of the register. A read returns the supported events; a write reports an event.
const PANICKED: u8 = 1 << 0;
const SHUTDOWN: u8 = 1 << 2;

/// Events that a guest has reported about itself.
#[derive(Debug)]
pub(crate) struct Power {
    name: String,
    panicked: AtomicBool,
    off: AtomicBool,
    event: EventFd,
}

impl Power {
    /// Creates the state of a running machine. `name` is the name of the VM.
    pub(crate) fn new(name: &str) -> io::Result<Arc<Self>> {
        let (panicked, off) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Arc::new(Self { name: name.to_owned(), panicked, off, event: EventFd::new(EFD_NONBLOCK)? }))
    }

    /// Returns a slot with the device.
    pub(crate) fn slot(self: &Arc<Self>, number: u8) -> Result<Arc<Slot>> {
        let function = PowerFunction::new(Arc::clone(self));
        Ok(Slot::builder(number).with(0, Arc::new(function)).build()?)
    }

    /// Returns `true` if the guest has powered itself off.
    pub(crate) fn is_off(&self) -> bool {
        self.off.load(Ordering::Acquire)
    }

    /// Returns `true` if the guest has reported a panic.
    pub(crate) fn has_panicked(&self) -> bool {
        self.panicked.load(Ordering::Relaxed)
    }

    /// Restores the report of a panic.
    pub(crate) fn set_panicked(&self, panicked: bool) {
        self.panicked.store(panicked, Ordering::Relaxed);
    }

    /// Event that is signalled when the guest powers itself off.
    pub(crate) const fn event(&self) -> &EventFd {
        &self.event
    }

    fn say(&self, what: u8) {
        if what & PANICKED != 0 && !self.panicked.swap(true, Ordering::Relaxed) {
            println!("{}: the kernel has panicked", self.name);
        }
        if what & SHUTDOWN != 0 {
            self.off.store(true, Ordering::Release);
            // The write fails only if the event was signalled 2^64 times without a read.
            let _ = self.event.write(1);
        }
    }
}

/// PCI function of the device.
struct PowerFunction {
    power: Arc<Power>,
    config: Mutex<ConfigSpace>,
}

impl PowerFunction {
    fn new(power: Arc<Power>) -> Self {
        let config = ConfigSpace::new(&ConfigLayout {
            identity: IDENTITY,
            bars: [Some(Bar { size: BAR_SIZE, is_64bit: false }), None, None, None, None, None],
            msix: None,
            interrupt_pin: false,
            multifunction: false,
        });
        Self { power, config: Mutex::new(config) }
    }
}

impl PciFunction for PowerFunction {
    fn bars(&self) -> [Option<Bar>; 6] {
        self.config.lock().bars()
    }

    fn config_size(&self) -> usize {
        CONFIG_SIZE
    }

    fn config_read(&self, offset: usize, data: &mut [u8]) {
        self.config.lock().read(offset, data, false);
    }

    fn config_write(&self, offset: usize, data: &[u8]) {
        self.config.lock().write(offset, data);
    }

    fn bar_read(&self, _bar: usize, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let (0, Some(byte)) = (offset, data.first_mut()) {
            *byte = PANICKED | SHUTDOWN;
        }
    }

    fn bar_write(&self, _bar: usize, offset: u64, data: &[u8]) -> Deferred {
        if let (0, Some(byte)) = (offset, data.first()) {
            self.power.say(*byte);
        }
        Deferred::Nothing
    }

    fn run_deferred(&self) {}

    fn msix(&self) -> Option<MsixPlace> {
        None
    }

    fn reset(&self) {
        self.config.lock().reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Powers off like Linux's driver, which reads the supported events and then writes one.
    #[test]
    fn a_guest_powers_itself_off() {
        let power = Power::new("a").unwrap();
        let slot = power.slot(3).unwrap();
        let mut id = [0; 4];
        slot.config_read(0, 0, &mut id);
        assert_eq!(u32::from_le_bytes(id), 0x0011_1b36);

        let function = PowerFunction::new(Arc::clone(&power));
        let mut can = [0];
        function.bar_read(0, 0, &mut can);
        assert_eq!(can[0], PANICKED | SHUTDOWN);
        for (offset, what) in [(0, PANICKED), (0, 0), (1, SHUTDOWN)] {
            assert_eq!(function.bar_write(0, offset, &[what]), Deferred::Nothing);
            assert!(!power.is_off() && power.event().read().is_err(), "{what} at {offset}");
        }
        assert_eq!(function.bar_write(0, 0, &[SHUTDOWN]), Deferred::Nothing);
        assert!(power.is_off());
        assert_eq!(power.event().read().unwrap(), 1);
    }
}
