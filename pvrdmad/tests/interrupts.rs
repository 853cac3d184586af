//! SET_IRQS, as QEMU and Cloud Hypervisor use it and in invalid forms.

use std::os::fd::AsFd;

use crate::common::{RAISE, Raw, Served, eventfd, irqs_body, memfd, take_signals};
use pvrdma_pci_function::InterruptSink;
use pvrdma_vfio_user_server::message::Command;

const NONE: u32 = 1;
const BOOL: u32 = 2;
const EVENTFD: u32 = 4;
const MASK: u32 = 8;
const UNMASK: u32 = 16;
const TRIGGER: u32 = 32;
const MSIX: u32 = 2;

fn raise(client: &mut Raw, vector: u8) {
    client.write(1, RAISE, &[vector]);
}

#[test]
fn vectors_come_one_at_a_time_and_are_replaced() {
    let served = Served::new();
    let mut client = served.client();
    // "Enable, no vector" is not an error.
    client.set_irqs(MSIX, EVENTFD | TRIGGER, 0, 1, &[]).ok();
    raise(&mut client, 0);
    let fds = [eventfd(), eventfd(), eventfd()];
    for (vector, fd) in (0..).zip(&fds) {
        client.set_irqs(MSIX, EVENTFD | TRIGGER, vector, 1, &[fd.as_fd()]).ok();
    }
    for vector in [0, 1, 2, 2] {
        raise(&mut client, vector);
    }
    assert_eq!(fds.each_ref().map(take_signals), [1, 1, 2]);
    let counters = &served.irqs.counters;
    assert_eq!((counters.interrupts_raised.get(), counters.interrupts_dropped.get()), (5, 1));

    let other = eventfd();
    client.set_irqs(MSIX, EVENTFD | TRIGGER, 1, 1, &[other.as_fd()]).ok();
    raise(&mut client, 1);
    assert_eq!((take_signals(&fds[1]), take_signals(&other)), (0, 1));

    // Removes one vector, then all.
    client.set_irqs(MSIX, EVENTFD | TRIGGER, 1, 1, &[]).ok();
    raise(&mut client, 1);
    raise(&mut client, 0);
    assert_eq!((take_signals(&fds[0]), take_signals(&other)), (1, 0));
    for _ in 0..2 {
        client.set_irqs(MSIX, NONE | TRIGGER, 0, 0, &[]).ok();
    }
    raise(&mut client, 0);
    raise(&mut client, 200);
    assert_eq!(take_signals(&fds[0]), 0);
}

#[test]
fn all_vectors_at_once() {
    let served = Served::new();
    let mut client = served.client();
    let fds = [eventfd(), eventfd(), eventfd()];
    let all = fds.each_ref().map(AsFd::as_fd);
    client.set_irqs(MSIX, EVENTFD | TRIGGER, 0, 3, &all).ok();
    raise(&mut client, 2);
    // The client triggers vectors itself.
    client.set_irqs(MSIX, NONE | TRIGGER, 0, 2, &[]).ok();
    let mut body = irqs_body(MSIX, BOOL | TRIGGER, 0, 3);
    body.extend([0, 1, 1]);
    client.call(Command::DEVICE_SET_IRQS, &body, &[]).ok();
    assert_eq!(fds.each_ref().map(take_signals), [1, 2, 2]);
}

#[test]
fn invalid_requests_change_nothing() {
    let served = Served::new();
    let mut client = served.client();
    let fds = [eventfd(), eventfd(), eventfd(), eventfd()];
    let all = fds.each_ref().map(AsFd::as_fd);
    client.set_irqs(MSIX, EVENTFD | TRIGGER, 0, 3, &all[..3]).ok();
    let file = memfd("not an eventfd", 0x1000);
    client.set_irqs(MSIX, EVENTFD | TRIGGER, 0, 2, &all[3..]).errno();
    client.set_irqs(MSIX, EVENTFD | TRIGGER, 0, 1, &all[2..]).errno();
    client.set_irqs(MSIX, EVENTFD | TRIGGER, 0, 4, &all).errno();
    client.set_irqs(MSIX, EVENTFD | TRIGGER, 3, 1, &all[3..]).errno();
    client.set_irqs(MSIX, EVENTFD | TRIGGER, u32::MAX, 2, &[]).errno();
    client.set_irqs(MSIX, EVENTFD | TRIGGER, 0, 1, &[file.as_fd()]).errno();
    client.set_irqs(MSIX, EVENTFD | TRIGGER, 0, 2, &[all[3], file.as_fd()]).errno();
    let (reader, writer) = std::io::pipe().unwrap();
    client.set_irqs(MSIX, EVENTFD | TRIGGER, 0, 1, &[writer.as_fd()]).errno();
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    client.set_irqs(MSIX, EVENTFD | TRIGGER, 0, 1, &[socket.as_fd()]).errno();
    let device = std::fs::OpenOptions::new().write(true).open("/dev/null").unwrap();
    client.set_irqs(MSIX, EVENTFD | TRIGGER, 0, 1, &[device.as_fd()]).errno();
    client.set_irqs(MSIX, NONE | TRIGGER, 0, 0, &all[3..]).errno();
    client.set_irqs(MSIX, BOOL | TRIGGER, 0, 3, &[]).errno();
    client.set_irqs(MSIX, EVENTFD | NONE | TRIGGER, 0, 1, &[]).errno();
    client.set_irqs(MSIX, EVENTFD, 0, 1, &[]).errno();
    client.set_irqs(MSIX, u32::MAX, 0, 1, &[]).errno();
    client.set_irqs(MSIX, NONE | MASK, 0, 1, &[]).errno();
    client.set_irqs(0, EVENTFD | TRIGGER, 0, 1, &all[3..]).errno();
    client.set_irqs(1, EVENTFD | TRIGGER, 0, 1, &all[3..]).errno();
    client.set_irqs(5, NONE | TRIGGER, 0, 0, &[]).errno();
    for vector in 0..3 {
        raise(&mut client, vector);
    }
    assert_eq!(fds.each_ref().map(take_signals), [1, 1, 1, 0]);
    drop((reader, writer));
}

#[test]
fn a_full_counter_does_not_block() {
    let served = Served::new();
    let mut client = served.client();
    // A blocking eventfd without room for another signal.
    let fd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    client.set_irqs(MSIX, EVENTFD | TRIGGER, 0, 1, &[fd.as_fd()]).ok();
    raise(&mut client, 0);
    // The largest count, which only the kernel's own signals can reach; a write cannot.
    assert_eq!(take_signals(&fd), u64::MAX);
}

#[test]
fn nothing_is_signalled_after_the_client_has_gone() {
    let served = Served::new();
    let mut client = served.client();
    let fd = eventfd();
    client.set_irqs(MSIX, EVENTFD | TRIGGER, 0, 1, &[fd.as_fd()]).ok();
    client.set_irqs(3, EVENTFD | TRIGGER, 0, 1, &[fd.as_fd()]).ok();
    drop(client);
    let mut next = served.client();
    raise(&mut next, 0);
    assert_eq!(take_signals(&fd), 0);
}

#[test]
fn the_legacy_line_masks_itself() {
    let served = Served::with_intx(true);
    let mut client = served.client();
    let info = client.call(Command::DEVICE_GET_IRQ_INFO, &crate::common::words(&[16, 0, 0, 0]), &[]).ok();
    assert_eq!(info, crate::common::words(&[16, 7, 0, 1]));
    let fd = eventfd();
    client.set_irqs(0, EVENTFD | TRIGGER, 0, 1, &[fd.as_fd()]).ok();
    served.irqs.intx(true);
    served.irqs.intx(true);
    assert_eq!(take_signals(&fd), 1);
    // Unmasking signals again while INTx is asserted, and does not while it is not.
    client.set_irqs(0, NONE | UNMASK, 0, 1, &[]).ok();
    assert_eq!(take_signals(&fd), 1);
    served.irqs.intx(false);
    client.set_irqs(0, NONE | UNMASK, 0, 1, &[]).ok();
    assert_eq!(take_signals(&fd), 0);
    served.irqs.intx(true);
    assert_eq!(take_signals(&fd), 1);
    client.set_irqs(0, NONE | TRIGGER, 0, 0, &[]).ok();
}
