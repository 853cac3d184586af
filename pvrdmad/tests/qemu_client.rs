//! The server as QEMU uses it, byte by byte.

use std::fs;
use std::io::{Read, Write};
use std::time::Duration;

use crate::common::{Event, Raw, Served, access, map_body, memfd, region_info_body, unmap_body, words, write_body};
use pvrdma_verbs::testing::skipped;
use pvrdma_vfio_user_server::message::{Command, Header};
use std::os::fd::{AsFd, AsRawFd};

const RW: u32 = 3;
const RO: u32 = 1;

#[test]
fn the_start_in_qemus_order() {
    let served = Served::new();
    let mut client = served.connect();
    let reply = client.negotiate();
    assert_eq!(reply, b"\0\0\0\0{\"capabilities\":{\"max_msg_fds\":16,\"max_data_xfer_size\":1048576}}\0");

    // QEMU maps memory before its first request, and the ROM without a file.
    let ram = memfd("ram", 64 << 20);
    client.map(0, 0xc_0000, 0, RW, Some(&ram)).ok();
    client.map(0xc_0000, 0x4_0000, 0xc_0000, RO, Some(&ram)).ok();
    client.map(0x10_0000, (64 << 20) - 0x10_0000, 0x10_0000, RW, Some(&ram)).ok();
    client.map(0xfffc_0000, 0x4_0000, 0, RO, None).ok();
    assert_eq!(served.memory.mapped_bytes(), 64 << 20);

    let info = client.call(Command::DEVICE_GET_INFO, &words(&[16, 0, 0, 0]), &[]).ok();
    assert_eq!(info, words(&[16, 3, 9, 5]));
    let sizes = [(0, 0x4000), (1, 0x1000), (2, 0x10_0000), (3, 0), (4, 0), (5, 0), (7, 256)];
    for (index, size) in sizes {
        let info = client.call(Command::DEVICE_GET_REGION_INFO, &region_info_body(index, 32), &[]).ok();
        let flags = if index == 7 { 7 } else { u32::from(size != 0) * 3 };
        assert_eq!(info, words(&[32, flags, index, 0, size, 0, 0, 0]));
    }
    let irq = client.call(Command::DEVICE_GET_IRQ_INFO, &words(&[16, 0, 3, 0]), &[]).ok();
    assert_eq!(irq, words(&[16, 1, 3, 1]));

    let config = client.read(7, 0, 256);
    assert_eq!(config[..4], [0xad, 0x15, 0x20, 0x08]);
    // QEMU probes the expansion ROM, which the device does not have.
    for _ in 0..2 {
        client.write(7, 0x30, &[0xff; 4]);
        assert_eq!(client.read(7, 0x30, 4), [0; 4]);
    }
    let irq = client.call(Command::DEVICE_GET_IRQ_INFO, &words(&[16, 0, 2, 0]), &[]).ok();
    assert_eq!(irq, words(&[16, 1, 2, 3]));
    // Machine reset.
    client.write(7, 4, &[0, 0]);
    for _ in 0..2 {
        assert!(client.call(Command::DEVICE_RESET, &[], &[]).ok().is_empty());
    }
    assert!(served.stats.is_connected());
    let counters = &served.stats.counters;
    let trouble =
        [&counters.client_messages_refused, &counters.client_messages_posted, &counters.client_connections_broken];
    assert_eq!(trouble.map(|counter| counter.get()), [0, 0, 0]);
}

#[test]
fn no_reply_means_no_reply() {
    let served = Served::new();
    let mut client = served.client();
    for value in 0..100u32 {
        client.send(Command::REGION_WRITE, Header::NO_REPLY, &write_body(2, 0, &value.to_le_bytes()), &[]);
    }
    // A posted write gets no reply even if it is invalid.
    client.send(Command::REGION_WRITE, Header::NO_REPLY, &write_body(77, 0, &[1]), &[]);
    client.send(Command::REGION_WRITE, Header::NO_REPLY, &[1, 2, 3], &[]);
    client.send(Command(999), Header::NO_REPLY, &[0; 50], &[]);
    // The next reply is the one to this request, by its number. All writes were done in order before it.
    assert_eq!(client.read(1, 0, 4), [0; 4]);
    let events = served.function.wait(|events| events.len() >= 200);
    let values: Vec<_> = events
        .iter()
        .filter_map(|event| match event {
            Event::Write(2, 0, data) => Some(u32::from_le_bytes(data[..].try_into().unwrap())),
            _ => None,
        })
        .collect();
    assert_eq!(values, (0..100).collect::<Vec<_>>());
    assert_eq!(served.stats.counters.client_messages_posted.get(), 103);
}

#[test]
fn deferred_work_runs_after_the_reply_and_before_the_next_message() {
    let served = Served::new();
    let mut client = served.client();
    client.write(2, 0x1000, &[1, 0, 0, 0x80]);
    client.write(2, 0x1000, &[2, 0, 0, 0x80]);
    let events = served.function.wait(|events| events.len() >= 4);
    let doorbell = |value| Event::Write(2, 0x1000, vec![value, 0, 0, 0x80]);
    assert_eq!(events, [doorbell(1), Event::Deferred, doorbell(2), Event::Deferred]);
}

#[test]
fn accesses_never_fail() {
    let served = Served::new();
    let mut client = served.client();
    client.write(1, 0x20, &[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(client.read(1, 0x20, 8), [1, 2, 3, 4, 5, 6, 7, 8]);
    // Accesses beyond a region's end, across it, and to empty regions: reads give zeros, writes have no effect.
    for (region, offset, count) in
        [(1, 0x1000, 4), (1, u64::MAX, 4), (1, 0xffe, 4), (3, 0, 4), (6, 0, 2), (8, 8, 1), (7, 256, 4)]
    {
        assert_eq!(client.read(region, offset, count), vec![0; count as usize]);
        client.write(region, offset, &vec![0xff; count as usize]);
    }
    assert_eq!(client.read(1, 0xffe, 2), [0xff, 0xff]);
    assert!(client.read(1, 0, 0).is_empty());
    client.write(1, 0, &[]);
    // The largest messages.
    let data: Vec<u8> = (0..1 << 20).map(|i: u32| i.to_le_bytes()[1]).collect();
    client.write(1, 0, &data);
    assert_eq!(client.read(1, 0, 1 << 20)[..0x1000], data[..0x1000]);
    assert_eq!(served.stats.counters.client_messages_refused.get(), 0);
}

#[test]
fn several_writes_in_one_message() {
    let served = Served::new();
    let mut client = served.client();
    let element = |region: u32, offset: u64, data: u32| {
        let mut bytes = access(region, offset, 4);
        bytes.extend(u64::from(data).to_le_bytes());
        bytes
    };
    let body = [&2u64.to_le_bytes()[..], &element(1, 8, 7), &element(1, 12, 9)].concat();
    client.send(Command::REGION_WRITE_MULTI, Header::NO_REPLY, &body, &[]);
    assert_eq!(client.read(1, 8, 8), [7, 0, 0, 0, 9, 0, 0, 0]);
    let bad = [&2u64.to_le_bytes()[..], &element(1, 8, 1), &element(99, 12, 1)].concat();
    client.call(Command::REGION_WRITE_MULTI, &bad, &[]).errno();
    assert_eq!(client.read(1, 8, 8), [7, 0, 0, 0, 9, 0, 0, 0]);
}

#[test]
fn argsz_has_the_required_size() {
    let served = Served::new();
    let mut client = served.client();
    // A larger buffer does not change the reply, so the client need not ask again.
    for argsz in [32, 48, 4096] {
        let info = client.call(Command::DEVICE_GET_REGION_INFO, &region_info_body(2, argsz), &[]).ok();
        assert_eq!(info, words(&[32, 3, 2, 0, 0x10_0000, 0, 0, 0]));
    }
    client.call(Command::DEVICE_GET_REGION_INFO, &region_info_body(2, 31), &[]).errno();
    client.call(Command::DEVICE_GET_REGION_INFO, &region_info_body(9, 32), &[]).errno();
    // Cloud Hypervisor counts the header too.
    client.call(Command::DEVICE_GET_INFO, &words(&[32, 0, 0, 0]), &[]).ok();
    client.call(Command::DEVICE_GET_INFO, &words(&[15, 0, 0, 0]), &[]).errno();
    client.call(Command::DEVICE_GET_IRQ_INFO, &words(&[16, 0, 5, 0]), &[]).errno();
}

#[test]
fn memory_is_shared_wherever_it_lies_in_the_file() {
    let served = Served::new();
    let mut client = served.client();
    let ram = memfd("ram", 16 << 20);
    client.map(0, 0x8_0000, 0, RW, Some(&ram)).ok();
    client.map(0x1_0000_0000, 0x10_0000, 0xc4000, RW, Some(&ram)).ok();
    client.map(0xf_0000, 0x1000, 0x1000, RO, Some(&ram)).ok();
    {
        let view = served.memory.view();
        view.write(0x1_0000_0010, b"hello").unwrap();
        view.write(0x1010, b"below").unwrap();
        let mut low = [0; 5];
        view.read(0xf_0010, &mut low).unwrap();
        assert_eq!(&low, b"below");
        assert!(view.write(0xf_0000, b"x").is_err());
    }
    let mut seen = [0; 5];
    std::os::unix::fs::FileExt::read_exact_at(&ram, &mut seen, 0xc4010).unwrap();
    assert_eq!(&seen, b"hello");

    // Overlapping ranges, ranges beyond the file and invalid sizes are refused without an effect.
    let mapped = served.memory.mapped_bytes();
    for (address, size, offset, flags) in [
        (0x1000, 0x1000, 0, RW),
        (0x20_0000, 0x1000, 16 << 20, RW),
        (0x20_0000, (16 << 20) + 0x1000, 0, RW),
        (0x20_0000, 0x1000, u64::MAX - 0xfff, RW),
        (0x20_0000, 0, 0, RW),
        (0x20_0001, 0x1000, 0, RW),
        (0x20_0000, 0x1001, 0, RW),
        (0x20_0000, 0x1000, 1, RW),
        (u64::MAX - 0xfff, 0x1000, 0, RW),
        (0x20_0000, 0x1000, 0, 0),
    ] {
        client.map(address, size, offset, flags, Some(&ram)).errno();
    }
    assert_eq!(served.memory.mapped_bytes(), mapped);

    let unmapped = client.unmap(0x1_0000_0000, 0x10_0000, 0).ok();
    assert_eq!(unmapped, unmap_body(0, 0x1_0000_0000, 0x10_0000));
    client.unmap(0x1_0000_0000, 0x10_0000, 0).errno();
    client.unmap(0, 0x1000, 0).errno();
    client.unmap(0, 0x1000, 2).errno();
    client.unmap(0, 0x8_0000, 1).errno();
    client.unmap(0, 0, 2).ok();
    assert_eq!(served.memory.mapped_bytes(), 0);
}

#[test]
fn only_files_are_mapped() {
    let served = Served::new();
    let mut client = served.client();
    let ram = memfd("ram", 1 << 20);
    let body = map_body(RW, 0, 0, 0x1000);
    client.call(Command::DMA_MAP, &body, &[ram.as_fd(), ram.as_fd()]).errno();
    let (pipe, _other) = std::io::pipe().unwrap();
    client.call(Command::DMA_MAP, &body, &[pipe.as_fd()]).errno();
    client.call(Command::DMA_MAP, &body, &[client.stream.try_clone().unwrap().as_fd()]).errno();
    let event = crate::common::eventfd();
    client.call(Command::DMA_MAP, &body, &[event.as_fd()]).errno();
    // A file that is open for reading only can serve read-only ranges.
    let mut rom = memfd("rom", 0);
    rom.write_all(&[5; 0x1000]).unwrap();
    let rom = fs::File::open(format!("/proc/self/fd/{}", rom.as_raw_fd())).unwrap();
    client.map(0, 0x1000, 0, RW, Some(&rom)).errno();
    client.map(0, 0x1000, 0, RO, Some(&rom)).ok();
    let mut byte = [0];
    served.memory.view().read(0x7ff, &mut byte).unwrap();
    assert_eq!(byte, [5]);
}

/// Returns the number of this process's mappings of a memfd with this name.
fn mappings_of(name: &str) -> usize {
    let mut maps = String::new();
    fs::File::open("/proc/self/maps").unwrap().read_to_string(&mut maps).unwrap();
    maps.lines().filter(|line| line.contains(&format!("/memfd:{name} "))).count()
}

#[test]
fn few_mappings_for_all_ranges_and_none_after_the_client() {
    let served = Served::new();
    let mut client = served.client();
    let ram = memfd("one-mapping", 1 << 20);
    for page in 0..200 {
        // The kernel merges adjacent mappings of adjacent parts of a file. These pages are ordered so that none are
        // adjacent.
        let offset = page * 77 % 256 * 0x1000;
        client.map(0xfee0_0000 + page * 0x1000, 0x1000, offset, RW, Some(&ram)).ok();
    }
    // A limited number of ranges have their own mapping; one mapping of the whole file serves the others.
    assert_eq!(mappings_of("one-mapping"), 17);
    // The file grows by a hot-plugged DIMM.
    ram.set_len(2 << 20).unwrap();
    client.map(0x10_0000, 0x10_0000, 0x10_0000, RW, Some(&ram)).ok();
    assert_eq!(mappings_of("one-mapping"), 18);
    for page in 0..200 {
        client.unmap(0xfee0_0000 + page * 0x1000, 0x1000, 0).ok();
    }
    // When the series of map changes has ended, unused mappings are removed.
    client.read(1, 0, 4);
    assert_eq!(mappings_of("one-mapping"), 1);
    client.unmap(0x10_0000, 0x10_0000, 0).ok();
    client.read(1, 0, 4);
    assert_eq!(mappings_of("one-mapping"), 0);

    client.map(0, 0x10_0000, 0, RW, Some(&ram)).ok();
    assert_eq!(mappings_of("one-mapping"), 1);
    drop(client);
    // The next client is accepted when all resources of the last one are released.
    let _next = served.client();
    assert_eq!(mappings_of("one-mapping"), 0);
    assert_eq!(served.memory.mapped_bytes(), 0);
}

#[test]
fn huge_pages_at_odd_offsets() {
    use rustix::fs::MemfdFlags;
    let ram = rustix::fs::memfd_create("huge", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB)
        .map(fs::File::from)
        .and_then(|file| rustix::fs::ftruncate(&file, 4 << 20).map(|()| file));
    let free = fs::read_to_string("/proc/sys/vm/nr_hugepages").unwrap_or_default();
    let Some(ram) = ram.ok().filter(|_| free.trim().parse::<u32>().is_ok_and(|pages| pages >= 2)) else {
        skipped(&format_args!("no huge pages on this host (vm.nr_hugepages is {})", free.trim()));
        return;
    };
    let served = Served::new();
    let mut client = served.client();
    client.map(0, 0xc_0000, 0, RW, Some(&ram)).ok();
    client.map(0x10_0000, 0x20_0000, 0x10_0000, RW, Some(&ram)).ok();
    served.memory.view().write(0x10_0000, b"huge").unwrap();
    client.unmap(0x10_0000, 0x20_0000, 0).ok();
    client.unmap(0, 0xc_0000, 0).ok();
    client.read(1, 0, 4);
    assert_eq!(mappings_of("huge"), 0);
}

#[test]
fn a_second_client_fails_fast_and_does_not_disturb_the_first() {
    let served = Served::new();
    let mut client = served.client();
    served.connect().wait_hang_up();
    let second = served.connect();
    second.wait_hang_up();
    client.write(1, 0, &[1]);
    assert_eq!(client.read(1, 0, 1), [1]);
    assert_eq!(served.stats.counters.client_connections_turned_away.get(), 2);
}

#[test]
fn clients_come_and_go() {
    let served = Served::new();
    for round in 0..50u8 {
        // The next client connects without a pause, while the server still cleans up after the last one.
        let mut client = served.client();
        assert_eq!(client.read(1, 0x20, 1), [0]);
        client.write(1, 0x20, &[round | 1]);
        client.map(0, 0x1000, 0, RW, Some(&memfd("ram", 0x1000))).ok();
        if round % 2 == 0 {
            // Ends in the middle of a message.
            client.send_raw(&[1, 2, 3], &[]);
        }
    }
    served.function.wait(|events| events.iter().filter(|event| **event == Event::Reset).count() == 50);
    assert_eq!(served.stats.counters.client_connections.get(), 50);
    assert_eq!(served.stats.counters.client_connections_turned_away.get(), 0);
}

#[test]
fn a_client_that_dies_with_replies_unread() {
    let served = Served::new();
    let mut client = served.client();
    for _ in 0..20 {
        client.send(Command::REGION_READ, 0, &access(1, 0, 1 << 20), &[]);
    }
    // The client disconnects while the server is blocked in a write.
    drop(client);
    assert_eq!(served.client().read(1, 0, 1), [0]);
}

#[test]
fn stopping_disconnects_and_removes_the_socket() {
    let mut served = Served::new();
    let mut client = served.client();
    client.map(0, 0x1000, 0, RW, Some(&memfd("ram", 0x1000))).ok();
    drop(served.server.take());
    client.wait_hang_up();
    assert!(!served.path.exists());
    assert_eq!(served.memory.mapped_bytes(), 0);
    assert!(served.function.wait_reset().contains(&Event::Reset));
    assert!(!served.stats.is_connected());
}

#[test]
fn stopping_does_not_wait_for_a_stuck_client() {
    let mut served = Served::new();
    let mut client: Raw = served.client();
    for _ in 0..20 {
        client.send(Command::REGION_READ, 0, &access(1, 0, 1 << 20), &[]);
    }
    drop(served.server.take());
    drop(client);
}

#[test]
fn a_truncated_file_does_not_end_the_daemon() {
    let served = Served::new();
    let mut client = served.client();
    let ram = memfd("short", 1 << 20);
    client.map(0, 1 << 20, 0, RW, Some(&ram)).ok();
    served.memory.view().write(0x8_0000, b"here").unwrap();
    ram.set_len(0x1000).unwrap();
    let before = pvrdma_vfio_user_server::sigbus::replaced();
    let mut data = [1; 4];
    served.memory.view().read(0x8_0000, &mut data).unwrap();
    assert_eq!(data, [0; 4]);
    assert!(pvrdma_vfio_user_server::sigbus::replaced() > before);
    client.wait_hang_up();
    served.client();
    assert_eq!(served.stats.counters.client_memory_lost.get(), 1);
}

/// QEMU would take a late body for the next header and could not recover. It does recover from a closed connection.
#[test]
fn a_late_reply_is_not_sent() {
    let served = Served::with(false, Duration::ZERO);
    let mut client = served.connect();
    // Only the VERSION message tells whether the client gives up on late replies.
    client.call(Command::VERSION, b"\0\0\0\0", &[]).ok();
    client.read(1, 0, 4);
    drop(client);

    let mut client = served.connect();
    client.send(Command::VERSION, 0, b"\0\0\0\0{\"capabilities\":{\"write_multiple\":true}}\0", &[]);
    assert_eq!(client.try_receive(), None);
    assert_eq!(served.stats.counters.client_connections_broken.get(), 1);
}

/// Map changes may take long, and QEMU sends several without waiting. A late reply to one of them must have no body.
#[test]
fn late_replies_to_map_changes_are_headers() {
    let deadline = Duration::from_millis(500);
    let served = Served::with(false, deadline);
    let mut client = served.client();
    client.map(0, 0x1000, 0, RO, None).ok();
    assert_eq!(client.unmap(0, 0x1000, 0).ok().len(), 24);
    client.read(1, 0, 4);
    client.map(0, 0x1000, 0, RO, None).ok();
    // The series of map changes ends only with a message of another kind.
    std::thread::sleep(deadline);
    client.map(0x1000, 0x1000, 0, RO, None).ok();
    assert!(client.unmap(0, 0x1000, 0).ok().is_empty());
    client.read(1, 0, 4);
    assert_eq!(client.unmap(0x1000, 0x1000, 0).ok().len(), 24);
}
