//! Frames of any bytes, as a link or another guest passes them to a device: parsed, segmented, delivered.
#![no_main]

use std::sync::Arc;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use pvrdma_fuzz::vmxnet3::{MeddlingPort, arrived, attack, cut, forge, obeys};
use pvrdma_link::testing::Attack;
use pvrdma_packet::MacAddr;
use pvrdma_vmxnet3::testing::frames::GUEST_MAC;
use pvrdma_vmxnet3::testing::{Driver, DriverConfig, Guest, RxLayout, rx_mode};
use pvrdma_vmxnet3::{Frame, Received, Vmxnet3Config};

#[derive(Arbitrary, Debug)]
struct Input {
    features: u8,
    /// Bytes that follow those given.
    fill: u16,
    kind: u8,
    numbers: [u16; 2],
    frames: Vec<Vec<u8>>,
}

const HEADERS: [&[u8]; 8] = [
    &[0x08, 0x00, 0x45],
    &[0x86, 0xdd, 0x60],
    &[0x81, 0x00, 0x00, 0x05, 0x08, 0x00, 0x45],
    &[0x88, 0xa8, 0x00, 0x05, 0x81, 0x00, 0x00, 0x06, 0x86, 0xdd, 0x60],
    // Bytes that a checksum could turn into something else.
    &[0x81, 0x00, 0x00, 0x00, 0x88, 0xb5],
    &[0x08, 0x06, 0x00, 0x01, 0x08, 0x00, 0x06, 0x04, 0x00, 0x02, 2, 2, 2, 2, 2, 2, 10, 0, 0, 5],
    &[0x81, 0x00, 0x00, 0x00, 0x08, 0x00, 0x45],
    &[
        0x08, 0x00, 0x45, 0x00, 0x00, 0x30, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 5, 10, 0, 0, 9, 0xc0, 0, 0, 53, 0, 28,
        0, 0,
    ],
];

fuzz_target!(|input: Input| {
    let settings = Vmxnet3Config::new("fuzz", MacAddr(GUEST_MAC));
    let guest = Guest::new(settings, 8 << 20, Arc::new(MeddlingPort::default()));
    let rx = RxLayout { first: 64, second: 64, data_slot: 128, ..RxLayout::SMALL };
    let config = DriverConfig { rx, features: u64::from(input.features) & 0xd, ..DriverConfig::default() };
    let mut driver = Driver::up(&guest, config);
    driver.set_mode(rx_mode::PROMISC);
    for bytes in input.frames.iter().take(20) {
        let mut frame =
            [&[2; 12][..], HEADERS[usize::from(input.kind) % 4 + usize::from(input.features >> 4 & 1) * 4], bytes]
                .concat();
        if input.kind & 4 != 0 {
            frame.resize(frame.len() + usize::from(input.fill), 0x5a);
        }
        let [start, at] = input.numbers;
        let (mut start, mut at, mss) = (start % 100, at % 200, at);
        forge(&mut frame, start, at, input.kind >> 4);
        if input.features & 0x20 != 0 {
            Attack { frame, start, at, .. } = attack(input.kind >> 4, input.fill);
        }
        let candidates = [
            Frame::new(&frame, input.kind & 8 != 0),
            Frame::with_partial_checksum(&frame, start, at),
            Frame::to_be_segmented(&frame, mss),
        ];
        for candidate in candidates.iter().flatten() {
            cut(candidate);
            let received = guest.device.receive(candidate);
            guest.device.flush();
            // The driver has the assertions of the kernel's driver.
            let packets = driver.poll(0);
            assert_eq!(received == Received::Delivered, !packets.is_empty());
            if candidate.mss().is_none() {
                assert!(packets.len() <= 1);
            }
            packets.iter().for_each(|packet| obeys(&frame, &arrived(packet)));
        }
    }
    assert_eq!(driver.queue_error(1), 0);
});
