//! Two serial ports, and the reset line of the machine.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, bail};
use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use log::debug;
use vm_device::MutDevicePio;
use vm_device::bus::{PioAddress, PioAddressOffset};
use vm_superio::serial::{NoEvents, SerialEvents};
use vm_superio::{I8042Device, Serial, SerialState, Trigger};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::saved::messages::Serial as Saved;

/// An event in the form that the devices of `vm-superio` need.
#[derive(Debug)]
pub(crate) struct Line(EventFd);

impl Line {
    /// Creates an event without a listener.
    pub(crate) fn new() -> io::Result<Self> {
        EventFd::new(EFD_NONBLOCK).map(Self)
    }

    /// The event that it signals.
    pub(crate) const fn event(&self) -> &EventFd {
        &self.0
    }
}

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

type Output = Box<dyn Write + Send>;

/// A serial port on the bus.
pub(crate) struct Port<E: SerialEvents>(Serial<Line, E, Output>);

// Registers of a 16550A and their bits.
const INTERRUPT_ENABLE: u8 = 1;
const ENABLE_RECEIVED: u8 = 1;
const INTERRUPT_IDENTIFICATION: u8 = 2;
/// Value of the interrupt identification register: received data, from a port with FIFOs.
const RECEIVED: u8 = 0xc4;
const LINE_CONTROL: u8 = 3;
const DIVISOR_LATCH: u8 = 1 << 7;
/// Bytes that a port buffers for its guest.
const FIFO: usize = 64;

impl<E: SerialEvents> Port<E> {
    /// Returns `true` if received bytes are pending and the guest has enabled the interrupt for them.
    fn has_received(&mut self) -> bool {
        self.0.fifo_capacity() < FIFO
            && self.0.read(LINE_CONTROL) & DIVISOR_LATCH == 0
            && self.0.read(INTERRUPT_ENABLE) & ENABLE_RECEIVED != 0
    }

    /// Reads a register. `vm-superio` clears the "received data" condition as soon as one byte is read, even if more
    /// are pending. Linux's driver reads at most 256 bytes and then checks once more; if the condition is clear it
    /// waits for an interrupt that never comes. On a 16550A this condition lasts until the FIFO is empty.
    fn read(&mut self, register: u8) -> u8 {
        match register {
            INTERRUPT_IDENTIFICATION if self.has_received() => RECEIVED,
            _ => self.0.read(register),
        }
    }
}

impl<E: SerialEvents> Port<E> {
    /// Returns the state for a stream.
    pub(crate) fn save(&self) -> Saved {
        let SerialState {
            baud_divisor_low,
            baud_divisor_high,
            interrupt_enable,
            interrupt_identification,
            line_control,
            line_status,
            modem_control,
            modem_status,
            scratch,
            in_buffer,
        } = self.0.state();
        let registers = vec![
            baud_divisor_low,
            baud_divisor_high,
            interrupt_enable,
            interrupt_identification,
            line_control,
            line_status,
            modem_control,
            modem_status,
            scratch,
        ];
        Saved { registers, received: in_buffer }
    }
}

/// Decodes a saved port. Without one, the port is in its power-on state.
fn state(saved: Option<&Saved>) -> Result<SerialState> {
    let Some(Saved { registers, received }) = saved else { return Ok(SerialState::default()) };
    let &[
        baud_divisor_low,
        baud_divisor_high,
        interrupt_enable,
        interrupt_identification,
        line_control,
        line_status,
        modem_control,
        modem_status,
        scratch,
    ] = &registers[..]
    else {
        bail!("the state has {} registers of a serial port", registers.len())
    };
    Ok(SerialState {
        baud_divisor_low,
        baud_divisor_high,
        interrupt_enable,
        interrupt_identification,
        line_control,
        line_status,
        modem_control,
        modem_status,
        scratch,
        in_buffer: received.clone(),
    })
}

impl<E: SerialEvents> MutDevicePio for Port<E> {
    fn pio_read(&mut self, _base: PioAddress, offset: PioAddressOffset, data: &mut [u8]) {
        match (data, u8::try_from(offset)) {
            ([byte], Ok(offset)) => *byte = self.read(offset),
            (data, _) => data.fill(0xff),
        }
    }

    fn pio_write(&mut self, _base: PioAddress, offset: PioAddressOffset, data: &[u8]) {
        if let ([byte], Ok(offset)) = (data, u8::try_from(offset))
            && let Err(error) = self.0.write(offset, *byte)
        {
            // There is no reader at the other end.
            debug!("serial port: {error:?}");
        }
    }
}

/// The first port.
pub(crate) type Console = Arc<Mutex<Port<NoEvents>>>;

/// Creates the first port, whose output goes to a file or to standard output, in the saved state if there is one.
pub(crate) fn console(path: Option<&Path>, saved: Option<&Saved>) -> Result<(Console, EventFd)> {
    let output: Output = match path {
        Some(path) => {
            // Output from before a reset is kept.
            let file = File::options().create(true).append(true).open(path);
            Box::new(file.with_context(|| format!("cannot open the console {}", path.display()))?)
        }
        None => Box::new(io::stdout()),
    };
    let line = Line::new()?;
    let event = line.event().try_clone()?;
    let serial = Serial::from_state(&state(saved)?, line, NoEvents, output);
    let serial = serial.map_err(|error| anyhow::anyhow!("console: {error:?}"))?;
    Ok((Arc::new(Mutex::new(Port(serial))), event))
}

/// Event that is signalled when the guest has read all bytes.
pub(crate) struct Drained(EventFd);

impl SerialEvents for Drained {
    fn buffer_read(&self) {}

    fn out_byte(&self) {}

    fn tx_lost_byte(&self) {}

    fn in_buffer_empty(&self) {
        // The write fails only if the event was signalled 2^64 times without a read.
        let _ = self.0.write(1);
    }
}

/// A port whose other end is a socket.
pub(crate) type SocketPort = Arc<Mutex<Port<Drained>>>;

/// Feeds bytes from a socket to the guest, at the rate at which the guest reads them.
pub(crate) struct Input {
    port: SocketPort,
    from: File,
    drained: EventFd,
    /// The port is full: the socket is not read.
    paused: bool,
}

const INPUT: u32 = 0;
const DRAINED: u32 = 1;

/// Creates the second port, in the saved state if there is one, and its input. `path` is a Unix socket with a listener,
/// or a character device.
pub(crate) fn connected(path: &Path, saved: Option<&Saved>) -> Result<(SocketPort, EventFd, Input)> {
    let open = || -> io::Result<File> {
        if std::fs::metadata(path)?.file_type().is_socket() {
            return Ok(File::from(OwnedFd::from(UnixStream::connect(path)?)));
        }
        File::options().read(true).write(true).open(path)
    };
    let from = open().with_context(|| format!("cannot connect the serial port to {}", path.display()))?;
    let (line, drained) = (Line::new()?, EventFd::new(EFD_NONBLOCK)?);
    let event = line.event().try_clone()?;
    let output: Output = Box::new(from.try_clone()?);
    let serial = Serial::from_state(&state(saved)?, line, Drained(drained.try_clone()?), output);
    let serial = serial.map_err(|error| anyhow::anyhow!("serial port: {error:?}"))?;
    let port = Arc::new(Mutex::new(Port(serial)));
    Ok((Arc::clone(&port), event, Input { port, from, drained, paused: false }))
}

impl Input {
    /// Reads as many bytes as the port has room for.
    fn read(&mut self, ops: &mut EventOps<'_>) {
        let mut port = self.port.lock().unwrap_or_else(PoisonError::into_inner);
        let mut bytes = [0; FIFO];
        let room = port.0.fifo_capacity().min(FIFO);
        self.paused = room == 0;
        if self.paused {
            drop(port);
            self.watch(ops, EventSet::empty());
            return;
        }
        match bytes.get_mut(..room).map_or(Ok(0), |bytes| self.from.read(bytes)) {
            Ok(0) => {
                drop(port);
                // The peer has closed the connection. The guest continues without it.
                let _ = ops.remove(Events::empty(&self.from));
            }
            Ok(count) => {
                let _ = port.0.enqueue_raw_bytes(bytes.get(..count).unwrap_or_default());
            }
            Err(error) => debug!("serial port: {error}"),
        }
    }

    fn watch(&self, ops: &EventOps<'_>, events: EventSet) {
        if let Err(error) = ops.modify(Events::with_data(&self.from, INPUT, events)) {
            debug!("serial port: {error}");
        }
    }
}

impl MutEventSubscriber for Input {
    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        if events.data() == INPUT {
            return self.read(ops);
        }
        let _ = self.drained.read();
        if std::mem::take(&mut self.paused) {
            self.watch(ops, EventSet::IN);
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        let watched = [
            Events::with_data(&self.from, INPUT, EventSet::IN),
            Events::with_data(&self.drained, DRAINED, EventSet::IN),
        ];
        if let Err(error) = watched.into_iter().try_for_each(|events| ops.add(events)) {
            // Log: once in the life of a machine, and nothing of a guest is in it.
            log::error!("serial port on descriptor {}: {error}", self.from.as_raw_fd());
        }
    }
}

/// The keyboard controller. Only its reset line is implemented.
pub(crate) struct ResetLine(I8042Device<Line>);

impl ResetLine {
    /// Creates the controller. Returns it with the event that a reset signals.
    pub(crate) fn new() -> io::Result<(Self, EventFd)> {
        let line = Line::new()?;
        let event = line.event().try_clone()?;
        Ok((Self(I8042Device::new(line)), event))
    }
}

impl MutDevicePio for ResetLine {
    /// Reads as if no controller were present, so that drivers stop probing.
    fn pio_read(&mut self, _base: PioAddress, _offset: PioAddressOffset, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn pio_write(&mut self, _base: PioAddress, offset: PioAddressOffset, data: &[u8]) {
        if let ([byte], Ok(offset)) = (data, u8::try_from(offset)) {
            // The write fails only if the machine has been reset 2^64 times.
            let _ = self.0.write(offset, *byte);
        }
    }
}

#[cfg(test)]
mod tests;
