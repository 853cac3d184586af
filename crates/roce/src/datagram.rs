//! Unreliable datagrams: one packet a message, no answers (IBA 9.8.3).

use pvrdma_verbs::{NetworkType, Psn, Qpn, SendData, SendFlags, SendOp, SendWr, Sge, WcStatus};

use crate::ops::RequesterOps;
use crate::path::Path;
use crate::wire::{Bth, Deth, Extension, Grh, ImmDt, MAX_PAYLOAD, Opcode, Packet};

/// The sending side of a datagram QP.
#[derive(Clone, Copy, Debug)]
pub struct DatagramSender {
    qpn: Qpn,
    qkey: u32,
    psn: Psn,
    ident: u16,
}

impl DatagramSender {
    /// For a QP with this number, key and first PSN.
    pub const fn new(qpn: Qpn, qkey: u32, psn: Psn) -> Self {
        Self { qpn, qkey, psn, ident: 0 }
    }

    /// Builds the packet of a request whose path is known. The caller ends the request. Gives the length of the frame.
    ///
    /// # Errors
    /// The status that the request ends with: it is no datagram, is longer than `mtu`, or its memory cannot be read.
    pub fn send(
        &mut self,
        wr: &mut SendWr,
        path: &Path,
        mtu: u32,
        ops: &mut impl RequesterOps,
        out: &mut [u8],
    ) -> Result<usize, WcStatus> {
        let SendOp::Send { data, to: Some(to) } = wr.op else { return Err(WcStatus::LocalQpOperation) };
        ops.begin(wr)?;
        let length = Sge::total_length(&wr.sges);
        if length > u64::from(mtu) {
            return Err(WcStatus::LocalLength);
        }
        // A privileged key in the request stands for the QP's own (IBA 10.2.5).
        let qkey = if to.qkey & 1 << 31 == 0 { to.qkey } else { self.qkey };
        let deth = Deth { qkey, source: self.qpn };
        let (opcode, extension) = match data {
            SendData::None => (Opcode::UD_SEND, Extension::Deth(deth)),
            SendData::Immediate(bytes) => (Opcode::UD_SEND_IMMEDIATE, Extension::DethImmDt(deth, ImmDt(bytes))),
            SendData::Invalidate(_) => return Err(WcStatus::LocalQpOperation),
        };
        let mut bth = Bth::new(opcode, to.qpn, self.psn);
        bth.solicited = wr.flags.contains(SendFlags::SOLICITED);
        let payload_len = usize::try_from(length).map_err(|_| WcStatus::LocalLength)?;
        let mut frame = path.frame(&mut self.ident, bth, extension, payload_len, out).map_err(|_| WcStatus::General)?;
        ops.gather(&wr.sges, 0, frame.payload()).map_err(|_| WcStatus::LocalProtection)?;
        self.psn = self.psn.plus(1);
        Ok(frame.finish())
    }
}

/// A received datagram, for the engine to deliver.
#[derive(Clone, Copy, Debug)]
pub struct Datagram<'a> {
    /// Sender.
    pub source: Qpn,
    /// Must be the receiver's.
    pub qkey: u32,
    /// Immediate data.
    pub immediate: Option<[u8; 4]>,
    /// The sender asked for a solicited event.
    pub solicited: bool,
    /// What the header area holds.
    pub network: NetworkType,
    /// From the tag, if there is one.
    pub service_level: u8,
    /// The first 40 bytes of the receive.
    pub header: [u8; Grh::LEN],
    /// The bytes behind them.
    pub payload: &'a [u8],
}

impl<'a> Datagram<'a> {
    /// Takes a packet that [`super::admit`] let through. `None`: it is malformed, or longer than any path MTU.
    pub fn new(packet: &Packet<'a>) -> Option<Self> {
        let header = &packet.header;
        let deth = header.extension.deth()?;
        (packet.pad_is_right() && packet.payload.len() <= MAX_PAYLOAD).then(|| Self {
            source: deth.source,
            qkey: deth.qkey,
            immediate: header.extension.immediate(),
            solicited: header.bth.solicited,
            network: header.network.kind(),
            service_level: header.ethernet.vlan.map_or(0, |vlan| vlan.pcp),
            header: packet.grh_area(),
            payload: packet.payload,
        })
    }
}
