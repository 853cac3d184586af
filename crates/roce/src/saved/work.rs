//! Work requests.

use pvrdma_packet::MacAddr;
use pvrdma_pages::{PAGE_SIZE, PageList, PageListBuilder};
use pvrdma_saved_state::{pages, work as saved};
use pvrdma_verbs_types::{
    Access, FastRegister, Gid, Invalidate, Qpn, RecvWr, RemoteAddress, SendData, SendFlags, SendOp, SendWr, Sge,
    UdDestination,
};

use super::fields::{RestoreError, ensure, invalid, narrow};

/// Saves a send request.
pub fn save_send(wr: &SendWr) -> saved::SendWr {
    let SendWr { wr_id, op, flags, sges } = wr;
    let operation = match op {
        SendOp::Send { data, to } => {
            let (immediate, invalidate) = match data {
                SendData::None => (None, None),
                SendData::Immediate(bytes) => (Some(u32::from_le_bytes(*bytes)), None),
                SendData::Invalidate(key) => (None, Some(*key)),
            };
            saved::Operation::Send(saved::Send { immediate, invalidate, to: to.as_ref().map(save_destination) })
        }
        SendOp::Write { remote, immediate } => {
            let immediate = immediate.map(u32::from_le_bytes);
            saved::Operation::Write(saved::Write { remote: Some(save_remote(*remote)), immediate })
        }
        SendOp::Read { remote } => saved::Operation::Read(save_remote(*remote)),
        SendOp::CompareSwap { remote, compare, swap } => {
            let (remote, compare, swap) = (Some(save_remote(*remote)), *compare, *swap);
            saved::Operation::CompareSwap(saved::CompareSwap { remote, compare, swap })
        }
        SendOp::FetchAdd { remote, add } => {
            saved::Operation::FetchAdd(saved::FetchAdd { remote: Some(save_remote(*remote)), add: *add })
        }
        SendOp::LocalInvalidate(Invalidate { key }) => saved::Operation::LocalInvalidate(*key),
        SendOp::FastRegister(register) => {
            let FastRegister { key, iova, length, access, pages } = &**register;
            let pages = pages.as_ref().map(save_pages);
            let (key, iova, length, access) = (*key, *iova, *length, access.bits());
            saved::Operation::FastRegister(saved::FastRegister { key, iova, length, access, pages })
        }
        SendOp::Unsupported { opcode } => saved::Operation::Unsupported(*opcode),
        SendOp::Malformed => saved::Operation::Malformed(true),
    };
    let (flags, sges) = (flags.bits().into(), sges.iter().map(save_sge).collect());
    saved::SendWr { wr_id: *wr_id, flags, sges, operation: Some(operation) }
}

/// Restores a send request. The caller checks its number of SGEs.
///
/// # Errors
/// A value is not valid.
pub fn restore_send(work: saved::SendWr) -> Result<SendWr, RestoreError> {
    let saved::SendWr { wr_id, flags, sges, operation } = work;
    let bits = u8::try_from(flags).ok().and_then(SendFlags::from_bits);
    let op = match operation.ok_or(RestoreError::Missing { field: "operation" })? {
        saved::Operation::Send(saved::Send { immediate, invalidate, to }) => {
            let data = match (immediate, invalidate) {
                (None, None) => SendData::None,
                (Some(immediate), None) => SendData::Immediate(immediate.to_le_bytes()),
                (None, Some(key)) => SendData::Invalidate(key),
                (Some(_), Some(_)) => {
                    return Err(RestoreError::Contradiction("a SEND has immediate data and a key to invalidate"));
                }
            };
            SendOp::Send { data, to: to.map(restore_destination).transpose()? }
        }
        saved::Operation::Write(saved::Write { remote, immediate }) => {
            SendOp::Write { remote: restore_remote(remote)?, immediate: immediate.map(u32::to_le_bytes) }
        }
        saved::Operation::Read(remote) => SendOp::Read { remote: restore_remote(Some(remote))? },
        saved::Operation::CompareSwap(saved::CompareSwap { remote, compare, swap }) => {
            SendOp::CompareSwap { remote: restore_remote(remote)?, compare, swap }
        }
        saved::Operation::FetchAdd(saved::FetchAdd { remote, add }) => {
            SendOp::FetchAdd { remote: restore_remote(remote)?, add }
        }
        saved::Operation::LocalInvalidate(key) => SendOp::LocalInvalidate(Invalidate { key }),
        saved::Operation::FastRegister(saved::FastRegister { key, iova, length, access, pages }) => {
            let access = Access::from_bits(access).ok_or_else(|| invalid("access rights", access))?;
            let pages = pages.as_ref().map(restore_pages).transpose()?;
            SendOp::FastRegister(Box::new(FastRegister { key, iova, length, access, pages }))
        }
        saved::Operation::Unsupported(opcode) => SendOp::Unsupported { opcode },
        saved::Operation::Malformed(_) => SendOp::Malformed,
    };
    let flags = bits.ok_or_else(|| invalid("flags of a send request", flags))?;
    Ok(SendWr { wr_id, op, flags, sges: sges.iter().map(restore_sge).collect() })
}

/// Saves a receive request.
pub fn save_receive(wr: &RecvWr) -> saved::RecvWr {
    let RecvWr { wr_id, sges, malformed } = wr;
    saved::RecvWr { wr_id: *wr_id, sges: sges.iter().map(save_sge).collect(), malformed: *malformed }
}

/// Restores a receive request. The caller checks its number of SGEs.
pub fn restore_receive(work: &saved::RecvWr) -> RecvWr {
    let saved::RecvWr { wr_id, sges, malformed } = work;
    RecvWr { wr_id: *wr_id, sges: sges.iter().map(restore_sge).collect(), malformed: *malformed }
}

/// Saves a list of pages.
pub fn save_pages(list: &PageList) -> pages::PageList {
    let (first, count) = list.extents().iter().map(|extent| (extent.iova / PAGE_SIZE, extent.pages())).unzip();
    pages::PageList { first, count }
}

/// Restores a list of pages.
///
/// # Errors
/// An address or a number of pages is not valid.
pub fn restore_pages(list: &pages::PageList) -> Result<PageList, RestoreError> {
    let pages::PageList { first, count } = list;
    ensure(first.len() == count.len(), "the lists of pages and of their numbers have different lengths")?;
    let mut builder = PageListBuilder::default();
    for (&first, &count) in first.iter().zip(count) {
        let run = first.checked_mul(PAGE_SIZE).and_then(|iova| builder.push_run(iova, count).ok());
        run.ok_or_else(|| invalid("page number", first))?;
    }
    Ok(builder.finish())
}

const fn save_sge(sge: &Sge) -> saved::Sge {
    let Sge { addr, length, lkey } = *sge;
    saved::Sge { addr, length, lkey }
}

const fn restore_sge(sge: &saved::Sge) -> Sge {
    let saved::Sge { addr, length, lkey } = *sge;
    Sge { addr, length, lkey }
}

const fn save_remote(remote: RemoteAddress) -> saved::Remote {
    let RemoteAddress { addr, rkey } = remote;
    saved::Remote { addr, rkey }
}

fn restore_remote(remote: Option<saved::Remote>) -> Result<RemoteAddress, RestoreError> {
    let saved::Remote { addr, rkey } = remote.ok_or(RestoreError::Missing { field: "remote address" })?;
    Ok(RemoteAddress { addr, rkey })
}

fn save_destination(to: &UdDestination) -> saved::Destination {
    let UdDestination { qpn, qkey, sgid_index, dgid, dmac, service_level, traffic_class, flow_label, hop_limit } = *to;
    saved::Destination {
        qpn: qpn.get(),
        qkey,
        sgid_index: sgid_index.into(),
        dgid: dgid.0.to_vec(),
        dmac: dmac.0.to_vec(),
        service_level: service_level.into(),
        traffic_class: traffic_class.into(),
        flow_label,
        hop_limit: hop_limit.into(),
    }
}

fn restore_destination(to: saved::Destination) -> Result<UdDestination, RestoreError> {
    let saved::Destination { qpn, qkey, sgid_index, dgid, dmac, service_level, traffic_class, flow_label, hop_limit } =
        to;
    if flow_label > 0xf_ffff {
        return Err(invalid("flow label", flow_label));
    }
    Ok(UdDestination {
        qpn: restore_qpn(qpn)?,
        qkey,
        sgid_index: narrow("GID index", sgid_index)?,
        dgid: restore_gid(&dgid)?,
        dmac: restore_mac(&dmac)?,
        service_level: narrow("service level", service_level)?,
        traffic_class: narrow("traffic class", traffic_class)?,
        flow_label,
        hop_limit: narrow("hop limit", hop_limit)?,
    })
}

fn restore_qpn(value: u32) -> Result<Qpn, RestoreError> {
    let qpn = Qpn::new(value);
    if qpn.get() == value { Ok(qpn) } else { Err(invalid("QPN", value)) }
}

fn restore_gid(bytes: &[u8]) -> Result<Gid, RestoreError> {
    bytes.try_into().map(Gid).map_err(|_| invalid("length of a GID", bytes.len() as u64))
}

fn restore_mac(bytes: &[u8]) -> Result<MacAddr, RestoreError> {
    bytes.try_into().map(MacAddr).map_err(|_| invalid("length of a MAC address", bytes.len() as u64))
}
