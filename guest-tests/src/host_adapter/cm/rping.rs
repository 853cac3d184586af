//! `rping` as a guest's process would run it, over a connection made by the guest's connection manager.
//!
//! The client announces the place of a message, the server reads it and confirms; the client announces a free place,
//! the server writes the message there and confirms.

use std::net::Ipv4Addr;

use anyhow::{Result, ensure};
use pvrdma_dev::testing::{Placement, RecvWr, SendWr, status, wait_for, wc_opcode};
use pvrdma_verbs::Backend;

use super::cm_agent::CmAgent;
use crate::cli::RpingOptions;
use crate::device_pair::{Side, SideOptions};

/// The program's default.
pub(super) const PORT: u16 = 7174;
/// Size of an announcement in bytes: address, key, length, in network byte order.
const PLACE: usize = 16;
/// Offsets in the buffer: sent announcements, received announcements, the message, and the place for the returned
/// message.
const TOLD: usize = 0;
const HEARD: usize = 64;
const MESSAGE: usize = 4096;
const ROOM: usize = 1 << 16;
const BUFFER: usize = 1 << 18;

/// Our end.
struct Pinger {
    side: Side,
    /// Receives that have ended and were not waited for yet.
    heard: u32,
    /// Requests that have completed and were not awaited yet.
    done: u32,
}

/// Serves one client, which asks `count` times.
pub(super) fn serve<B: Backend<Hca: 'static>>(backend: &B, options: &RpingOptions) -> Result<()> {
    let count = options.count;
    let mut pinger = Pinger::new(backend, options)?;
    let mut agent = CmAgent::new(&pinger.side)?;
    println!("listening");
    let connection = agent.accept(PORT, &mut pinger.side)?;
    for round in 0..count {
        pinger.answer(round)?;
    }
    agent.wait_end(&connection, &pinger.side)?;
    // Queued messages are lost with the device: the answers to REQ and DREQ must have been sent before.
    wait_for("answers to leave", || pinger.side.counter("cm_sent").filter(|sent| *sent >= 2));
    pinger.check(&["cm_sent", "cm_received"], &["cm_refused", "cm_failed", "cm_overflow", "gsi_dropped"])
}

/// Asks a server `count` times.
pub(super) fn ask<B: Backend<Hca: 'static>>(backend: &B, options: &RpingOptions, server: Ipv4Addr) -> Result<()> {
    let RpingOptions { count, size, .. } = *options;
    let mut pinger = Pinger::new(backend, options)?;
    let mut agent = CmAgent::new(&pinger.side)?;
    let connection = agent.connect(server, PORT, &mut pinger.side)?;
    for round in 0..count {
        pinger.ask(round, size)?;
    }
    agent.disconnect(&connection)?;
    pinger.check(&["cm_sent", "cm_received"], &["cm_refused", "cm_failed", "cm_overflow", "gsi_dropped"])
}

/// Asks a server without a listener, which rejects.
pub(super) fn rejected<B: Backend<Hca: 'static>>(backend: &B, options: &RpingOptions, server: Ipv4Addr) -> Result<()> {
    let pinger = Pinger::new(backend, options)?;
    let mut agent = CmAgent::new(&pinger.side)?;
    agent.ask(server, PORT, &pinger.side)?;
    agent.wait_rejection()?;
    pinger.check(&["cm_sent", "cm_received"], &["cm_refused", "cm_connections"])
}

/// A request from an address that is not the guest's does not leave this process.
pub(super) fn refused<B: Backend<Hca: 'static>>(backend: &B, options: &RpingOptions, server: Ipv4Addr) -> Result<()> {
    let pinger = Pinger::new(backend, options)?;
    let mut agent = CmAgent::new(&pinger.side)?;
    agent.ask(server, PORT, &pinger.side)?;
    pinger.check(&["cm_refused"], &["cm_sent", "cm_failed"])
}

impl Pinger {
    fn new<B: Backend<Hca: 'static>>(backend: &B, options: &RpingOptions) -> Result<Self> {
        let RpingOptions { guest, in_place, .. } = *options;
        let options = SideOptions { in_place, listen: vec![PORT], ..SideOptions::new(BUFFER, Placement::Scattered) };
        let mut pinger = Self { side: Side::new(backend, guest, &options)?, heard: 0, done: 0 };
        pinger.side.qp.to_init(0xe)?;
        pinger.listen()?;
        Ok(pinger)
    }

    /// Checks which counters have increased and which have not.
    fn check(&self, moved: &[&str], still: &[&str]) -> Result<()> {
        for (names, wanted) in [(moved, true), (still, false)] {
            for name in names {
                let value = self.side.counter(name);
                ensure!(value.is_some_and(|value| (value > 0) == wanted), "{name} is {value:?}");
            }
        }
        Ok(())
    }

    fn listen(&mut self) -> Result<()> {
        let sge = self.side.buffer.sge(&self.side.mr, HEARD, PLACE);
        Ok(self.side.qp.post_recv(&[RecvWr::new(1, &[sge])])?)
    }

    /// Processes a completion.
    fn note(&mut self) -> Result<()> {
        let cqe = self.side.cq.wait();
        ensure!(cqe.status == status::SUCCESS, "{cqe:?}");
        if cqe.opcode == wc_opcode::RECV {
            ensure!(cqe.byte_len as usize == PLACE, "{cqe:?}");
            self.heard += 1;
        } else {
            self.done += 1;
        }
        Ok(())
    }

    fn request(&mut self, request: SendWr) -> Result<()> {
        self.side.qp.post_send(&[request])?;
        while self.done == 0 {
            self.note()?;
        }
        self.done -= 1;
        Ok(())
    }

    /// Announces a place in the buffer to the peer.
    fn tell(&mut self, at: usize, size: usize) -> Result<()> {
        let mut place = Vec::with_capacity(PLACE);
        place.extend_from_slice(&(self.side.buffer.va() + at as u64).to_be_bytes());
        place.extend_from_slice(&self.side.mr.rkey.to_be_bytes());
        place.extend_from_slice(&u32::try_from(size)?.to_be_bytes());
        self.side.buffer.write(TOLD, &place);
        self.request(SendWr::send(2, &[self.side.buffer.sge(&self.side.mr, TOLD, PLACE)]))
    }

    /// Waits for an announcement of the peer.
    fn hear(&mut self) -> Result<(u64, u32, usize)> {
        while self.heard == 0 {
            self.note()?;
        }
        self.heard -= 1;
        let place = self.side.buffer.read(HEARD, PLACE);
        self.listen()?;
        let (address, rest) = place.split_first_chunk().expect("sixteen bytes");
        let (key, rest) = rest.split_first_chunk().expect("eight bytes");
        let size = u32::from_be_bytes(rest.try_into()?);
        Ok((u64::from_be_bytes(*address), u32::from_be_bytes(*key), size as usize))
    }

    fn answer(&mut self, round: u32) -> Result<()> {
        let (address, key, size) = self.hear()?;
        ensure!(size <= BUFFER - MESSAGE, "a message of {size} bytes");
        let here = [self.side.buffer.sge(&self.side.mr, MESSAGE, size)];
        self.request(SendWr::read(3, &here, address, key))?;
        ensure!(
            self.side.buffer.read(MESSAGE, size).starts_with(text(round).as_bytes()),
            "the message of round {round}"
        );
        self.tell(MESSAGE, 0)?;
        let (address, key, room) = self.hear()?;
        ensure!(room == size, "room for {room} bytes instead of {size}");
        self.request(SendWr::write(4, &here, address, key))?;
        self.tell(MESSAGE, 0)
    }

    fn ask(&mut self, round: u32, size: usize) -> Result<()> {
        // A C string of letters, as the program has it.
        let mut message = text(round).into_bytes();
        message.extend((0_u8..26).cycle().map(|letter| b'A' + letter).take(size - message.len() - 1));
        message.push(0);
        self.side.buffer.write(MESSAGE, &message);
        self.tell(MESSAGE, size)?;
        self.hear()?;
        self.tell(ROOM, size)?;
        self.hear()?;
        ensure!(self.side.buffer.read(ROOM, size) == message, "the echoed data of round {round} differs");
        Ok(())
    }
}

fn text(round: u32) -> String {
    format!("rdma-ping-{round}: ")
}
