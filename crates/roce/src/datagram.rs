//! Unreliable datagrams: one packet per message, no responses (IBA 9.8.3).

use pvrdma_verbs::RequesterOps;
use pvrdma_verbs_types::{NetworkType, Psn, Qpn, SendData, SendFlags, SendOp, SendWr, Sge, WcStatus};

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
    /// Creates the sender of a QP with this number, Q_Key and first PSN.
    pub const fn new(qpn: Qpn, qkey: u32, psn: Psn) -> Self {
        Self { qpn, qkey, psn, ident: 0 }
    }

    /// PSN of the next packet.
    pub const fn psn(&self) -> Psn {
        self.psn
    }

    /// Builds the packet of a request whose path is known, with a path MTU of `mtu` bytes. The caller completes the
    /// request. Returns the length of the frame in bytes.
    ///
    /// # Errors
    /// The status that the request completes with: it is not a datagram, it is longer than `mtu`, or its memory cannot
    /// be read.
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
        // A Q_Key with the high bit set in the request selects the QP's own Q_Key (IBA 10.2.5).
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

/// A received datagram, ready for delivery.
#[derive(Clone, Copy, Debug)]
pub struct Datagram<'a> {
    /// QP of the sender.
    pub source: Qpn,
    /// Q_Key of the packet, which must equal that of the receiver (IBA 10.2.5).
    pub qkey: u32,
    /// Immediate data, in memory byte order.
    pub immediate: Option<[u8; 4]>,
    /// The sender asked for a solicited event.
    pub solicited: bool,
    /// Kind of header in the header area.
    pub network: NetworkType,
    /// Priority of the 802.1Q tag; 0 without a tag.
    pub service_level: u8,
    /// The first 40 bytes of the receive (IBA annex A17.4.5.1).
    pub header: [u8; Grh::LEN],
    /// Payload, which follows the header in the receive buffer.
    pub payload: &'a [u8],
}

impl<'a> Datagram<'a> {
    /// Interprets a packet that [`super::admit`] accepted. Returns `None` if it is malformed, or longer than any path
    /// MTU.
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
