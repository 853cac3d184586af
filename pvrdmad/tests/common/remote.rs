//! A function behind a vfio-user socket as the in-process driver sees it.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex};

use pvrdma_dev::testing::{Driver, GuestMemory, Irqs, MEMORY_BASE};
use pvrdma_dev::{Bar, InterruptSink, PciFunction};
use rustix::event::{PollFd, PollFlags};
use vfio_user::Client;

use super::{eventfd, memfd, take_signals};

const CONFIG: u32 = 7;
/// VFIO_PCI_MSIX_IRQ_INDEX.
const MSIX: u32 = 2;
/// VFIO_IRQ_SET_DATA_EVENTFD and VFIO_IRQ_SET_ACTION_TRIGGER.
const TRIGGER_EVENTFD: u32 = 4 | 32;

/// Accesses become messages.
struct RemoteFunction(Mutex<Client>);

impl RemoteFunction {
    fn read(&self, region: u32, offset: u64, data: &mut [u8]) {
        self.0.lock().unwrap().region_read(region, offset, data).unwrap();
    }

    fn write(&self, region: u32, offset: u64, data: &[u8]) {
        self.0.lock().unwrap().region_write(region, offset, data).unwrap();
    }
}

impl PciFunction for RemoteFunction {
    fn bars(&self) -> [Option<Bar>; 6] {
        [None; 6]
    }

    fn config_size(&self) -> usize {
        256
    }

    fn config_read(&self, offset: usize, data: &mut [u8]) {
        self.read(CONFIG, offset as u64, data);
    }

    fn config_write(&self, offset: usize, data: &[u8]) {
        self.write(CONFIG, offset as u64, data);
    }

    fn bar_read(&self, bar: usize, offset: u64, data: &mut [u8]) {
        self.read(u32::try_from(bar).unwrap(), offset, data);
    }

    fn bar_write(&self, bar: usize, offset: u64, data: &[u8]) {
        self.write(u32::try_from(bar).unwrap(), offset, data);
    }

    fn run_deferred(&self) {}

    fn msix_vectors(&self) -> u16 {
        3
    }

    fn reset(&self) {
        self.0.lock().unwrap().reset().unwrap();
    }
}

/// Connects to a device, gives it memory, and binds the driver to it.
pub fn probe(socket: &Path, octets: u64) -> Driver {
    let file = memfd("guest", octets);
    let mut client = Client::new(socket).unwrap();
    client.dma_map(0, MEMORY_BASE, octets, file.as_raw_fd()).unwrap();
    let irqs = Irqs::new();
    forward(&mut client, &irqs);
    let memory = GuestMemory::in_file(file);
    Driver::probe(Arc::new(RemoteFunction(Mutex::new(client))), &memory, &irqs).unwrap()
}

/// Has a thread give the device's interrupts to `irqs`. It ends with the process.
fn forward(client: &mut Client, irqs: &Arc<Irqs>) {
    let events: [OwnedFd; 3] = std::array::from_fn(|_| eventfd());
    client.set_irqs(MSIX, TRIGGER_EVENTFD, 0, 3, &events.each_ref().map(AsRawFd::as_raw_fd)).unwrap();
    let irqs = Arc::clone(irqs);
    std::thread::spawn(move || {
        loop {
            let mut ready = events.each_ref().map(|event| PollFd::new(event, PollFlags::IN));
            rustix::event::poll(&mut ready, None).unwrap();
            for (vector, event) in (0..).zip(&events) {
                (0..take_signals(event)).for_each(|_| irqs.msix(vector));
            }
        }
    });
}
