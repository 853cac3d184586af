//! Division of requests into packets (IBA 9.7.2, 9.4).

use pvrdma_verbs_types::{Mtu, RemoteAddress, SendData, SendFlags, SendOp, SendWr};

use crate::path::packets;
use crate::wire::{AtomicEth, Extension, Ieth, ImmDt, Opcode, Position, Reth};

/// One packet of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PacketPlan {
    /// Opcode in the BTH.
    pub opcode: Opcode,
    /// Extension headers.
    pub extension: Extension,
    /// Number of PSNs: more than one for a READ whose response has several packets.
    pub span: u32,
    /// Offset of the first payload byte in the message.
    pub offset: u64,
    /// Bytes of payload.
    pub len: u32,
    /// The response carries data. Only `max_rd_atomic` such requests may be outstanding.
    pub wants_data: bool,
    /// Solicited event.
    pub solicited: bool,
    /// The packet is the last of its message.
    pub ends_message: bool,
}

/// A request with the length of its message and its number of packets (PSNs).
#[derive(Clone, Copy, Debug)]
pub struct SizedWr<'a> {
    /// The request.
    pub wr: &'a SendWr,
    /// Length of its message in bytes.
    pub length: u32,
    /// Number of its PSNs.
    pub count: u32,
}

impl<'a> SizedWr<'a> {
    /// Creates a request with a message of `length` bytes over a path with this MTU. An empty message takes one packet.
    pub const fn new(wr: &'a SendWr, length: u32, mtu: Mtu) -> Self {
        Self { wr, length, count: packets(length, mtu) }
    }
}

impl PacketPlan {
    /// Plans the packet at index `index` of a request. `mtu` is in bytes; `read_span` is the largest number of PSNs
    /// that a READ request asks for. `None`: the request sends no packets, or fewer than that.
    pub fn new(request: &SizedWr<'_>, index: u32, mtu: u32, read_span: u32) -> Option<Self> {
        let offset = u64::from(index) * u64::from(mtu);
        let left = u32::try_from(u64::from(request.length).checked_sub(offset)?).ok()?;
        let len = left.min(mtu);
        let (first, last) = (index == 0, index.checked_add(1) == Some(request.count));
        let position = Position::of(first, last);
        let only = position == Position::Only;
        let mut plan = Self {
            opcode: Opcode::send(position),
            extension: Extension::None,
            span: 1,
            offset,
            len,
            wants_data: false,
            solicited: false,
            ends_message: last,
        };
        let solicited = last && request.wr.flags.contains(SendFlags::SOLICITED);
        match request.wr.op {
            SendOp::Send { data, .. } => {
                plan.solicited = solicited;
                match data {
                    SendData::Immediate(bytes) if last => {
                        plan.opcode = Opcode::send_immediate(only);
                        plan.extension = Extension::ImmDt(ImmDt(bytes));
                    }
                    SendData::Invalidate(rkey) if last => {
                        plan.opcode = Opcode::send_invalidate(only);
                        plan.extension = Extension::Ieth(Ieth { rkey });
                    }
                    _ => {}
                }
            }
            SendOp::Write { remote, immediate } => plan.write(request, remote, immediate, position),
            SendOp::Read { remote } => plan.read(request, remote, index, mtu, read_span),
            SendOp::CompareSwap { remote, compare, swap } => {
                (plan.opcode, plan.extension) = (Opcode::COMPARE_SWAP, atomic(remote, swap, compare));
                (plan.len, plan.wants_data) = (0, true);
            }
            SendOp::FetchAdd { remote, add } => {
                (plan.opcode, plan.extension) = (Opcode::FETCH_ADD, atomic(remote, add, 0));
                (plan.len, plan.wants_data) = (0, true);
            }
            SendOp::LocalInvalidate(_) | SendOp::FastRegister(_) | SendOp::Unsupported { .. } | SendOp::Malformed => {
                return None;
            }
        }
        Some(plan)
    }

    fn write(&mut self, request: &SizedWr<'_>, remote: RemoteAddress, immediate: Option<[u8; 4]>, position: Position) {
        let reth = Reth { address: remote.addr, rkey: remote.rkey, length: request.length };
        self.opcode = Opcode::write(position);
        match immediate.filter(|_| position.ends()) {
            Some(bytes) => {
                let (only, immediate) = (position.starts(), ImmDt(bytes));
                self.solicited = request.wr.flags.contains(SendFlags::SOLICITED);
                self.opcode = Opcode::write_immediate(only);
                self.extension = if only { Extension::RethImmDt(reth, immediate) } else { Extension::ImmDt(immediate) };
            }
            None if position.starts() => self.extension = Extension::Reth(reth),
            None => {}
        }
    }

    fn read(&mut self, request: &SizedWr<'_>, remote: RemoteAddress, index: u32, mtu: u32, read_span: u32) {
        self.span = read_span.min(request.count.saturating_sub(index));
        let left = request.length.saturating_sub(u32::try_from(self.offset).unwrap_or(u32::MAX));
        let length = left.min(self.span.saturating_mul(mtu));
        let address = remote.addr.wrapping_add(self.offset);
        self.opcode = Opcode::READ_REQUEST;
        self.extension = Extension::Reth(Reth { address, rkey: remote.rkey, length });
        (self.len, self.wants_data) = (0, true);
    }
}

const fn atomic(remote: RemoteAddress, swap_or_add: u64, compare: u64) -> Extension {
    Extension::AtomicEth(AtomicEth { address: remote.addr, rkey: remote.rkey, swap_or_add, compare })
}
