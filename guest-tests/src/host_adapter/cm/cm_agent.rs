//! A guest's connection manager: its queue pair, and one connection.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use pvrdma_dev::testing::{
    AddressHandle, Buffer, Cq, Cqe, Irqs, Mr, Path, Pd, Placement, Qp, QpInit, RecvWr, SendWr, status, wc_opcode,
};
use pvrdma_verbs_types::Gid;

use super::message::{Body, MAD, Message, Offer, Request};
use crate::device_pair::Side;

const QKEY: u32 = 0x8001_0000;
/// Size of the network header in front of received data.
const HEADER: usize = 40;
const RECEIVES: usize = 8;
const PAGE: usize = 4096;
/// Interrupt vector of completions.
const COMPLETIONS: usize = 2;
/// Number of waits for a message before the test fails.
const PATIENCE: u32 = 8;

/// Speaks for a guest.
pub(super) struct CmAgent {
    pd: Pd,
    cq: Cq,
    dma: Mr,
    qp: Qp,
    buffer: Buffer,
    irqs: Arc<Irqs>,
    address: Ipv4Addr,
    /// Messages that arrived before the code waited for them.
    early: Vec<Message>,
}

/// An established connection.
pub(super) struct Connection {
    transaction: u64,
    ours: u32,
    theirs: u32,
    peer: Gid,
    peer_qpn: u32,
}

impl CmAgent {
    pub(super) fn new(side: &Side) -> Result<Self> {
        let (pd, cq) = (side.driver.create_pd(None)?, side.driver.create_cq(None, 64)?);
        let dma = side.driver.dma_mr(&pd)?;
        let mut qp = side.driver.create_qp(&QpInit::gsi(&pd, &cq))?;
        qp.start_datagrams(QKEY)?;
        let buffer = side.driver.buffer((RECEIVES + 1) * PAGE, 0, Placement::Scattered);
        let (irqs, address) = (Arc::clone(side.driver.irqs()), Ipv4Addr::new(10, 0, 0, side.host));
        let mut agent = Self { pd, cq, dma, qp, buffer, irqs, address, early: Vec::new() };
        for slot in 0..RECEIVES {
            agent.post(slot)?;
        }
        Ok(agent)
    }

    /// Posts a receive for a page. Each receive has its own page; the last page is for sends.
    fn post(&mut self, slot: usize) -> Result<()> {
        let sge = self.buffer.dma_sge(self.dma.lkey, slot * PAGE, HEADER + MAD);
        Ok(self.qp.post_recv(&[RecvWr::new(slot as u64, &[sge])])?)
    }

    pub(super) fn send(&mut self, peer: Gid, message: &Message) -> Result<()> {
        let at = RECEIVES * PAGE;
        self.buffer.write(at, &message.encode());
        let sge = self.buffer.dma_sge(self.dma.lkey, at, MAD);
        self.qp.post_send(&[SendWr::datagram(0, &[sge], &AddressHandle::new(self.pd.handle, peer), 1, QKEY)])?;
        // Messages that arrive meanwhile are kept.
        while let Some(message) = self.next()? {
            self.early.push(message);
        }
        Ok(())
    }

    /// Returns the next message other than a request for more time.
    pub(super) fn receive(&mut self) -> Result<Message> {
        loop {
            let message = if self.early.is_empty() {
                match self.next()? {
                    Some(message) => message,
                    None => continue,
                }
            } else {
                self.early.remove(0)
            };
            if message.body != Body::Delay {
                return Ok(message);
            }
        }
    }

    /// Processes the next completion: returns a message, or `None` for a send.
    fn next(&mut self) -> Result<Option<Message>> {
        let cqe = self.completion()?;
        ensure!(cqe.status == status::SUCCESS, "the connection manager's queue pair: {cqe:?}");
        if cqe.opcode != wc_opcode::RECV {
            return Ok(None);
        }
        ensure!(cqe.byte_len as usize == HEADER + MAD && cqe.src_qp == 1, "{cqe:?}");
        let slot = usize::try_from(cqe.wr_id)?;
        let mad = self.buffer.read(slot * PAGE + HEADER, MAD);
        self.post(slot)?;
        Message::decode(&mad).map(Some)
    }

    /// Sleeps until there is a completion: a program on the other machine takes a while to start.
    fn completion(&mut self) -> Result<Cqe> {
        for _ in 0..PATIENCE {
            let seen = self.irqs.count(COMPLETIONS);
            self.cq.arm();
            if let Some(cqe) = self.cq.poll() {
                return Ok(cqe);
            }
            self.irqs.wait_beyond(COMPLETIONS, seen);
        }
        bail!("no message came")
    }

    /// Waits for a client that connects to a port, connects this queue pair to it, and confirms. Receives must be
    /// posted already.
    pub(super) fn accept(&mut self, port: u16, side: &mut Side) -> Result<Connection> {
        let asked = self.receive()?;
        let Body::Request(request) = asked.body else { bail!("instead of a request: {asked:?}") };
        ensure!(request.to == self.address && request.port == port, "for another port or address: {request:?}");
        let ours = offer(side);
        let connection = Connection {
            transaction: asked.transaction,
            ours: 0x5000 + u32::from(port),
            theirs: asked.from,
            peer: Gid::from(IpAddr::V4(request.from)),
            peer_qpn: request.offer.qpn,
        };
        connect(side, connection.peer, request.offer)?;
        self.say(&connection, Body::Reply(ours))?;
        let answer = self.receive()?;
        ensure!((answer.body, answer.to) == (Body::ReadyToUse, connection.ours), "instead of an RTU: {answer:?}");
        Ok(connection)
    }

    /// Asks an address for a connection.
    pub(super) fn ask(&mut self, to: Ipv4Addr, port: u16, side: &Side) -> Result<()> {
        let request = Request { offer: offer(side), port, from: self.address, to };
        let message = Message { transaction: TRANSACTION, from: ID, to: 0, body: Body::Request(request) };
        self.send(Gid::from(IpAddr::V4(to)), &message)
    }

    /// Waits for the answer of a host on which no program listens.
    pub(super) fn wait_rejection(&mut self) -> Result<()> {
        /// "Invalid service ID".
        const NO_LISTENER: u16 = 8;
        let answer = self.receive()?;
        ensure!((answer.body, answer.to) == (Body::Reject(NO_LISTENER), ID), "instead of a rejection: {answer:?}");
        Ok(())
    }

    /// Connects to an address. Receives must be posted already.
    pub(super) fn connect(&mut self, to: Ipv4Addr, port: u16, side: &mut Side) -> Result<Connection> {
        self.ask(to, port, side)?;
        let answer = self.receive()?;
        let Body::Reply(theirs) = answer.body else { bail!("instead of a reply: {answer:?}") };
        ensure!(answer.to == ID, "the reply is for another connection: {answer:?}");
        let (peer, theirs_id) = (Gid::from(IpAddr::V4(to)), answer.from);
        connect(side, peer, theirs)?;
        let connection =
            Connection { transaction: TRANSACTION, ours: ID, theirs: theirs_id, peer, peer_qpn: theirs.qpn };
        self.say(&connection, Body::ReadyToUse)?;
        Ok(connection)
    }

    /// Disconnects, and waits until the peer has done so, too.
    pub(super) fn disconnect(&mut self, connection: &Connection) -> Result<()> {
        self.say(connection, Body::Disconnect(connection.peer_qpn))?;
        let answer = self.receive()?;
        ensure!((answer.body, answer.to) == (Body::Disconnected, connection.ours), "instead of a DREP: {answer:?}");
        Ok(())
    }

    /// Waits until the peer ends a connection.
    pub(super) fn wait_end(&mut self, connection: &Connection, side: &Side) -> Result<()> {
        let message = self.receive()?;
        let wanted = (Body::Disconnect(side.qp.qpn), connection.ours);
        ensure!((message.body, message.to) == wanted, "instead of a DREQ: {message:?}");
        self.say(connection, Body::Disconnected)
    }

    fn say(&mut self, connection: &Connection, body: Body) -> Result<()> {
        let Connection { transaction, ours, theirs, .. } = *connection;
        self.send(connection.peer, &Message { transaction, from: ours, to: theirs, body })
    }
}

/// Communication id of the client.
const ID: u32 = 0x6001;
const TRANSACTION: u64 = 0x77_0000_0001;
const PSN: u32 = 0x12_3456;

fn offer(side: &Side) -> Offer {
    Offer { qpn: side.qp.qpn, psn: PSN, guid: 0x5254_00ff_fe00_0000 | u64::from(side.host) }
}

fn connect(side: &mut Side, peer: Gid, theirs: Offer) -> Result<()> {
    let path = Path { rq_psn: PSN, sq_psn: theirs.psn, max_rd_atomic: 1, ..Path::to(peer, theirs.qpn) };
    side.qp.to_rtr(&path)?;
    side.qp.to_rts(&path)?;
    Ok(())
}
