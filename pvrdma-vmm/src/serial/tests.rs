use std::os::unix::net::UnixListener;

use event_manager::{EventManager, SubscriberOps};

use super::*;

const DATA: u16 = 0;
const LINE_STATUS: u16 = 5;

fn read(port: &SocketPort, offset: u16) -> u8 {
    let mut data = [0];
    port.lock().unwrap().pio_read(PioAddress(0x2f8), offset, &mut data);
    data[0]
}

/// More data than the port can buffer arrives complete and in order, and is not read ahead of the guest.
#[test]
fn a_socket_feeds_the_port_as_fast_as_the_guest_reads() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("line");
    let listener = UnixListener::bind(&path).unwrap();
    let (port, _interrupt, input) = connected(&path, None).unwrap();
    let (mut other, _) = listener.accept().unwrap();
    let mut events: EventManager<Input> = EventManager::new().unwrap();
    events.add_subscriber(input);

    let sent: Vec<u8> = (0..200).collect();
    other.write_all(&sent).unwrap();
    let mut got = Vec::new();
    while got.len() < sent.len() {
        // Handles all ready events without blocking: the guest's reads make more events ready.
        while events.run_with_timeout(0).unwrap() > 0 {}
        assert_eq!(read(&port, LINE_STATUS) & 1, 1, "after {} bytes", got.len());
        while read(&port, LINE_STATUS) & 1 == 1 {
            got.push(read(&port, DATA));
        }
    }
    assert_eq!(got, sent);

    for byte in b"hello" {
        port.lock().unwrap().pio_write(PioAddress(0x2f8), DATA, &[*byte]);
    }
    let mut said = [0; 5];
    other.read_exact(&mut said).unwrap();
    assert_eq!(&said, b"hello");

    // A closed peer does not make the event loop spin.
    drop(other);
    while events.run_with_timeout(0).unwrap() > 0 {}
}

/// A driver reads a limited number of bytes and then checks whether more are pending. Without a positive answer it
/// waits for an interrupt, which does not come for bytes that have already arrived.
#[test]
fn a_driver_that_stops_reading_is_interrupted_for_the_rest() {
    const INTERRUPT_IDENTIFICATION: u16 = 2;
    const NOTHING: u8 = 0xc1;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("line");
    let listener = UnixListener::bind(&path).unwrap();
    let (port, interrupt, input) = connected(&path, None).unwrap();
    let (mut other, _) = listener.accept().unwrap();
    let mut events: EventManager<Input> = EventManager::new().unwrap();
    events.add_subscriber(input);
    let enable = |bits: u8| port.lock().unwrap().pio_write(PioAddress(0x2f8), INTERRUPT_ENABLE.into(), &[bits]);
    enable(ENABLE_RECEIVED);
    assert_eq!(read(&port, INTERRUPT_IDENTIFICATION), NOTHING);

    let sent: Vec<u8> = (0..200).collect();
    other.write_all(&sent).unwrap();
    let mut got = Vec::new();
    while got.len() < sent.len() {
        while events.run_with_timeout(0).unwrap() > 0 {}
        // One interrupt for the bytes that arrive at an empty port; after that each check of the driver gets an answer.
        assert_eq!(interrupt.read().unwrap(), 1, "after {} bytes", got.len());
        while read(&port, INTERRUPT_IDENTIFICATION) == RECEIVED {
            for _ in 0..7 {
                if read(&port, LINE_STATUS) & 1 == 1 {
                    got.push(read(&port, DATA));
                }
            }
        }
    }
    assert_eq!(got, sent);
    assert_eq!(read(&port, INTERRUPT_IDENTIFICATION), NOTHING);

    // Bytes that arrive while the interrupt is disabled are reported when it is enabled.
    enable(0);
    other.write_all(b"x").unwrap();
    while events.run_with_timeout(0).unwrap() > 0 {}
    assert_eq!(read(&port, INTERRUPT_IDENTIFICATION), NOTHING);
    assert!(interrupt.read().is_err());
    enable(ENABLE_RECEIVED);
    assert_eq!((interrupt.read().unwrap(), read(&port, INTERRUPT_IDENTIFICATION)), (1, RECEIVED));
    assert_eq!(read(&port, DATA), b'x');
}

#[test]
fn only_the_reset_command_resets() {
    let (mut line, event) = ResetLine::new().unwrap();
    let mut status = [0];
    line.pio_read(PioAddress(0x60), 4, &mut status);
    assert_eq!(status, [0xff]);
    for (offset, data) in [(0, &[0xfe][..]), (4, &[0xd1]), (4, &[0xfe, 0xfe])] {
        line.pio_write(PioAddress(0x60), offset, data);
    }
    assert!(event.read().is_err(), "nothing was signalled");
    line.pio_write(PioAddress(0x60), 4, &[0xfe]);
    assert_eq!(event.read().unwrap(), 1);
}

#[test]
fn a_port_that_leads_nowhere_is_named() {
    let error = connected(Path::new("/nowhere/line"), None).map(drop).unwrap_err();
    assert!(format!("{error:#}").contains("/nowhere/line"));
    let error = console(Some(Path::new("/nowhere/console")), None).map(drop).unwrap_err();
    assert!(format!("{error:#}").contains("/nowhere/console"));
}

/// A port continues with its registers and with the bytes that the guest has not read. A malformed state is refused.
#[test]
fn a_port_is_saved() {
    const INTERRUPT_ENABLE: u16 = 1;
    const SCRATCH: u16 = 7;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("line");
    let _listener = UnixListener::bind(&path).unwrap();
    let (port, _interrupt, _input) = connected(&path, None).unwrap();
    for (register, value) in [(INTERRUPT_ENABLE, 1), (SCRATCH, 0x5a)] {
        port.lock().unwrap().pio_write(PioAddress(0x2f8), register, &[value]);
    }
    port.lock().unwrap().0.enqueue_raw_bytes(b"left").unwrap();
    let saved = port.lock().unwrap().save();

    let (restored, interrupt, _input) = connected(&path, Some(&saved)).unwrap();
    assert_eq!(interrupt.read().unwrap(), 1, "the guest has not read the bytes");
    assert_eq!(restored.lock().unwrap().save(), saved);
    assert_eq!(read(&restored, SCRATCH), 0x5a);
    assert_eq!([(); 4].map(|()| read(&restored, DATA)), *b"left");

    let refuse = |saved: &Saved| assert!(connected(&path, Some(saved)).is_err(), "{saved:?}");
    refuse(&Saved { received: vec![0; FIFO + 1], ..saved.clone() });
    refuse(&Saved { registers: vec![0; 8], ..saved.clone() });
    refuse(&Saved { registers: vec![], ..saved });
}
