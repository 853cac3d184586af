//! Invalid messages. Each is answered with an error or ends the connection, and the next client is served.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::sync::LazyLock;

use crate::common::{
    EINVAL, PANIC, Served, access, irqs_body, map_body, memfd, region_info_body, unmap_body, words, write_body,
};
use proptest::prelude::*;
use pvrdma_verbs::testing::LogLines;
use pvrdma_vfio_user_server::message::{Command, HEADER_SIZE, Header};

/// Returns a valid body for each command that the server supports after negotiation.
fn good_bodies() -> Vec<(Command, Vec<u8>)> {
    let mut multi = 1u64.to_le_bytes().to_vec();
    multi.extend(access(1, 0, 4));
    multi.extend([0; 8]);
    vec![
        (Command::DMA_MAP, map_body(1, 0, 0xfffc_0000, 0x1000)),
        (Command::DMA_UNMAP, unmap_body(0, 0xfffc_0000, 0x1000)),
        (Command::DEVICE_GET_INFO, words(&[16, 0, 0, 0])),
        (Command::DEVICE_GET_REGION_INFO, region_info_body(1, 32)),
        (Command::DEVICE_GET_IRQ_INFO, words(&[16, 0, 2, 0])),
        (Command::DEVICE_SET_IRQS, irqs_body(2, 0x21, 0, 0)),
        (Command::REGION_READ, access(1, 0, 4)),
        (Command::REGION_WRITE, write_body(1, 0, &[1, 2, 3, 4])),
        (Command::REGION_WRITE_MULTI, multi),
        (Command::DEVICE_RESET, Vec::new()),
    ]
}

fn header(command: Command, size: u32, flags: u32) -> [u8; HEADER_SIZE] {
    Header { id: 7, command, size, flags, error: 0 }.to_bytes()
}

#[test]
fn bodies_cut_short_are_refused_and_the_stream_stays_in_step() {
    let served = Served::new();
    let mut client = served.client();
    for (command, body) in good_bodies() {
        client.call(command, &body, &[]).ok();
        for len in 0..body.len() {
            assert_eq!(client.call(command, &body[..len], &[]).errno(), EINVAL, "{command:?} {len}");
        }
    }
    assert_eq!(client.read(1, 0, 4), [0; 4]);
}

/// A panic on a connection's thread ends the connection. The device is reset and its memory unmapped without waiting
/// for another client, and the next client is served.
#[test]
fn a_panic_ends_the_connection_and_nothing_of_it_stays() {
    let served = Served::new();
    let log = LogLines::watch();
    let mut client = served.client();
    let file = memfd("guest memory", 0x10_0000);
    client.call(Command::DMA_MAP, &map_body(3, 0, 0x10_0000, 0x10_0000), &[file.as_fd()]).ok();
    assert_eq!(served.memory.mapped_bytes(), 0x10_0000);
    let write = write_body(1, PANIC, &[0; 4]);
    client
        .stream
        .write_all(&header(Command::REGION_WRITE, u32::try_from(HEADER_SIZE + write.len()).unwrap(), 0))
        .unwrap();
    client.stream.write_all(&write).unwrap();
    // The server has closed the connection.
    assert_eq!(client.stream.read(&mut [0; 16]).unwrap_or(0), 0);
    served.function.wait_reset();
    // The memory is unmapped soon, without a further connection.
    while served.memory.mapped_bytes() != 0 {
        std::thread::yield_now();
    }
    assert_eq!(served.stats.counters.client_connections_panicked.get(), 1);
    assert_eq!(log.with("by a panic").len(), 1);
    assert_eq!(served.client().read(1, 0, 4), [0; 4]);
}

/// Refused messages and connections are logged under one rate limit for all clients of a device.
#[test]
fn floods_do_not_fill_the_log() {
    let served = Served::new();
    let log = LogLines::watch();
    let mut client = served.client();
    let file = memfd("flood", 0x10_0000);
    let map = map_body(3, 0, 0x10_0000, 0x1000);
    client.call(Command::DMA_MAP, &map, &[file.as_fd()]).ok();
    for _ in 0..5000 {
        client.call(Command::DMA_MAP, &map, &[file.as_fd()]).errno();
    }
    drop(client);
    for _ in 0..500 {
        let mut client = served.client();
        // A message above the maximum length ends the connection.
        client.stream.write_all(&header(Command::REGION_WRITE, u32::MAX, 0)).unwrap();
        client.wait_hang_up();
    }
    log.assert_limited(&format!("{}: ", served.name));
}

#[test]
fn bodies_with_too_much_are_refused_or_ignored() {
    let served = Served::new();
    let mut client = served.client();
    for (command, mut body) in good_bodies() {
        body.extend([0xee; 3000]);
        client.call(command, &body, &[]);
        assert_eq!(client.read(1, 0x40, 1), [0], "{command:?}");
    }
    // The stated length is 8 and then 2, but the body has 4 bytes.
    let mut write = write_body(1, 0x40, &[1, 2, 3, 4]);
    write[12] = 8;
    assert_eq!(client.call(Command::REGION_WRITE, &write, &[]).errno(), EINVAL);
    write[12] = 2;
    assert_eq!(client.call(Command::REGION_WRITE, &write, &[]).errno(), EINVAL);
    assert_eq!(client.read(1, 0x40, 4), [0; 4]);
    for count in [(1 << 20) + 1, u32::MAX, 0xffff_fff0] {
        assert_eq!(client.call(Command::REGION_READ, &access(1, 0, count), &[]).errno(), EINVAL);
    }
    for region in [9, 100, u32::MAX] {
        assert_eq!(client.call(Command::REGION_READ, &access(region, 0, 4), &[]).errno(), EINVAL);
        assert_eq!(client.call(Command::REGION_WRITE, &write_body(region, 0, &[0; 4]), &[]).errno(), EINVAL);
    }
}

#[test]
fn unknown_commands_are_drained_and_refused() {
    let served = Served::new();
    let mut client = served.client();
    for command in [0, 6, 11, 12, 14, 16, 17, 18, 255, u16::MAX] {
        for len in [0, 1, 16, 4096, (64 << 10) - 16] {
            client.call(Command(command), &vec![0xff; len], &[]).errno();
        }
    }
    assert_eq!(client.read(1, 0, 4), [0; 4]);
}

#[test]
fn sizes_that_hide_the_next_message_end_the_connection() {
    let served = Served::new();
    for command in (0..20).map(Command) {
        for size in [0, 1, 15, (1 << 20) + 33, 0x7fff_ffff, u32::MAX] {
            let mut client = served.client();
            client.send_raw(&header(command, size, 0), &[]);
            client.receive().errno();
            client.wait_hang_up();
            let client = served.client();
            client.send_raw(&header(command, size, Header::NO_REPLY), &[]);
            client.wait_hang_up();
        }
    }
    assert_eq!(served.client().read(1, 0, 4), [0; 4]);
}

#[test]
fn messages_cut_off_by_the_end_of_the_stream() {
    let served = Served::new();
    for (command, body) in good_bodies() {
        let size = u32::try_from(HEADER_SIZE + body.len()).unwrap();
        let message = [&header(command, size, 0)[..], &body].concat();
        for len in [1, 15, 16, message.len() - 1] {
            let client = served.client();
            client.send_raw(&message[..len.min(message.len() - 1)], &[]);
            client.close_writing();
            client.wait_hang_up();
        }
    }
    assert_eq!(served.client().read(1, 0, 4), [0; 4]);
}

#[test]
fn messages_in_small_pieces_are_put_together() {
    let served = Served::new();
    let mut client = served.client();
    let message = [&header(Command::REGION_READ, 32, 0)[..], &access(1, 0, 4)].concat();
    for byte in &message {
        client.send_raw(&[*byte], &[]);
    }
    assert_eq!(client.receive().ok()[16..], [0; 4]);
    // The same message many times in one write.
    client.send_raw(&message.repeat(50), &[]);
    for _ in 0..50 {
        assert_eq!(client.receive().header.id, 7);
    }
}

#[test]
fn descriptors_where_none_belong_or_too_many() {
    let served = Served::new();
    let mut client = served.client();
    let event = crate::common::eventfd();
    for (command, body) in good_bodies() {
        if !matches!(command, Command::DMA_MAP | Command::DEVICE_SET_IRQS) {
            assert_eq!(client.call(command, &body, &[event.as_fd()]).errno(), EINVAL, "{command:?}");
        }
    }
    let many = [event.as_fd(); 40];
    for count in [17, 20, 40] {
        let answer = client.call(Command::DEVICE_SET_IRQS, &irqs_body(2, 0x24, 0, 3), &many[..count]);
        assert_eq!(answer.errno(), EINVAL);
    }
    client.call(Command(77), &[1, 2, 3], &many[..16]).errno();
    assert_eq!(client.read(1, 0, 4), [0; 4]);
    // The server keeps none of the descriptors: the pipe reports its end once the last copy of its writing end is
    // closed.
    let (mut reader, writer) = std::io::pipe().unwrap();
    for command in [Command::DEVICE_SET_IRQS, Command::DEVICE_RESET, Command(77), Command::VERSION] {
        client.call(command, &irqs_body(2, 0x24, 0, 3), &[writer.as_fd(); 40]).errno();
        client.call(command, &[], &[writer.as_fd(); 3]).errno();
    }
    drop(writer);
    assert_eq!(reader.read(&mut [0]).unwrap(), 0);
}

#[test]
fn replies_and_odd_types() {
    let served = Served::new();
    let mut client = served.client();
    // A reply to a request that the server did not send is ignored.
    client.send(Command::DMA_READ, Header::REPLY, &[0; 100], &[]);
    client.send(Command::REGION_WRITE, Header::REPLY, &write_body(1, 0, &[1]), &[]);
    assert_eq!(client.read(1, 0, 1), [0]);
    client.send(Command::REGION_WRITE, 5, &write_body(1, 0, &[1]), &[]);
    assert_eq!(client.receive().errno(), EINVAL);
    assert_eq!(client.read(1, 0, 1), [0]);
}

#[test]
fn negotiation_comes_first_and_once() {
    let served = Served::new();
    for (command, body) in good_bodies() {
        let mut client = served.connect();
        assert_eq!(client.call(command, &body, &[]).errno(), EINVAL);
        client.negotiate();
    }
    let refused: [&[u8]; 8] = [
        b"",
        b"\0\0\0",
        b"\x07\0\0\0",
        b"\0\0\0\0{}",
        b"\0\0\0\0{\0",
        b"\0\0\0\0\0",
        b"\0\0\0\0\xff\xfe\0",
        b"\0\0\0\0{}\0garbage\0",
    ];
    for version in refused {
        let mut client = served.connect();
        assert_eq!(client.call(Command::VERSION, version, &[]).errno(), EINVAL, "{version:?}");
        client.negotiate();
        assert_eq!(client.call(Command::VERSION, b"\0\0\0\0", &[]).errno(), EINVAL);
    }
    let accepted: [&[u8]; 5] = [
        b"\0\0\0\0",
        b"\0\0\x01\0{}\0",
        b"\0\0\0\0null\0",
        b"\0\0\0\0{\"capabilities\":{\"max_msg_fds\":\"many\"}}\0",
        b"\0\0\0\0{\"capabilities\":{\"migration\":{}}}\0",
    ];
    for version in accepted {
        let mut client = served.connect();
        client.call(Command::VERSION, version, &[]).ok();
        assert_eq!(client.read(1, 0, 1), [0]);
    }
    let deep = [&b"\0\0\0\0"[..], &b"[".repeat(60_000), &b"\0"[..]].concat();
    assert_eq!(served.connect().call(Command::VERSION, &deep, &[]).errno(), EINVAL);
}

/// Messages with a valid header and random content.
fn message() -> impl Strategy<Value = Vec<u8>> {
    let command = prop_oneof![8 => 0u16..20, 1 => any::<u16>()];
    let flags = prop_oneof![4 => Just(0u32), 2 => Just(Header::NO_REPLY), 1 => any::<u32>()];
    let word = prop_oneof![0u32..64, Just(0x20), Just(0x1000), Just(0x10_0000), any::<u32>()];
    (
        command,
        flags,
        prop::collection::vec(word, 0..20),
        0usize..4,
        prop_oneof![9 => Just(None), 1 => any::<u32>().prop_map(Some)],
    )
        .prop_map(|(command, flags, body, extra, size)| {
            let mut body = words(&body);
            body.extend(vec![1; extra]);
            let size = size.unwrap_or_else(|| u32::try_from(HEADER_SIZE + body.len()).unwrap());
            [&header(Command(command), size, flags)[..], &body].concat()
        })
}

/// Sends the bytes, with descriptors on the first byte, and reads replies until the server closes the connection.
fn survives(served: &Served, bytes: &[u8], negotiated: bool) {
    let mut client = if negotiated { served.client() } else { served.connect() };
    let (file, event) = (memfd("random", 0x2000), crate::common::eventfd());
    let sender = client.stream.try_clone().unwrap();
    std::thread::scope(|scope| {
        // On another thread, because replies may fill the other direction. The write fails when the server closes the
        // connection.
        scope.spawn(|| {
            if let Some((first, rest)) = bytes.split_at_checked(HEADER_SIZE) {
                crate::common::send(&sender, first, &[file.as_fd(), event.as_fd()])
                    .and_then(|()| (&sender).write_all(rest))
                    .unwrap_or_default();
            }
            let _ = sender.shutdown(Shutdown::Write);
        });
        while client.try_receive().is_some() {}
    });
    drop(client);
    assert_eq!(served.client().read(3, 0, 4), [0; 4]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes(bytes in prop::collection::vec(any::<u8>(), 0..2000), negotiated: bool) {
        static SERVED: LazyLock<Served> = LazyLock::new(Served::new);
        survives(&SERVED, &bytes, negotiated);
    }

    #[test]
    fn random_messages(messages in prop::collection::vec(message(), 1..30)) {
        static SERVED: LazyLock<Served> = LazyLock::new(Served::new);
        survives(&SERVED, &messages.concat(), true);
    }
}
