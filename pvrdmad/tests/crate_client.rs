//! The server as Cloud Hypervisor uses it: with its client crate, its order of messages and its way to size BARs.

use std::os::fd::AsRawFd;

use crate::common::{Event, RAISE, Served, eventfd, memfd, take_signals};
use vfio_user::Client;

const CONFIG: u32 = 7;

fn config_word(client: &mut Client, offset: u64) -> u32 {
    let mut word = [0; 4];
    client.region_read(CONFIG, offset, &mut word).unwrap();
    u32::from_le_bytes(word)
}

#[test]
fn a_virtual_machine_starts_and_ends() {
    let served = Served::new();
    let mut client = Client::new(&served.path).unwrap();
    let sizes: Vec<_> = (0..9).map(|index| client.region(index).unwrap().size).collect();
    assert_eq!(sizes, [0x4000, 0x1000, 0x10_0000, 0, 0, 0, 0, 256, 0]);
    assert!(client.region(CONFIG).unwrap().sparse_areas.is_empty());

    // The capability walk ends, and at MSI-X.
    let mut next = config_word(&mut client, 0x34) & 0xff;
    let mut found = Vec::new();
    while next != 0 {
        assert!(found.len() < 48, "the list does not end");
        let capability = config_word(&mut client, u64::from(next));
        found.push(capability & 0xff);
        next = capability >> 8 & 0xff;
    }
    assert_eq!(found, [0x11]);
    let irq = client.get_irq_info(2).unwrap();
    assert_eq!((irq.index, irq.flags, irq.count), (2, 1, 3));
    // No legacy interrupt.
    assert_eq!(client.get_irq_info(0).unwrap().count, 0);

    let ram = memfd("cloud", 2 << 20);
    client.dma_map(0, 0, 1 << 20, ram.as_raw_fd()).unwrap();
    client.dma_map(1 << 20, 0x1_0000_0000, 1 << 20, ram.as_raw_fd()).unwrap();
    assert_eq!(served.memory.mapped_bytes(), 2 << 20);

    // BARs are sized by writing all ones, including absent BARs and the ROM.
    let sized: Vec<u32> = [0x10, 0x14, 0x18, 0x1c, 0x20, 0x24, 0x30]
        .iter()
        .map(|&bar| {
            client.region_write(CONFIG, bar, &[0xff; 4]).unwrap();
            let mask = config_word(&mut client, bar) & !0xf;
            client.region_write(CONFIG, bar, &[0; 4]).unwrap();
            mask.wrapping_neg()
        })
        .collect();
    assert_eq!(sized, [0x4000, 0x1000, 0x10_0000, 0, 0, 0, 0]);

    // All vectors are set in one message, before the guest enables them.
    let fds = [eventfd(), eventfd(), eventfd()];
    client.set_irqs(2, 4 | 32, 0, 3, &fds.each_ref().map(AsRawFd::as_raw_fd)).unwrap();
    client.region_write(CONFIG, 0x42, &[2, 0x80]).unwrap();
    client.region_write(1, RAISE, &[1, 0, 0, 0]).unwrap();
    assert_eq!(fds.each_ref().map(take_signals), [0, 1, 0]);
    let mut data = [0; 8];
    client.region_write(1, 0x10, &[9; 8]).unwrap();
    client.region_read(1, 0x10, &mut data).unwrap();
    assert_eq!(data, [9; 8]);

    client.reset().unwrap();
    client.dma_unmap(0, 1 << 20).unwrap();
    assert_eq!(served.memory.mapped_bytes(), 1 << 20);
    client.set_irqs(2, 1 | 32, 0, 0, &[]).unwrap();
    assert_eq!(served.stats.counters.client_messages_refused.get(), 0);
    served.function.wait_reset();

    // A reboot is a new connection. Closing the descriptor does not suffice: a child that another test is starting has
    // a copy of it until it executes its program, and the device would stay occupied until then.
    client.shutdown().unwrap();
    let _client = Client::new(&served.path).unwrap();
    served.function.wait(|events| events.contains(&Event::Reset));
    assert_eq!(served.memory.mapped_bytes(), 0);
}
